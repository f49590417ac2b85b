"""The key pair of a process, and where it is kept. CURVE (curve25519) is ZeroMQ's; nothing here computes anything.

`<home>/keys/curve.key` holds one pair, readable by its owner only. A file that others can read is refused, since its
secret may be known already. A `Secret` never shows itself: not in logs, errors, tracebacks or messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wire.errors import BadFileError, MisuseError

KEY_FILE = Path("keys") / "curve.key"
MAX_FILE_BYTES = 4096

_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyFileError(BadFileError):
    """The file of a key pair can't be used as it is."""


def is_key(text: str) -> bool:
    """Whether it has the form of a key: 32 bytes in Z85."""
    return _KEY.fullmatch(text) is not None


def checked_key(text: str, what: str = "key") -> str:
    """`text` itself. Raises `MisuseError`, without showing it."""
    if not is_key(text):
        raise MisuseError(f"the {what} is not a key: expected 40 characters of Z85, got {len(text)}")
    return text


class Secret:
    """The secret half of a pair; only `reveal` shows it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = checked_key(text, "secret key")

    def reveal(self) -> str:
        """The key in Z85."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text, other._text)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> NoReturn:
        raise MisuseError("a secret is not copied or sent")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key in Z85 and its secret."""

    public: str
    secret: Secret

    @staticmethod
    def new() -> KeyPair:
        """A fresh pair, from the system's random numbers."""
        import zmq

        public, secret = zmq.curve_keypair()
        return KeyPair(public.decode(), Secret(secret.decode()))

    @staticmethod
    def of_secret(secret: str) -> KeyPair:
        """The pair that a secret belongs to. Raises `MisuseError`."""
        import zmq

        hidden = Secret(secret)
        return KeyPair(zmq.curve_public(secret.encode()).decode(), hidden)


def fingerprint(public: str) -> str:
    """A public key for people: the first 16 hex digits of the SHA-256 of its 32 bytes, in groups of four.

    "none" for what is no key, since refusals are told of whatever came."""
    from zmq.utils import z85

    if not is_key(public):
        return "none"
    found = hashlib.sha256(z85.decode(public.encode())).hexdigest()
    return "-".join(found[start : start + 4] for start in range(0, 16, 4))


def load(home: Path) -> KeyPair | None:
    """The pair kept in a home folder, None if there is none. Raises `KeyFileError`."""
    file = home / KEY_FILE
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyFileError(f"can't read {file}: {error.strerror}", hint="it must be a file of your own") from error
    with open(descriptor, "rb") as opened:
        _check(file, os.fstat(descriptor), "600")
        _check(file.parent, os.stat(file.parent), "700")
        data = opened.read(MAX_FILE_BYTES + 1)
    try:
        raw: Any = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
        pair = KeyPair.of_secret(raw["secret"])
        fits = pair.public == raw["public"]
    except (ValueError, TypeError, KeyError, MisuseError):
        fits = False
    if not fits:
        raise KeyFileError(f"{file} does not hold a key pair", hint="restore it; or move it away, and join anew")
    return pair


def load_or_make(home: Path) -> KeyPair:
    """The pair kept in a home folder, made if there is none. Raises `KeyFileError`."""
    return load(home) or _make(home)


def _make(home: Path) -> KeyPair:
    """Whole or not at all; of two that make one at once, both get the same."""
    file, pair = home / KEY_FILE, KeyPair.new()
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(file.parent, os.stat(file.parent), "700")
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as opened:
            json.dump({"public": pair.public, "secret": pair.secret.reveal()}, opened)
            opened.flush()
            os.fsync(descriptor)
        try:
            os.link(partial, file)
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    except OSError as error:
        raise KeyFileError(f"can't write {file}: {error.strerror}", hint="give another --home") from error
    kept = load(home)
    if kept is None:
        raise KeyFileError(f"{file} was deleted while it was made", hint="start again")
    return kept


def _check(path: Path, found: os.stat_result, mode: str) -> None:
    if found.st_uid != os.geteuid():
        raise KeyFileError(
            f"{path} belongs to user {found.st_uid}, not to {os.geteuid()} who runs this",
            hint=f"chown {os.geteuid()} {path}",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise KeyFileError(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):o})",
            hint=f"chmod {mode} {path}; if others could read it, delete it and join anew with another key",
        )
