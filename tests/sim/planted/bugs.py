"""The list of planted bugs: what each breaks, and where its edits are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.planted import control, numbers, saving, transport
from tests.sim.planted.edit import Edit


@dataclass(frozen=True, slots=True)
class Bug:
    """`name` for the command line, `breaks` for people, `edits` to be made in the shipped code."""

    name: str
    breaks: str
    edits: Callable[[], list[Edit]]


def _bug(edits: Callable[[], list[Edit]]) -> Bug:
    text = (edits.__doc__ or "").partition("\n")[0]
    return Bug(edits.__name__.replace("_", "-"), text, edits)


BUGS: list[Bug] = [
    _bug(edits)
    for edits in (
        transport.duplicate_update,
        transport.resend_dropped,
        transport.epoch_ignored,
        numbers.data_off_by_one,
        numbers.wrong_microbatch,
        numbers.count_lost,
        numbers.optimizer_not_restored,
        numbers.buffers_not_restored,
        numbers.tie_gradient_twice,
        numbers.wrong_cut_from_memory,
        saving.commit_before_upload,
        saving.head_before_manifest,
        saving.stale_head_accepted,
        saving.kept_part_pruned,
        saving.committed_too_early,
        saving.old_cut_resumed,
        control.grant_before_store,
        control.answer_before_store,
        control.incarnation_twice,
        control.term_not_raised,
        control.epoch_used_twice,
    )
]

MASKED: list[Bug] = [
    _bug(edits)
    for edits in (
        transport.old_epoch_taken, control.released_applies, control.dead_members_parts, control.hint_is_a_loss,
    )
]  # fmt: skip
"""Fences behind which another one stands: without them alone hardly anything goes wrong.

A replay is exact, so what an epoch that is over says is what the new one says too; slots take a message once and from
its sender only; and whoever was released has no peer that still answers.
"""
