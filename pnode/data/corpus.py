"""Reading text: the same inputs give the same characters in the same order on every machine.

`python-stdlib` is the source of the standard library of the Python that runs this: files in order of their names,
without tests, IDLE, generated tables, third-party packages, and files with characters beyond ASCII (so that a
vocabulary of characters stays at most 100 large). It is there on every machine, without a download.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
import platform
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pnode.data.limits import LINE_BYTES, TEXT_BYTES
from wire.errors import BadFileError

STDLIB = "python-stdlib"
STDLIB_LIMIT_BYTES = 1_000_000
SEPARATOR = "<|endoftext|>"

_SKIPPED_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo",
    "ensurepip", "encodings", "pydoc_data", "lib-dynload", "msilib",
}  # fmt: skip


class DataError(BadFileError):
    """Data that can't be used as they are."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text, the digest of its UTF-8 bytes, and one line about it for people."""

    text: str
    digest: str
    info: str


def read_corpus(source: str, *, limit_bytes: int | None, special_tokens: tuple[str, ...] = ()) -> Corpus:
    """The text of `source`: `python-stdlib`, a text file, a folder of them, or a .jsonl file.

    Files of a folder and lines of a .jsonl follow each other, with `<|endoftext|>` between them if that is a special
    token. At most `limit_bytes` are read, cut after the last whole line. Raises DataError.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        limit = STDLIB_LIMIT_BYTES if limit_bytes is None else limit_bytes
        name, pieces = f"{STDLIB} of Python {platform.python_version()}", _stdlib(root)
    else:
        path, limit, name = Path(source).expanduser(), limit_bytes or TEXT_BYTES + 1, source
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            pieces = _folder(path)
        elif not stat.S_ISREG(mode):
            raise DataError(f"{source} is neither a file nor a folder")
        elif path.suffix == ".jsonl":
            pieces = _lines(path)
        else:
            pieces = iter([_read(path, limit)])
    separator = SEPARATOR if SEPARATOR in special_tokens else ""
    text, files, cut = _join(pieces, limit, separator)
    if limit_bytes is None and len(text) > TEXT_BYTES:
        raise DataError(f"{source} holds more than {TEXT_BYTES} bytes", hint="set data.limit_bytes, or use a .bin")
    if not text:
        raise DataError(f"{source} holds no text", hint="only UTF-8 text is read; nothing hidden, no links")
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    unit = "texts" if source.endswith(".jsonl") else "files"
    many = f", {files:,} {unit}" if files > 1 else ""
    return Corpus(text, digest, f"{name}{many}, {len(data):,} bytes{' (limited)' if cut else ''}, sha256 {digest[:12]}")


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        hint = f"a text file, a folder, .jsonl or .bin; {STDLIB!r} needs no file" if missing else ""
        raise DataError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}", hint=hint) from error


def _read(path: Path, limit_bytes: int) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(limit_bytes + 4)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) <= limit_bytes)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8 (0x{data[error.start]:02x})",
            hint="convert it, such as with `iconv -t utf-8`; tokens as uint16 belong in a .bin file",
        ) from error


def _stdlib(root: Path) -> Iterator[str]:
    for path in _files(root, ".py"):
        if path.name.startswith("_sysconfigdata"):
            continue
        data = path.read_bytes()
        if data.isascii() and b"\0" not in data:
            yield data.decode("ascii")


def _folder(root: Path) -> Iterator[str]:
    for path in _files(root, ""):
        try:
            text = _read(path, TEXT_BYTES)
        except DataError:
            continue
        if "\0" not in text:
            yield text


def _files(root: Path, suffix: str) -> Iterator[Path]:
    """Regular files below `root` in order of their relative names; nothing hidden, no links followed."""
    found: list[tuple[str, Path]] = []
    for place, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not (suffix and (name in _SKIPPED_FOLDERS or name.startswith("config-")))
        ]
        for name in files:
            path = Path(place, name)
            if name.endswith(suffix) and not name.startswith(".") and stat.S_ISREG(path.lstat().st_mode):
                found.append((path.relative_to(root).as_posix(), path))
    return (path for _, path in sorted(found))


def _lines(path: Path) -> Iterator[str]:
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(LINE_BYTES + 1)
            if not line:
                return
            if len(line) > LINE_BYTES:
                raise DataError(f"{path}:{number}: a line of more than {LINE_BYTES} bytes", hint="one document a line")
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not JSON: {error}") from error
            text = document.get("text") if isinstance(document, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{path}:{number}: expected an object with a string 'text'")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{path}:{number}: 'text' holds half of a surrogate pair") from error
            yield text


def _join(pieces: Iterator[str], limit_bytes: int, separator: str) -> tuple[str, int, bool]:
    """All pieces up to the limit, how many, and whether something was cut off."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        if parts and separator:
            piece = separator + piece
        elif parts and not parts[-1].endswith("\n"):
            piece = "\n" + piece
        length = len(piece.encode())
        if size + length > limit_bytes:
            room = piece.encode()[: limit_bytes - size].decode(errors="ignore")
            whole = room[: room.rfind("\n") + 1] or ("" if parts else room)
            return "".join([*parts, whole]), len(parts) + bool(whole), True
        parts.append(piece)
        size += length
    return "".join(parts), len(parts), False
