"""The comparison with one process notices each of the mistakes that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from networks.graph import NodeId
from pnode import executor, program
from pnode.reference import Reference
from pnode.vnodes import VNodes
from tests.golden.cut import Cut, random_placement
from tests.golden.samples import FILES, Memory, read
from tests.golden.test_cut_equals_reference import difference


def unaligned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executor, "receive", lambda tensor, device: tensor.detach())


def unordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(program, "fork", lambda value, count: [value] * count)


def untidy_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(program, "tidy", lambda tensor: tensor)


def untidy_outputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(program, "_tidied", lambda call: call)


def tie_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VNodes, "add_tie_gradient", lambda self, user, tensor: None)


def tie_stale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VNodes, "set_tie_version", lambda self, owner, tensor: None)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (unaligned, "mlp"),
    (unordered, "moe"),
    (untidy_gradients, "views"),
    (untidy_outputs, "views"),
    (tie_forgotten, "gpt"),
    (tie_stale, "gpt"),
]


@pytest.mark.parametrize(("plant", "name"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = read(FILES[name], tmp_path, "train.microbatches=2")
    source = Memory(network)

    def differences() -> list[str]:
        reference = Reference(network, source)
        for step in range(3):
            reference.step(step)
        found: list[str] = []
        whole: dict[NodeId, dict[str, Tensor]] = reference.state()
        for seed in range(6):
            try:
                cut = Cut(network, source, random_placement(network, 3, seed))
                for step in range(3):
                    cut.step(step)
            except AssertionError as error:  # the harness refuses tensors that can't be sent as they are
                found.append(str(error))
                continue
            found += difference(cut.state(), whole)
        return found

    assert differences() == []
    plant(monkeypatch)
    assert differences() != []
