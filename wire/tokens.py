"""The token of `dcnr pnode --join`: where the orchestrator is, its key, and the key to knock with.

`dcnr1:` and base64url of the msgpack array `[addresses, orchestrator id, server key, secret, until, role]`. `secret` is
the secret half of a key pair whose public half the orchestrator has on its list with the role `join`; so a token is
used by CURVE itself, and whoever has it can join once or as often as the orchestrator allows, until it ends.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import msgspec

from wire.directory import is_address
from wire.errors import MisuseError, UsageError
from wire.ids import is_id
from wire.keys import KeyPair, is_key
from wire.limits import ADDRESSES

PREFIX = "dcnr1:"
MAX_CHARS = 4096


class _Fields(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    addresses: list[str]
    orchestrator: str
    server_key: str
    secret: str
    until: float
    role: str


@dataclass(frozen=True, slots=True)
class Token:
    """An invitation. `pair` is the key to knock with; its secret does not show in the token's repr."""

    addresses: tuple[str, ...]
    orchestrator: str
    server_key: str
    pair: KeyPair
    until: float  # wall clock; 0: never ends
    role: str  # what the joiner becomes: pnode or client

    def text(self) -> str:
        """To be pasted. It's a secret."""
        fields = _Fields(
            list(self.addresses), self.orchestrator, self.server_key, self.pair.secret.reveal(), self.until, self.role
        )
        return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(fields)).decode().rstrip("=")


def read_token(text: str) -> Token:
    """The token that a person pasted. Raises `UsageError`, which does not repeat it."""
    text = "".join(text.split())  # terminals break lines
    if not text.startswith(PREFIX):
        raise UsageError("this is not a token: it does not begin with dcnr1:", hint="dcnr node invite makes one")
    body = text.removeprefix(PREFIX)
    try:
        if len(text) > MAX_CHARS:
            raise ValueError("too long")
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        fields = msgspec.msgpack.decode(data, type=_Fields, strict=True)
        pair = KeyPair.of_secret(fields.secret)
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError, MisuseError):
        raise UsageError("the token is damaged", hint="copy all of it, or make another: dcnr node invite") from None
    sound = (
        0 < len(fields.addresses) <= ADDRESSES
        and all(map(is_address, fields.addresses))
        and is_id(fields.orchestrator)
        and is_key(fields.server_key)
        and fields.role in ("pnode", "client")
        and 0 <= fields.until < float("inf")
    )
    if not sound:
        raise UsageError("the token says what no token can say", hint="is it of a newer version? dcnr node invite")
    return Token(tuple(fields.addresses), fields.orchestrator, fields.server_key, pair, fields.until, fields.role)
