"""What a PNode remembers of its cluster: whole or as if absent, whatever happens to the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from pnode import remembered as module
from pnode.remembered import MAX_BYTES, Remembered, memory_file, recall, remember
from storage.sealed import seal
from storage.temporary import new_temporary

TOLD = "tcp://10.0.0.1:7700"
KNOWN = Remembered(TOLD, "c-1", 7, ["tcp://10.0.0.2:7700", "tcp://[::1]:7701"], "s3://b/p?endpoint=http://h:1")


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    file = memory_file(tmp_path, "p1")
    assert recall(file, TOLD) == (None, "")
    remember(file, KNOWN)
    assert recall(file, TOLD) == (KNOWN, "")
    later = msgspec.structs.replace(KNOWN, term=8, addresses=["tcp://10.0.0.3:1"])
    remember(file, later)
    assert recall(file, TOLD) == (later, "")
    assert os.listdir(tmp_path) == ["p1.member.json"]


def test_pnodes_that_share_a_home_have_files_of_their_own(tmp_path: Path) -> None:
    remember(memory_file(tmp_path, "p1"), KNOWN)
    assert recall(memory_file(tmp_path, "p2"), TOLD) == (None, "")


def test_it_is_about_one_orchestrator_option(tmp_path: Path) -> None:
    file = memory_file(tmp_path, "p1")
    remember(file, KNOWN)
    found, problem = recall(file, "tcp://10.9.9.9:7700")
    assert found is None
    assert TOLD in problem


def test_every_cut_and_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    file = memory_file(tmp_path, "p1")
    data = seal(KNOWN)
    for size in range(len(data) - 1):  # the last byte is the end of the line
        file.write_bytes(data[:size])
        assert recall(file, TOLD)[0] is None, size
        assert recall(file, TOLD)[1]
    for place in range(len(data) - 1):
        for bit in range(8):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            found, problem = recall(file, TOLD)
            assert (found is None and problem) or found == KNOWN, (place, bit)  # a hex digit may be of either case


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"cluster": ""}, "cluster ''"),
        ({"term": -1}, "term -1"),
        ({"addresses": []}, "can't be dialled"),
        ({"addresses": ["tcp://10.0.0.1:0"]}, "can't be dialled"),
        ({"addresses": ["ipc:///tmp/x"]}, "can't be dialled"),
        ({"addresses": [TOLD] * 9}, "can't be dialled"),
        ({"key": "k" * 39}, "key is none"),
        ({"told": "tcp://" + "h" * MAX_BYTES}, f"more than {MAX_BYTES} bytes"),
        ({"term": "7"}, "corrupt"),
        ({"more": 1}, "corrupt"),
    ],
)
def test_what_makes_no_sense_is_as_if_absent(tmp_path: Path, change: dict[str, object], says: str) -> None:
    file = memory_file(tmp_path, "p1")
    file.write_bytes(seal({**msgspec.to_builtins(KNOWN), **change}))
    found, problem = recall(file, TOLD)
    assert found is None
    assert says in problem


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_what_is_no_file_is_neither_waited_for_nor_followed(tmp_path: Path, what: str) -> None:
    file = memory_file(tmp_path, "p1")
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    else:
        remember(memory_file(tmp_path, "other"), KNOWN)
        file.symlink_to(memory_file(tmp_path, "other"))
    found, problem = recall(file, TOLD)
    assert found is None
    assert problem


@pytest.mark.parametrize("call", ["new_temporary", "fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_one(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = memory_file(tmp_path, "p1")
    remember(file, KNOWN)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module if call == "new_temporary" else module.os, call, full)
        with pytest.raises(OSError, match="No space"):
            remember(file, msgspec.structs.replace(KNOWN, term=8))
    assert recall(file, TOLD) == (KNOWN, "")
    assert os.listdir(tmp_path) == ["p1.member.json"]


def test_what_a_killed_process_left_is_swept_out(tmp_path: Path) -> None:
    _, left = new_temporary(tmp_path, hidden=True)
    left.close()
    remember(memory_file(tmp_path, "p1"), KNOWN)
    assert os.listdir(tmp_path) == ["p1.member.json"]
