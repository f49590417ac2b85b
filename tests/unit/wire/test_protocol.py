"""docs/protocol.md describes every message with all its fields, every kind of packet, and the limits as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wire.limits import FRAMES, HEADER_BYTES, HEADER_DEPTH, LIMITS, MIB
from wire.messages import BACKWARD, CONTROL, FORWARD, all_messages
from wire.packets import KINDS, Linked, Packet

PAGE = (Path(__file__).parent.parent.parent.parent / "docs" / "protocol.md").read_text()
SECTIONS = {
    match[1]: match[2]
    for match in re.finditer(r"^### `([a-z_]+)`\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
}
LANES = {CONTROL: "control", BACKWARD: "backward", FORWARD: "forward"}


def test_every_message_has_a_section_and_no_section_is_stale():
    missing, stale = set(all_messages()) - set(SECTIONS), set(SECTIONS) - set(all_messages())
    assert not missing, f"docs/protocol.md lacks: {sorted(missing)}"
    assert not stale, f"docs/protocol.md describes messages that don't exist: {sorted(stale)}"


@pytest.mark.parametrize("tag", all_messages())
def test_a_section_says_direction_lane_answer_and_every_field(tag):
    section, kind = SECTIONS.get(tag, ""), all_messages()[tag]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", section, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(kind.__struct_fields__), f"fields of `{tag}`, in their order"
    assert all(meaning.strip() for _, meaning in rows)
    assert re.search(r"\*\*Direction:\*\* \S+", section), f"`{tag}` needs a direction"
    assert f"**Lane:** {LANES[kind.lane]}" in section, f"`{tag}` travels on lane {LANES[kind.lane]}"
    assert re.search(r"\*\*Answer:\*\* \S+", section), f"`{tag}` needs an answer"


def test_every_kind_of_packet_is_in_the_table():
    for number, kind in KINDS.items():
        own = [name for name in kind.__struct_fields__ if name not in Packet.__struct_fields__]
        assert f"| {int(number)} | {kind.__name__.lower()} | `{', '.join(own)}` |" in PAGE
    assert set(Linked.__struct_fields__) - set(Packet.__struct_fields__) == {"stream", "yours", "acks"}


def test_the_limits_are_those_of_the_code():
    assert HEADER_BYTES == 64 << 10
    assert HEADER_DEPTH == 16
    for text in (
        f"| {FRAMES} | `FRAMES`",
        f"{LIMITS.window_bytes // MIB} MiB, {LIMITS.window_packets:,} packets | `Limits.window_bytes`",
        f"{LIMITS.queue_bytes // MIB // 1024} GiB, {LIMITS.queue_messages:,} packets | `Limits.queue_bytes`",
        f"{LIMITS.early_bytes // MIB} MiB, {LIMITS.early_packets:,} | `Limits.early_bytes`",
        f"{LIMITS.peers:,} | `Limits.peers`",
    ):
        assert text in PAGE, text
