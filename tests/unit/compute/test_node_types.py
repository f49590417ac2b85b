"""Every node type keeps the rules of networks.types.base, and computes what its definition says."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from networks.graph import BATCH, TensorSpec
from networks.types import DTYPES, REGISTRY, RunContext, ShapeError, VNodeModule, generator_for, infer
from pnode.forks import tidy

NAMES = """linear embedding position layernorm rmsnorm attention relu gelu silu tanh sigmoid softmax dropout add mul
concat split reshape flatten transpose conv2d maxpool2d avgpool2d batchnorm2d mean cross_entropy mse"""


def f32(*shape: int | str) -> TensorSpec:
    return TensorSpec("float32", shape)


def i64(*shape: int | str) -> TensorSpec:
    return TensorSpec("int64", shape)


B = BATCH
CASES: list[tuple[str, dict[str, Any], list[TensorSpec]]] = [
    ("linear", {"in": 12, "out": 7}, [f32(B, 12)]),
    ("linear", {"in": 12, "out": 7, "bias": False}, [f32(B, 5, 12)]),
    ("embedding", {"num": 11, "dim": 6}, [i64(B, 5)]),
    ("position", {"num": 9, "dim": 6}, [i64(B, 5)]),
    ("layernorm", {"dim": 6}, [f32(B, 5, 6)]),
    ("rmsnorm", {"dim": 6}, [f32(B, 5, 6)]),
    ("attention", {"dim": 12, "heads": 3, "causal": True}, [f32(B, 5, 12)]),
    ("attention", {"dim": 12, "heads": 3, "dropout": 0.3}, [f32(B, 5, 12)]),
    ("attention", {"dim": 16, "heads": 4, "kv_heads": 2, "rotary": True, "causal": True}, [f32(B, 5, 16)]),
    ("attention", {"dim": 12, "heads": 3, "causal": True, "bias": False}, [f32(B, 1, 12)]),
    ("relu", {}, [f32(B, 5)]),
    ("gelu", {}, [f32(B, 5)]),
    ("gelu", {"approximate": "tanh"}, [f32(B, 5)]),
    ("silu", {}, [f32(B, 5)]),
    ("tanh", {}, [f32(B, 5)]),
    ("sigmoid", {}, [f32(B, 5)]),
    ("softmax", {}, [f32(B, 5)]),
    ("softmax", {"dim": 1}, [f32(B, 5, 3)]),
    ("dropout", {"p": 0.4}, [f32(B, 5)]),
    ("dropout", {"p": 0.0}, [f32(B, 5)]),
    ("add", {}, [f32(B, 5), f32(B, 5)]),
    ("add", {}, [f32(B, 5, 6), f32(5, 6)]),
    ("add", {}, [f32(B, 5)]),
    ("mul", {}, [f32(B, 5), f32(B, 1), f32(B, 5)]),
    ("mul", {}, [f32(B, 5)]),
    ("concat", {"dim": 1}, [f32(B, 5), f32(B, 2)]),
    ("concat", {"dim": 1}, [f32(B, 5)]),
    ("split", {"parts": 3}, [f32(B, 6)]),
    ("split", {"sizes": [1, 4], "dim": 1}, [f32(B, 5, 3)]),
    ("split", {"parts": 1}, [f32(B, 6)]),
    ("reshape", {"shape": [3, -1]}, [f32(B, 6)]),
    ("reshape", {"shape": [6]}, [f32(B, 6)]),
    ("flatten", {}, [f32(B, 3, 2)]),
    ("flatten", {}, [f32(B, 6)]),
    ("transpose", {}, [f32(B, 3, 2)]),
    ("transpose", {}, [f32(B, 1, 4)]),
    ("conv2d", {"in": 3, "out": 4, "padding": 1}, [f32(B, 3, 6, 6)]),
    ("conv2d", {"in": 4, "out": 4, "groups": 2, "stride": 2, "dilation": 2}, [f32(B, 4, 9, 9)]),
    ("maxpool2d", {}, [f32(B, 3, 6, 6)]),
    ("avgpool2d", {"kernel": 3, "stride": 1, "padding": 1}, [f32(B, 3, 6, 6)]),
    ("batchnorm2d", {"dim": 3}, [f32(B, 3, 6, 6)]),
    ("mean", {"dim": [2, 3]}, [f32(B, 3, 6, 6)]),
    ("mean", {"dim": 1, "keepdim": True}, [f32(B, 3, 6)]),
    ("cross_entropy", {}, [f32(B, 5, 7), i64(B, 5)]),
    ("cross_entropy", {"label_smoothing": 0.1}, [f32(B, 7), i64(B)]),
    ("mse", {}, [f32(B, 5), f32(B, 5)]),
]
IDS = [f"{name}-{place}" for place, (name, _, _) in enumerate(CASES)]


def build(name: str, params: dict[str, Any]) -> VNodeModule:
    kind = REGISTRY[name]
    module = kind.module(kind.params.model_validate(params))
    module.vnode, module.context = "n", RunContext(seed=1)
    with torch.no_grad():
        module.reset(lambda parameter: generator_for("test", name, parameter))
    return module


def sample(specs: Sequence[TensorSpec], batch: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for spec in specs:
        shape = [batch if extent == BATCH else int(extent) for extent in spec.shape]
        if spec.dtype == "int64":
            found.append(torch.randint(0, 5, shape, generator=generator))
        else:
            found.append(torch.randn(shape, generator=generator).requires_grad_())
    return found


def is_tidy(tensor: Tensor) -> bool:
    return tidy(tensor) is tensor


def test_the_registry_has_every_type_of_the_design() -> None:
    assert set(NAMES.split()) <= REGISTRY.keys()
    assert {name for name, _, _ in CASES} == REGISTRY.keys()
    for kind in REGISTRY.values():
        assert kind.doc
        kind.params.model_validate(kind.example)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("name", "params", "specs"), CASES, ids=IDS)
def test_a_type_keeps_its_declarations(name: str, params: dict[str, Any], specs: list[TensorSpec], batch: int) -> None:
    kind, module, inputs = REGISTRY[name], build(name, params), sample(specs, batch)
    before = [tensor.detach().clone() for tensor in inputs]
    made = module.bind()(*inputs)
    outputs = list(made) if isinstance(made, tuple) else [made]
    cost = infer(name, kind.params.model_validate(params), list(specs))
    assert [*cost.outputs] == kind.outputs(kind.params.model_validate(params))
    for output, spec in zip(outputs, cost.outputs.values(), strict=True):
        assert list(output.shape) == [batch if extent == BATCH else extent for extent in spec.shape]
        assert output.dtype == DTYPES[spec.dtype]
        assert all(output is not tensor for tensor in inputs)
        assert output.grad_fn is not None
        if kind.tidy_output:
            assert is_tidy(output), (output.stride(), output.storage_offset())
        memory = output.untyped_storage().data_ptr()
        assert all(memory != parameter.untyped_storage().data_ptr() for parameter in module.parameters())
    torch.autograd.backward([tidy(output) for output in outputs], [torch.randn_like(output) for output in outputs])
    for tensor, old in zip(inputs, before, strict=True):
        assert torch.equal(tensor.detach(), old), "changed an input in place"
    for port, tensor in zip(kind.inputs(kind.params.model_validate(params)) or "0123", inputs, strict=False):
        if tensor.is_floating_point() and port not in kind.closed:
            assert tensor.grad is not None
        if port in kind.closed:
            assert tensor.grad is None


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("name", "params", "specs"), CASES, ids=IDS)
def test_gradients_are_as_tidy_as_declared(
    name: str, params: dict[str, Any], specs: list[TensorSpec], batch: int
) -> None:
    """What really reaches a node's inputs, before autograd's accumulation makes a leaf's gradient contiguous."""
    kind, module = REGISTRY[name], build(name, params)
    seen: list[Tensor] = []
    inputs = []
    for tensor in sample(specs, batch):
        if tensor.requires_grad:
            tensor = tensor * 1.0
            tensor.register_hook(seen.append)
        inputs.append(tensor)
    made = module.bind()(*inputs)
    outputs = [tidy(output) for output in (made if isinstance(made, tuple) else [made])]
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    if kind.tidy_gradients:
        assert all(is_tidy(gradient) for gradient in seen)


