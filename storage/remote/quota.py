"""How much each network may store. Pure: what is stored is counted by somebody else and told.

Between two counts what is written is added and nothing is taken away, so the ledger never believes too little; before
anything is refused it asks to count again. What is coming in pieces is reserved from its first piece on.
"""

from __future__ import annotations

from storage.keys import ID
from wire.errors import UsageError

SHARED = ""
"""What belongs to no network: blobs, records."""

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def network_of(key: str) -> str:
    """The network that a key belongs to, or SHARED."""
    first, _, rest = key.partition("/")
    network = rest.partition("/")[0]
    return network if first == "networks" and "/" in rest and ID.fullmatch(network) else SHARED


def prefix_of(network: str) -> str:
    """Where all of that network, or what is shared, is stored."""
    return f"networks/{network}/" if network else "blobs/"


def parse_quotas(texts: list[str]) -> dict[str, int]:
    """`10g` (of each network), `gpt-char=20g`, `shared=1t`: bytes by network, "*" for each. Raises UsageError."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, amount = text.rpartition("=")
        number, unit = (amount[:-1], amount[-1:].lower()) if amount[-1:].isalpha() else (amount, "")
        if not number.isdecimal() or unit not in UNITS or (equals and not ID.fullmatch(name)):
            raise UsageError(f"quota {text[:80]!r} is not allowed", hint="10g, NETWORK=10g or shared=10g; k, m, g, t")
        found[{"": "*", "shared": SHARED}.get(name, name)] = int(number) * UNITS[unit]
    return found


class Ledger:
    """See the module. `quotas`: bytes by network, "*" for each that has none of its own; {}: no limits."""

    def __init__(self, quotas: dict[str, int]) -> None:
        self._quotas = quotas
        self._used: dict[str, int] = {}
        self._reserved: dict[str, tuple[str, int]] = {}  # by transfer

    def quota(self, network: str) -> int | None:
        """The limit in bytes, None if there is none. What is shared is not limited by "*"."""
        return self._quotas.get(network, None if network == SHARED else self._quotas.get("*"))

    def unknown(self, network: str) -> bool:
        """Whether it has to be counted before anything is admitted."""
        return self.quota(network) is not None and network not in self._used

    def counted(self, network: str, size_bytes: int) -> None:
        """So much is stored."""
        self._used[network] = size_bytes

    def problem(self, network: str, size_bytes: int, transfer: str = "") -> str:
        """Why so many more bytes can't be taken, or "". `transfer`: whose reservation they take the place of."""
        limit = self.quota(network)
        if limit is None:
            return ""
        reserved = sum(size for name, (owner, size) in self._reserved.items() if owner == network and name != transfer)
        used = self._used.get(network, 0)
        if used + reserved + size_bytes <= limit:
            return ""
        what = f"network {network}" if network else "what belongs to no network"
        coming = f" and {reserved} are on their way" if reserved else ""
        return f"{what} may store {limit} bytes: {used} are stored{coming}, {size_bytes} more were to come"

    def reserve(self, transfer: str, network: str, size_bytes: int) -> None:
        """A transfer of that size has begun."""
        self._reserved[transfer] = network, size_bytes

    def release(self, transfer: str) -> None:
        """It is over, either way."""
        self._reserved.pop(transfer, None)

    def written(self, network: str, size_bytes: int) -> None:
        """So much was written."""
        if network in self._used:
            self._used[network] += size_bytes
