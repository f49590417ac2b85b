"""Which cluster a command means: the home folder, named contexts, and the address they lead to.

Order: `--orchestrator`, DCNR_ORCHESTRATOR, the current context, the cluster that `dcnr up` started in the home folder.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.limits import HOME_FILE_BYTES
from wire.errors import BadFileError, UnreachableError, UsageError

_ADDRESS = re.compile(r"(?:tcp://)?(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(?P<port>\d{1,5})")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def home_folder(home: str | None = None) -> Path:
    """The folder for clusters, logs and contexts: as given, $DCNR_HOME, or ~/.dcnr. Not created."""
    return Path(home or os.environ.get("DCNR_HOME") or Path.home() / ".dcnr").expanduser().absolute()


def parse_address(text: str) -> str:
    """`host:port` or `tcp://host:port` as `tcp://host:port`. Raises `UsageError`."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"{text!r} is not an address", hint="write it as tcp://host:port")
    host = match["host"].lower()
    if host.startswith("[::ffff:") and "." in host:  # an IPv4 address as an IPv6 socket calls it
        host = host[8:-1]
    return f"tcp://{host}:{match['port']}"


@dataclass(frozen=True, slots=True)
class Target:
    """An orchestrator to talk to; `key`: its public key, "" where there are no keys."""

    address: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The named orchestrators of a home folder, and the public keys of those that have any."""

    file: Path
    current: str
    addresses: dict[str, str]
    keys: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(home: Path) -> Contexts:
        """From `contexts.json`; empty if there is none. Raises `BadFileError`."""
        file = home / "contexts.json"
        raw = read_json(file)
        if raw is None:
            return Contexts(file, "", {})
        addresses = raw.get("contexts")
        current = raw.get("current", "")
        if not isinstance(addresses, dict) or not isinstance(current, str):
            raise BadFileError(f"{file} is not a list of contexts", hint="delete it and run dcnr context use again")
        keys = raw.get("keys", {})
        if not isinstance(keys, dict):
            raise BadFileError(f"{file} is not a list of contexts", hint="delete it and run dcnr context use again")
        return Contexts(
            file,
            current,
            {str(name): str(address) for name, address in addresses.items()},
            {str(name): str(key) for name, key in keys.items()},
        )

    def use(self, name: str, address: str | None, key: str = "") -> Contexts:
        """With `name` as the current one ("local": the local cluster); `address` adds or changes it, with its key."""
        if name == "local":
            if address is not None:
                raise UsageError("the context 'local' always means the cluster of this home folder")
            return Contexts(self.file, "", self.addresses, self.keys)
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} can't be a context's name", hint="letters a-z, digits, - and _; at most 63")
        if address is None and name not in self.addresses:
            known = ", ".join(self.addresses) or "none yet"
            raise UsageError(f"no context {name!r} (known: {known})", hint=f"dcnr context use {name} tcp://host:port")
        addresses, keys = dict(self.addresses), dict(self.keys)
        if address is not None:
            addresses[name] = parse_address(address)
            keys.pop(name, None)
            if key:
                keys[name] = key
        return Contexts(self.file, name, addresses, keys)

    def without(self, name: str) -> Contexts:
        """Without this one."""
        if name not in self.addresses:
            raise UsageError(f"no context {name!r}", hint="dcnr context ls")
        rest = {key: value for key, value in self.addresses.items() if key != name}
        keys = {key: value for key, value in self.keys.items() if key != name}
        return Contexts(self.file, "" if self.current == name else self.current, rest, keys)

    def save(self) -> None:
        """Write the file."""
        known = {"keys": self.keys} if self.keys else {}
        write_json(self.file, {"current": self.current, "contexts": self.addresses, **known})


def orchestrator_address(given: str | None, home: Path) -> str:
    """The address of the orchestrator meant. Raises `UnreachableError` if there is none to talk to."""
    return orchestrator_target(given, home).address


def orchestrator_target(given: str | None, home: Path) -> Target:
    """The orchestrator meant, with its key. Raises `UnreachableError` if there is none to talk to."""
    contexts = Contexts.read(home)
    own = _own_orchestrator(home)
    if given:
        address = parse_address(given)
        if own is not None and own.address == address:
            return own
        names = [name for name, known in contexts.addresses.items() if parse_address(known) == address]
        return Target(address, next((contexts.keys[name] for name in names if name in contexts.keys), ""))
    if contexts.current:
        if contexts.current not in contexts.addresses:
            raise BadFileError(
                f"{contexts.file} names the context {contexts.current!r}, which it lacks", hint="dcnr context use local"
            )
        address = parse_address(contexts.addresses[contexts.current])
        return Target(address, contexts.keys.get(contexts.current, ""))
    if own is not None and own.key:
        return own
    return Target(_local_address(home))


def _own_orchestrator(home: Path) -> Target | None:
    """The orchestrator that runs in this home folder."""
    raw = read_json(home / "orchestrator.json")
    if raw is None or not raw.get("address"):
        return None
    try:
        os.kill(int(raw["pid"]), 0)
    except (KeyError, ValueError, TypeError, OverflowError, ProcessLookupError):
        return None
    except PermissionError:
        pass
    return Target(str(raw["address"]), str(raw.get("key", "")))


def _local_address(home: Path) -> str:
    from cli.cluster import Cluster

    cluster = Cluster.read(home)
    if cluster is None:
        raise UnreachableError(
            "no cluster is running here", hint="start one with: dcnr up   or name one: --orchestrator tcp://host:port"
        )
    if not cluster.orchestrator.alive():
        raise UnreachableError(
            f"the local cluster's orchestrator (pid {cluster.orchestrator.pid}) has ended",
            hint=f"dcnr up starts it again, at the same address; its log: {cluster.orchestrator.log}",
        )
    return cluster.address


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is no such file. Raises `BadFileError`."""
    import json

    try:
        with open(file, "rb", opener=_at_once) as source:
            data = source.read(HOME_FILE_BYTES + 1)
        if len(data) > HOME_FILE_BYTES:
            raise BadFileError(f"{file} has more than {HOME_FILE_BYTES} bytes", hint="delete it, or mend it")
        raw = json.loads(data)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise BadFileError(f"{file} can't be read: {problem.strerror or problem}", hint="delete it") from problem
    except (ValueError, RecursionError) as problem:
        raise BadFileError(f"{file} is not JSON: {problem}", hint="delete it, or mend it") from problem
    if not isinstance(raw, dict):
        raise BadFileError(f"{file} does not hold a JSON object", hint="delete it, or mend it")
    return raw


def _at_once(path: str, flags: int) -> int:
    """Nothing that has this name is waited for, such as a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_json(file: Path, value: Any) -> None:
    """Replace a file by this JSON, whole or not at all."""
    import json

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
