"""A valid value for any type that travels, so that a new message is fuzzed as soon as it is there."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec

from wire.messages import all_messages
from wire.packets import KINDS

PLAIN: dict[Any, Any] = {str: "run", int: 3, float: 0.5, bool: True}


def sample(kind: Any) -> Any:
    """A valid value of `kind`."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(*(sample(field.type) for field in msgspec.structs.fields(kind)))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return 0 if arguments[0] is int else sample(arguments[0])
    if origin is list:
        return [sample(arguments[0])]
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if origin is tuple:
        return (sample(arguments[0]),) if arguments[-1] is ... else tuple(map(sample, arguments))
    if origin in (typing.Union, types.UnionType):
        return sample(arguments[0])
    return "run"


def messages() -> list[Any]:
    """One message of each type."""
    return [sample(kind) for kind in all_messages().values()]


def message_fields() -> list[list[Any]]:
    """The same as they travel: `[tag, field, …]`."""
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(message)) for message in messages()]


def packet_fields() -> list[list[Any]]:
    """One packet of each kind, and Data with each message; without the digest."""
    found: list[list[Any]] = []
    for number, kind in KINDS.items():
        fields = list(msgspec.to_builtins(sample(kind)))
        fields[0:2] = [2, int(number)]
        if kind.__name__ == "Data":
            found += [[*fields[:-1], message] for message in message_fields()]
        elif "me" in kind.__struct_fields__:
            fields[kind.__struct_fields__.index("me")] = ["run", 3, ["tcp://a:1"]]
            found.append(fields)
        else:
            found.append(fields)
    return found