@pytest.mark.parametrize(("name", "params", "specs"), CASES, ids=IDS)
def test_nothing_depends_on_torchs_own_random_numbers(
    name: str, params: dict[str, Any], specs: list[TensorSpec]
) -> None:
    state = torch.get_rng_state()
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = build(name, params)
        made = module(*sample(specs, 3))
        results.append([*module.state_dict().values(), *(made if isinstance(made, tuple) else [made])])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("name", "params", "specs", "text"),
    [
        ("linear", {"in": 256, "out": 10}, [f32(B, 128)], "expects (batch, 256), got (batch, 128)"),
        ("conv2d", {"in": 3, "out": 8}, [f32(B, 4, 8, 8)], "expects (batch, 3, 8, 8), got (batch, 4, 8, 8)"),
        ("conv2d", {"in": 3, "out": 8, "kernel": 9}, [f32(B, 3, 8, 8)], "a kernel that reaches over 9 is larger"),
        ("embedding", {"num": 3, "dim": 2}, [f32(B, 4)], "expects int64 (batch, 4), got float32 (batch, 4)"),
        ("position", {"num": 3, "dim": 2}, [i64(B, 4)], "expects (batch, at most 3), got (batch, 4)"),
        ("add", {}, [f32(B, 3), f32(B, 4)], "expects shapes that broadcast together, got (batch, 3) and (batch, 4)"),
        ("attention", {"dim": 10, "heads": 4}, [f32(B, 3, 10)], "dim 10 must divide by heads 4"),
        ("cross_entropy", {}, [f32(B, 3), i64(B, 3)], "expects targets (batch) for logits (batch, 3)"),
        ("cross_entropy", {}, [f32(B, 3), f32(B)], "expects int64 targets, got float32 (batch)"),
        ("mse", {}, [f32(B, 3), f32(B, 4)], "expects targets float32(batch, 3), got float32(batch, 4)"),
        ("split", {"parts": 4}, [f32(B, 6)], "expects a dim -1 that divides by 4, got (batch, 6)"),
        ("split", {"sizes": [4, 4]}, [f32(B, 6)], "expects sizes that sum to 6"),
        ("split", {}, [f32(B, 6)], "expects either parts (equal parts) or sizes"),
        ("reshape", {"shape": [4]}, [f32(B, 6)], "can't give 6 elements per sample, (batch, 6), the shape (4)"),
        ("flatten", {"start": 2}, [f32(B, 6)], "can't flatten dims 2 to -1 of (batch, 6)"),
        ("transpose", {"dim0": 0}, [f32(B, 6)], "dim 0 is not a dimension behind the batch"),
        ("softmax", {"dim": 3}, [f32(B, 6)], "dim 3 is not a dimension behind the batch"),
        ("mean", {"dim": [1, 1]}, [f32(B, 6)], "expects one or more different dims"),
        ("relu", {}, [i64(B, 6)], "expects float32 (batch, 6), got int64 (batch, 6)"),
        ("batchnorm2d", {"dim": 3}, [f32(B, 3)], "expects (batch, 3, height, width), got (batch, 3)"),
        ("concat", {}, [f32(B, 2, 3), f32(B, 3)], "expects (batch, 2, any) as from the first input, got (batch, 3)"),
    ],
)
def test_shape_errors_say_what_was_expected(
    name: str, params: dict[str, Any], specs: list[TensorSpec], text: str
) -> None:
    with pytest.raises(ShapeError) as caught:
        infer(name, REGISTRY[name].params.model_validate(params), specs)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("linear", {"in": "6", "out": 2}),
        ("linear", {"in": 6, "out": True}),
        ("linear", {"in": 6, "out": 2, "rellu": 1}),
        ("linear", {"in_": 6, "out": 2}),
        ("linear", {"in": 6, "out": 2, "init": {"type": "nrmal"}}),
        ("linear", {"in": 0, "out": 2}),
        ("dropout", {"p": 1.0}),
        ("dropout", {"p": float("nan")}),
    ],
)
def test_parameters_are_strict(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        REGISTRY[name].params.model_validate(params)


def test_huge_numbers_cost_nothing_and_are_refused_in_words() -> None:
    with pytest.raises(ShapeError, match="can't hold parameters as large as these"):
        infer("linear", REGISTRY["linear"].params.model_validate({"in": 2**40, "out": 2**40}), [f32(B, 2**40)])
    large = infer("attention", REGISTRY["attention"].params.model_validate({"dim": 8, "heads": 2}), [f32(B, 2**20, 8)])
    assert large.forward_flops > 2**44


def test_no_type_computes_while_shapes_are_inferred() -> None:
    """A first computation on the meta device would import torch's compiler: a second and more at every start."""
    program = """
import sys
import torch
before = set(sys.modules)
from networks.graph import TensorSpec
from networks.types import REGISTRY, infer
params = REGISTRY["attention"].params.model_validate({"dim": 8, "heads": 2, "causal": True})
infer("attention", params, [TensorSpec("float32", ("batch", 4, 8))])
assert not [name for name in set(sys.modules) - before if name.startswith(("torch._dynamo", "sympy"))]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_flops_of_matrix_products() -> None:
    linear = infer("linear", REGISTRY["linear"].params.model_validate({"in": 6, "out": 4}), [f32(B, 3, 6)])
    assert (linear.forward_flops, linear.backward_flops) == (3 * (2 * 6 * 4 + 4), 2 * 3 * (2 * 6 * 4 + 4))
    conv = infer(
        "conv2d", REGISTRY["conv2d"].params.model_validate({"in": 3, "out": 8, "bias": False}), [f32(B, 3, 5, 5)]
    )
    assert conv.forward_flops == 2 * 3 * 3 * 3 * 8 * 3 * 3


# ------------------------------------------------------------ definitions, written out


def test_attention_is_the_textbook_formula() -> None:
    """Grouped queries, rotary positions and causality, head by head, from the papers' formulas."""
    params = {"dim": 16, "heads": 4, "kv_heads": 2, "rotary": True, "rotary_base": 500.0, "causal": True}
    module, (x,) = build("attention", params), sample([f32(B, 6, 16)], 2)
    weights = dict(module.named_parameters())
    width = 4
    qkv = x @ weights["qkv_weight"].T + weights["qkv_bias"]
    q, k, v = qkv[..., :16], qkv[..., 16:24], qkv[..., 24:]

    def turned(head: Tensor) -> Tensor:
        result = torch.empty_like(head)
        for position in range(head.shape[1]):
            for pair in range(width // 2):
                angle = position * 500.0 ** (-2 * pair / width)
                a, b = head[:, position, pair], head[:, position, pair + width // 2]
                result[:, position, pair] = a * math.cos(angle) - b * math.sin(angle)
                result[:, position, pair + width // 2] = b * math.cos(angle) + a * math.sin(angle)
        return result

    heads = []
    with torch.no_grad():
        for head in range(4):
            shared = head // 2
            q_h = turned(q[..., head * width : (head + 1) * width])
            k_h = turned(k[..., shared * width : (shared + 1) * width])
            scores = q_h @ k_h.transpose(1, 2) / math.sqrt(width)
            scores = scores + torch.full((6, 6), float("-inf")).triu(1)
            heads.append(scores.softmax(-1) @ v[..., shared * width : (shared + 1) * width])
        want = torch.cat(heads, -1) @ weights["out_weight"].T + weights["out_bias"]
    torch.testing.assert_close(module(x).detach(), want, rtol=1e-5, atol=1e-6)


def test_attention_with_dropout_averages_to_attention_without() -> None:
    module, (x,) = (
        build("attention", {"dim": 12, "heads": 3, "dropout": 0.3, "causal": True}),
        sample([f32(B, 5, 12)], 2),
    )
    total = torch.zeros(2, 5, 12)
    with torch.no_grad():
        for step in range(2000):
            module.context.step = step
            total += module(x)
        module.context.training = False
        torch.testing.assert_close(total / 2000, module(x), rtol=0.05, atol=0.02)


def test_rmsnorm_is_the_formula_of_the_paper() -> None:
    module, (x,) = build("rmsnorm", {"dim": 6, "eps": 1e-3}), sample([f32(B, 6)], 3)
    want = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3)
    torch.testing.assert_close(module(x), want)


def test_batchnorm_statistics_follow_torch() -> None:
    module, theirs = build("batchnorm2d", {"dim": 3, "momentum": 0.2}), torch.nn.BatchNorm2d(3, momentum=0.2)
    for seed in range(3):
        (x,) = sample([f32(B, 3, 4, 4)], 5, seed)
        torch.testing.assert_close(module(x), theirs(x))
    buffers = dict(module.named_buffers())
    assert torch.equal(buffers["running_mean"], theirs.running_mean)  # type: ignore[arg-type]
    assert torch.equal(buffers["running_var"], theirs.running_var)  # type: ignore[arg-type]
    module.context.training = False
    theirs.eval()
    torch.testing.assert_close(module(x), theirs(x))


def test_losses_are_sums_over_counted_targets() -> None:
    logits, targets = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    targets[1, 2:] = -1
    kind = REGISTRY["cross_entropy"]
    params = kind.params()
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    count = kind.counts([logits, targets], params)
    assert count == 17
    torch.testing.assert_close(build("cross_entropy", {})(logits, targets) / count, mean)
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    count = REGISTRY["mse"].counts([x, y], REGISTRY["mse"].params())
    torch.testing.assert_close(build("mse", {})(x, y) / count, F.mse_loss(x, y))


@pytest.mark.parametrize(
    ("init", "mean", "std"),
    [
        (None, 0.0, (1 / 400) ** 0.5 / 3**0.5),
        ({"type": "normal", "std": 0.3, "mean": 0.5}, 0.5, 0.3),
        ({"type": "uniform", "low": 0.0, "high": 1.0}, 0.5, 12**-0.5),
        ({"type": "kaiming_normal"}, 0.0, (2 / 400) ** 0.5),
        ({"type": "kaiming_uniform", "nonlinearity": "linear"}, 0.0, (1 / 400) ** 0.5),
        ({"type": "xavier_normal"}, 0.0, (2 / 700) ** 0.5),
        ({"type": "xavier_uniform"}, 0.0, (2 / 700) ** 0.5),
        ({"type": "trunc_normal", "std": 1.0}, 0.0, 0.88),
        ({"type": "constant", "value": 3.0}, 3.0, 0.0),
        ({"type": "zeros"}, 0.0, 0.0),
        ({"type": "ones"}, 1.0, 0.0),
    ],
)
def test_initial_weights(init: dict[str, Any] | None, mean: float, std: float) -> None:
    module = build("linear", {"in": 400, "out": 300, **({"init": init} if init else {})})
    weights = dict(module.named_parameters())
    assert float(weights["weight"].detach().mean()) == pytest.approx(mean, abs=0.005)
    assert float(weights["weight"].detach().std()) == pytest.approx(std, rel=0.02, abs=1e-6)
    assert bool((weights["bias"] == 0).all()) == (init is not None)
