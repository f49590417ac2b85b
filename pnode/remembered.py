"""What a PNode remembers of its cluster from one life to the next, so that it finds an orchestrator that has moved.

A small sealed file in the home folder, replaced as a whole. It holds no secret: a store's URL has none, as credentials
stay in the environment. It counts only for the `--orchestrator` that it was made under: who gives another address may
mean another cluster. What is damaged is as if absent.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from storage.sealed import seal, unseal
from storage.store import CorruptError
from storage.temporary import new_temporary, sweep
from wire.directory import is_address
from wire.keys import is_key
from wire.limits import ADDRESSES

MAX_BYTES = 16 * 1024
VERSION = 1


class Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which orchestrator was obeyed, where it was, and its store. `told`: what `--orchestrator` said."""

    told: str
    cluster: str
    term: int
    addresses: list[str]
    store: str = ""
    version: int = VERSION
    key: str = ""
    """The orchestrator's public key, where there are keys."""


def memory_file(home: Path, name: str) -> Path:
    """Where it is; PNodes may share a home."""
    return home / f"{name}.member.json"


def recall(path: Path, told: str) -> tuple[Remembered | None, str]:
    """What is remembered, or why nothing is: "" where there is no file."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"it can't be read: {error.strerror or error}"
    if len(data) > MAX_BYTES:
        return None, f"it has more than {MAX_BYTES} bytes"
    try:
        found = unseal(data, Remembered, key=path.name)
    except CorruptError as error:
        return None, error.message
    if problem := _problem(found):
        return None, problem
    if found.told != told:
        return None, f"it is about the cluster of --orchestrator {found.told}"
    return found, ""


def _at_once(path: str, flags: int) -> int:
    """Nothing that has this name is waited for, such as a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _problem(found: Remembered) -> str:
    if found.version != VERSION:
        return f"it has version {found.version}, version {VERSION} is known"
    if not found.cluster or found.term < 0:
        return f"it names the cluster {found.cluster!r} and the term {found.term}"
    if not 0 < len(found.addresses) <= ADDRESSES or not all(map(is_address, found.addresses)):
        return "its addresses can't be dialled"
    if found.key and not is_key(found.key):
        return "the orchestrator's key is none"
    return ""


def remember(path: Path, remembered: Remembered) -> None:
    """Replace the file. After a crash it's the old one or this one. Raises OSError."""
    sweep(path.parent)
    temporary, file = new_temporary(path.parent, hidden=True)
    try:
        with file:
            file.write(seal(remembered))
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
