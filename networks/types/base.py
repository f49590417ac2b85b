"""What every node type is made of: a parameter model, ports, a torch module, a shape check and a cost formula.

Rules that all types keep, so that a cut between two nodes never changes a number (DESIGN part 6):

- No in-place operation on an input or an output, and no output that shares memory with a parameter: outputs are sent
  without a copy while the optimizer already works.
- Each output is a tensor of its own in the autograd graph, never an input handed through.
- `tidy_output`: every output is contiguous with the usual strides and begins at its own storage. `tidy_gradients`: the
  same holds for the gradients that reach its inputs. A type that can't promise this says so, and the runtime copies.
- Randomness comes from `RunContext.mask`, never from torch's global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from networks.graph import TensorSpec
from networks.types.initial import Init
from wire.errors import BadFileError


class ShapeError(BadFileError):
    """A node got inputs that it can't take; the text says what it expects and what came."""


class NodeParams(BaseModel):
    """Base of each type's parameter model. Keys are as in the file (`in`, not `in_`): dump with `by_alias=True`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_alias=True, validate_by_name=False)


class WeightedParams(NodeParams):
    """Base of the parameter models of types that have weights."""

    init: Init | None = Field(
        default=None,
        description="how the weights start; the biases are then zero (default: as torch starts this layer)",
    )
    frozen: bool = Field(default=False, description="never train these weights")


class AttentionCache(Protocol):
    """Where an attention node keeps the keys and values of earlier positions of one request."""

    def extend(self, vnode: str, position: int, k_BHTE: Tensor, v_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append at `position` and return all keys and values so far."""


def generator_for(*key: object) -> torch.Generator:
    """A CPU generator that depends on nothing but `key`."""
    digest = blake2b("/".join(str(part) for part in key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(slots=True)
class RunContext:
    """What a node may know about the call that is being computed; one object, shared by all nodes of a process."""

    seed: int = 0
    replica: int = 0
    training: bool = True
    step: int = 0
    microbatch: int = 0
    update_buffers: bool = True
    position: int = 0
    cache: AttentionCache | None = None

    def mask(self, vnode: str, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        """A dropout mask scaled by 1 / (1 - rate), float32, the same on every device and in every placement."""
        generator = generator_for("mask", self.seed, self.replica, vnode, self.step, self.microbatch)
        keep = torch.empty(tuple(shape), dtype=torch.float32).bernoulli_(1.0 - rate, generator=generator)
        return keep.mul_(1.0 / (1.0 - rate)).to(like.device)


Call = Callable[..., Any]
"""A node's computation: tensors in the order of the input ports -> one tensor, or a tuple in the order of outputs."""


class VNodeModule(nn.Module):
    """The torch side of one node. `vnode` and `context` are set by whoever owns it."""

    vnode: str = ""
    context: RunContext = RunContext()

    def reset(self, initial: Callable[[str], torch.Generator]) -> None:
        """Give every parameter its first value; `initial(name)` is the generator for that parameter."""

    def bind(self) -> Call:
        """The computation as a plain callable; called once, after parameters have their final place."""
        return self.forward


Shapes = Sequence[TensorSpec]


def _no_check(params: Any, inputs: Shapes) -> None:
    return None


def same_as_input(params: Any, inputs: Shapes) -> list[TensorSpec]:
    """The output is like the first input."""
    return [inputs[0]]


def _unary_inputs(params: Any) -> list[str]:
    return ["x"]


def _one_output(params: Any) -> list[str]:
    return ["y"]


def _no_count(tensors: Sequence[Tensor], params: Any) -> int:
    raise TypeError("this type counts no targets")


@dataclass(frozen=True)
class NodeType:
    """One entry of the registry.

    `shapes`: what the outputs are, for inputs that passed `check`. `flops(params, inputs, outputs)`: floating-point
    operations of the forward pass for a batch of one, shapes with batch = 1. `closed`: input ports through which no
    gradient passes. `counts`: for a loss, the number of targets in its inputs. `tie`: the parameter that `tie`
    shares, if any. `backward`: cost of the backward pass over the forward.
    """

    name: str
    params: type[NodeParams]
    module: Callable[[Any], VNodeModule]
    doc: str
    family: str
    flops: Callable[[Any, Sequence[Sequence[int]], Sequence[Sequence[int]]], int]
    check: Callable[[Any, Shapes], None] = _no_check
    shapes: Callable[[Any, Shapes], list[TensorSpec]] = same_as_input
    inputs: Callable[[Any], list[str]] = _unary_inputs
    outputs: Callable[[Any], list[str]] = _one_output
    variadic: bool = False
    tie: str | None = None
    closed: frozenset[str] = frozenset()
    is_loss: bool = False
    counts: Callable[[Sequence[Tensor], Any], int] = _no_count
    tidy_output: bool = True
    tidy_gradients: bool = True
    backward: float = 2.0
    example: dict[str, Any] = field(default_factory=dict)

    @property
    def uses_tie(self) -> str | None:
        """Name of the parameter that `tie` shares, or None if this type can't be tied."""
        return self.tie


def dims_text(shape: Sequence[int | str]) -> str:
    """A shape as people write it: `(batch, 64, 256)`."""
    return f"({', '.join(str(extent) for extent in shape)})"


def expected(want: Sequence[int | str], got: TensorSpec) -> ShapeError:
    """The standard text of a shape error."""
    return ShapeError(f"expects {dims_text(want)}, got {dims_text(got.shape)}")


def need_last(spec: TensorSpec, size: int) -> None:
    """The input's last dimension must be `size`. Raises ShapeError."""
    need_float(spec)
    if not spec.shape:
        raise ShapeError(f"expects (batch, {size}), got a scalar")
    if spec.shape[-1] != size:
        raise expected((*spec.shape[:-1], size), spec)


def need_float(spec: TensorSpec) -> None:
    """The input must be float32 (`precision: bf16` casts by itself). Raises ShapeError."""
    if spec.dtype != "float32":
        raise ShapeError(f"expects float32 {dims_text(spec.shape)}, got {spec.dtype} {dims_text(spec.shape)}")


def need_integer(spec: TensorSpec) -> None:
    """The input must hold class or token numbers. Raises ShapeError."""
    if spec.dtype not in ("int64", "int32"):
        raise ShapeError(f"expects int64 {dims_text(spec.shape)}, got {spec.dtype} {dims_text(spec.shape)}")


def numel(shape: Sequence[int]) -> int:
    """Number of elements."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def per_element(cost: int) -> Callable[[Any, Sequence[Sequence[int]], Sequence[Sequence[int]]], int]:
    """A cost formula: so many operations per element of all outputs."""

    def flops(params: Any, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
        return cost * sum(numel(shape) for shape in outputs)

    return flops
