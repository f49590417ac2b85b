"""All VNodes of one session on one device: parameters, buffers, gradients, optimizer state, ties.

Only the compute thread touches them. A step runs `zero or more backward passes → report → update or discard`.
Ties: each use of a tied parameter is a leaf of its own with its own gradient; where the owner lives here too, the leaf
shares the owner's memory. Uses are added in the network's order, owner first, and the owner alone is updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from networks.graph import Node, NodeId
from networks.recipe import lr_at
from networks.types import REGISTRY, RunContext, VNodeModule, generator_for
from pnode.liveness import find_live
from pnode.optimize import Optimizer
from wire.errors import BadFileError, MisuseError

if TYPE_CHECKING:
    from networks.network import Network


class StateError(BadFileError):
    """A stored state does not fit the VNode it is meant for."""


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """What one step's gradients look like here: `norms` are (parameter index in network order, sum of squares).

    `culprit`: the VNode where a value stopped being finite, or "" if that happened elsewhere or not at all.
    """

    norms: list[tuple[int, float]]
    finite: bool
    culprit: str


@dataclass(slots=True)
class _Owned:
    """One parameter that this process updates."""

    index: int
    node: NodeId
    name: str
    parameter: nn.Parameter


@dataclass(slots=True)
class _Tie:
    """One other use of a tied parameter; `leaf` if that use is here."""

    user: NodeId
    owner: NodeId
    name: str
    leaf: nn.Parameter | None
    received: Tensor | None = None


@dataclass(frozen=True, slots=True)
class VNodeStats:
    """Numbers of one VNode for people. `gradient_norm`: last applied step, per target, before clipping."""

    weight_norm: float
    gradient_norm: float
    parameters: dict[str, list[int]]


@dataclass(slots=True)
class _Watch:
    """What was seen of values that are not finite during the running step."""

    culprit: NodeId | None = None
    incoming: bool = False
    seen: bool = field(default=False)


class VNodes:
    """The living nodes of one session in this process; see the module's docstring."""

    def __init__(
        self,
        network: Network,
        mine: Sequence[NodeId],
        *,
        device: torch.device,
        seed: int,
        replica: int = 0,
        trace: bool = False,
    ) -> None:
        self.network, self.graph, self.device, self.trace = network, network.graph, device, trace
        self.context = RunContext(seed=seed, replica=replica)
        self.order = {node.id: node.order for node in self.graph.nodes}
        self.liveness = find_live(self.graph)
        wanted = set(mine)
        self._nodes = {node.id: node for node in self.graph.nodes}
        self.modules: dict[NodeId, VNodeModule] = {
            node.id: self._build(node, seed) for node in self.graph.nodes if node.id in wanted
        }
        if unknown := wanted - set(self.modules):
            raise MisuseError(f"the network '{self.graph.name}' has no node {sorted(unknown)}")
        self._ties = [
            self._tie(self._nodes[owner], self._nodes[user], seed)
            for owner, users in self.graph.ties().items()
            for user in users
            if owner in wanted or user in wanted
        ]
        for module in self.modules.values():
            _move(module, device)
        for tie in self._ties:
            self._place_leaf(tie)
        self._owned = list(self._find_owned())
        self._by_node: dict[NodeId, list[_Owned]] = {}
        for owned in self._owned:
            self._by_node.setdefault(owned.node, []).append(owned)
        self._trained = [owned for owned in self._owned if owned.parameter.requires_grad]
        self._optimizer = Optimizer(network.recipe.optimizer, [owned.parameter for owned in self._trained])
        self._squares: dict[int, float] = {}
        self._last_norms: dict[NodeId, float] = {}
        self._last_gradients: dict[NodeId, dict[str, Tensor]] = {}
        self.watch = _Watch()

    # ------------------------------------------------------------ building

    def _build(self, node: Node, seed: int) -> VNodeModule:
        module = REGISTRY[node.type].module(node.params)
        module.vnode, module.context = node.id, self.context
        with torch.no_grad():
            module.reset(lambda name: generator_for("init", seed, node.id, name))
        if getattr(node.params, "frozen", False):
            module.requires_grad_(False)
        return module

    def _tie(self, owner: Node, user: Node, seed: int) -> _Tie:
        name = REGISTRY[user.type].tie
        assert name is not None
        if user.id not in self.modules:
            return _Tie(user.id, owner.id, name, None)
        if owner.id not in self.modules:
            weight = self._build(owner, seed).get_parameter(REGISTRY[owner.type].tie or name)
            self.modules[user.id].register_parameter(name, nn.Parameter(weight.detach(), _learns(weight, user)))
        return _Tie(user.id, owner.id, name, self.modules[user.id].get_parameter(name))

    def _place_leaf(self, tie: _Tie) -> None:
        """After everything is on the device: make the use share its owner's memory where both are here."""
        if tie.user not in self.modules:
            return
        user = self.modules[tie.user]
        if tie.owner in self.modules:
            weight = self._tied_parameter(tie.owner)
            tie.leaf = nn.Parameter(weight.detach(), _learns(weight, self._nodes[tie.user]))
            user.register_parameter(tie.name, tie.leaf)
        else:
            tie.leaf = user.get_parameter(tie.name)

    def _tied_parameter(self, owner: NodeId) -> nn.Parameter:
        name = REGISTRY[self._nodes[owner].type].tie
        assert name is not None
        return self.modules[owner].get_parameter(name)

    def _find_owned(self) -> Iterator[_Owned]:
        index = 0
        for node in self.graph.nodes:
            shared = REGISTRY[node.type].tie if node.tie is not None else None
            names = [name for name in self.graph.costs[node.id].parameters if name != shared]
            module = self.modules.get(node.id)
            for name in names:
                if module is not None:
                    yield _Owned(index, node.id, name, module.get_parameter(name))
                index += 1

    # ------------------------------------------------------------ state

    def state(self, vnode: str) -> dict[str, Tensor]:
        """All that a checkpoint must hold of this VNode, as copies on the CPU; empty if it has no state.

        Keys: `param.<name>`, `buffer.<name>`, `optim.<what>.<name>`. A tied weight belongs to its owner's state.
        """
        return {key: tensor.detach().to("cpu", copy=True) for key, tensor in self._tensors(NodeId(vnode)).items()}

    def state_bytes(self, vnode: str) -> int:
        """Bytes of all that `state` gives."""
        return sum(tensor.nbytes for tensor in self._tensors(NodeId(vnode)).values())

    def load_state(self, vnode: str, state: Mapping[str, Tensor]) -> None:
        """Replace the VNode's state. Raises StateError naming the key that is missing, unexpected or unlike."""
        here = self._tensors(NodeId(vnode))
        missing, extra = sorted(here.keys() - state.keys()), sorted(state.keys() - here.keys())
        if missing or extra:
            what = f"{missing} missing" if missing else f"{extra} not expected"
            raise StateError(
                f"stored state of '{vnode}': {what}", hint="was it saved by another version of the network?"
            )
        for key, tensor in here.items():
            new = state[key]
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise StateError(
                    f"stored state of '{vnode}': {key}: expected {tensor.dtype} {tuple(tensor.shape)}, "
                    f"got {new.dtype} {tuple(new.shape)}"
                )
        with torch.no_grad():
            for key, tensor in here.items():
                if not key.startswith("optim."):
                    tensor.copy_(state[key])
            for owned in self._by_node.get(NodeId(vnode), ()):
                if owned.parameter.requires_grad:
                    for what in self._optimizer.names:
                        self._optimizer.load(owned.parameter, what, state[f"optim.{what}.{owned.name}"])

    def _tensors(self, vnode: NodeId) -> dict[str, Tensor]:
        if vnode not in self.modules:
            raise MisuseError(f"VNode '{vnode}' is not on this PNode")
        found: dict[str, Tensor] = {}
        for owned in self._by_node.get(vnode, ()):
            found[f"param.{owned.name}"] = owned.parameter
            if owned.parameter.requires_grad:
                for what in self._optimizer.names:
                    found[f"optim.{what}.{owned.name}"] = self._optimizer.state(owned.parameter, what)
        for name, buffer in self.modules[vnode].named_buffers():
            found[f"buffer.{name}"] = buffer
        return found

    # ------------------------------------------------------------ ties across processes

    def _find_tie(self, user: str) -> _Tie:
        for tie in self._ties:
            if tie.user == user:
                return tie
        raise MisuseError(f"VNode '{user}' uses no tied weight that lives here")

    def tie_gradient(self, user: str) -> Tensor | None:
        """The gradient that this use gathered over the step; None if there is none."""
        leaf = self._find_tie(user).leaf
        assert leaf is not None
        return leaf.grad

    def add_tie_gradient(self, user: str, tensor: Tensor) -> None:
        """At the owner: the gradient of a use that is in another process."""
        tie = self._find_tie(user)
        weight = self._tied_parameter(tie.owner)
        if tensor.shape != weight.shape or tensor.dtype != weight.dtype:
            raise MisuseError(f"tie gradient of '{user}': expected {tuple(weight.shape)}, got {tuple(tensor.shape)}")
        tie.received = tensor.detach().to(self.device, copy=True)

    def tie_version(self, owner: str) -> Tensor:
        """A copy of the owner's weight, for uses in other processes."""
        return self._tied_parameter(NodeId(owner)).detach().clone()

    def set_tie_version(self, owner: str, tensor: Tensor) -> None:
        """At a use in another process than its owner: the weight after the owner's update (or from a checkpoint)."""
        with torch.no_grad():
            for tie in self._ties:
                if tie.owner == owner and tie.owner not in self.modules and tie.leaf is not None:
                    if tensor.shape != tie.leaf.shape or tensor.dtype != tie.leaf.dtype:
                        raise MisuseError(
                            f"version of '{owner}': expected {tuple(tie.leaf.shape)}, got {tuple(tensor.shape)}"
                        )
                    tie.leaf.copy_(tensor)

    def _sum_ties(self) -> None:
        for tie in self._ties:
            if tie.owner not in self.modules:
                continue
            gradient = tie.leaf.grad if tie.leaf is not None else tie.received
            if gradient is not None:
                weight = self._tied_parameter(tie.owner)
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            tie.received = None
            if tie.leaf is not None:
                tie.leaf.grad = None

    # ------------------------------------------------------------ the end of a step

    def report(self) -> GradientSummary:
        """Add up the uses of tied weights and measure the gradients; once per step, after all backward passes."""
        self._sum_ties()
        with_gradient = [owned for owned in self._trained if owned.parameter.grad is not None]
        norms: list[tuple[int, float]] = []
        if with_gradient:
            sizes = torch.stack(torch._foreach_norm([_gradient(owned) for owned in with_gradient])).tolist()
            norms = [(owned.index, size * size) for owned, size in zip(with_gradient, sizes, strict=True)]
        bad = [owned for owned, (_, square) in zip(with_gradient, norms, strict=True) if not square < float("inf")]
        self._squares = dict(norms)
        culprit: str = self.watch.culprit or ""
        if not culprit and bad and not self.watch.incoming:
            culprit = max(bad, key=lambda owned: owned.index).node
        return GradientSummary(norms, not bad and not self.watch.seen, culprit)

    def update(self, step: int, scale: float, count: int = 0) -> None:
        """U(step): multiply the gradients by `scale` (clip coefficient / targets) and step; `count`: the targets.

        `report` must have been called.
        """
        with_gradient = [owned for owned in self._trained if owned.parameter.grad is not None]
        gradients = [_gradient(owned) for owned in with_gradient]
        unit = 1.0 / count if count else scale
        self._last_norms = self._norms_by_node(unit)
        if self.trace:
            self._last_gradients = self._copy_gradients(unit)
        if gradients:
            torch._foreach_mul_(gradients, scale)
            self._clip_locally(with_gradient, scale)
            self._optimizer.step(lr_at(self.network.recipe, step))
        self.discard()

    def discard(self) -> None:
        """Drop the gradients: the step is over, or will not be applied."""
        for owned in self._trained:
            owned.parameter.grad = None
        for tie in self._ties:
            tie.received = None
            if tie.leaf is not None:
                tie.leaf.grad = None
        self.watch = _Watch()

    def _clip_locally(self, with_gradient: Sequence[_Owned], scale: float) -> None:
        limit = self.network.recipe.optimizer.clip_local
        if limit is None:
            return
        norms = self._norms_by_node(scale)
        for owned in with_gradient:
            coefficient = limit / (norms[owned.node] + 1e-6)
            if coefficient < 1.0:
                _gradient(owned).mul_(coefficient)

    def _norms_by_node(self, unit: float) -> dict[NodeId, float]:
        squares: dict[NodeId, float] = {}
        for owned in self._trained:
            if owned.index in self._squares:
                squares[owned.node] = squares.get(owned.node, 0.0) + self._squares[owned.index]
        return {node: total**0.5 * unit for node, total in squares.items()}

    def _copy_gradients(self, unit: float) -> dict[NodeId, dict[str, Tensor]]:
        found: dict[NodeId, dict[str, Tensor]] = {}
        for owned in self._trained:
            gradient = owned.parameter.grad
            copy = torch.zeros_like(owned.parameter) if gradient is None else gradient * unit
            found.setdefault(owned.node, {})[owned.name] = copy.detach().cpu()
        return found

    # ------------------------------------------------------------ for people and for checks

    def gradients(self, vnode: str) -> dict[str, Tensor]:
        """Gradients of the last update per target, before clipping, zeros where none came; only with `trace`."""
        return self._last_gradients.get(NodeId(vnode), {})

    def stats(self) -> dict[str, VNodeStats]:
        """Norms and shapes of each VNode here."""
        found: dict[str, VNodeStats] = {}
        for node in self.modules:
            owned = self._by_node.get(node, [])
            squares = sum(float(each.parameter.detach().norm()) ** 2 for each in owned)
            shapes = {each.name: list(each.parameter.shape) for each in owned}
            found[node] = VNodeStats(squares**0.5, self._last_norms.get(node, 0.0), shapes)
        return found

    @property
    def parameters(self) -> list[tuple[int, NodeId, str, nn.Parameter]]:
        """Owned parameters: index in network order, VNode, name, tensor."""
        return [(owned.index, owned.node, owned.name, owned.parameter) for owned in self._owned]


def _move(module: VNodeModule, device: torch.device) -> None:
    for name, parameter in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
    for name, buffer in list(module.named_buffers()):
        module.register_buffer(name, buffer.to(device))


def _learns(weight: nn.Parameter, user: Node) -> bool:
    return weight.requires_grad and not getattr(user.params, "frozen", False)


def _gradient(owned: _Owned) -> Tensor:
    gradient = owned.parameter.grad
    assert gradient is not None
    return gradient
