"""CURVE on a bus's sockets: who gets through the handshake, and whose each packet is.

Fail closed: the sockets' ZAP domain is enforced, so without this authenticator libzmq admits nobody; and a key that is
not on the list now is refused twice, in the handshake and again with each packet, before its header is looked at. So
an entry that is taken off the list ends at the next packet, whatever connections stand.

libzmq gives the key that a handshake proved as the packet's User-Id. An id is a part of the connection's identity,
which its owner chose, so it is compared with the id that the list gives to that key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import zmq

from wire.admission import Admission, RefusalLog
from wire.doorkeeper import Doorkeeper
from wire.endpoint import Source
from wire.keys import KeyPair, fingerprint
from wire.limits import DRAIN_MESSAGES, LINGER_MS
from wire.messages import PeerRef
from wire.sockets import Inlet

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"dcnr"
ZAP_ENFORCE_DOMAIN = 93

_log = logging.getLogger("dcnr.wire")


class Guard:
    """The authenticator of one bus, and the look at each packet."""

    def __init__(self, keys: KeyPair, admission: Admission, wall: Callable[[], float] = time.time) -> None:
        self.keys = keys
        self.admission = admission
        self.refusals = RefusalLog()
        self.keeper = Doorkeeper(self.refused)
        self._wall = wall
        self._zap: zmq.Socket[bytes] | None = None
        self._zap_fd = -1
        self._inlet: Inlet | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.tell: Callable[[str], None] = lambda line: _log.warning("%s", line)
        """Where a line about refusals goes."""
        self.known: dict[tuple[bytes, str], Source] = {}
        """Sources by identity and key, kept by the bus."""

    # ------------------------------------------------------------ life

    def open(self, context: zmq.Context[zmq.Socket[bytes]], loop: asyncio.AbstractEventLoop) -> None:
        """Begin to authenticate; before any other socket of the context is bound."""
        self._zap = zap = context.socket(zmq.ROUTER)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind(ZAP_ENDPOINT)
        self._inlet = Inlet(zap)
        self._zap_fd = int(zap.getsockopt(zmq.FD))
        self._loop = loop
        loop.add_reader(self._zap_fd, self._authenticate)

    def close(self) -> None:
        """Admit nobody any more."""
        self.keeper.close()
        if self._zap is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._zap_fd)
            self._zap.close(linger=LINGER_MS)
            self._zap = self._inlet = None

    # ------------------------------------------------------------ sockets

    def arm_router(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        """Others need an admitted key here."""
        assert self._loop is not None
        self.keeper.open(context, router, self._loop)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.reveal().encode())
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        router.setsockopt(ZAP_ENFORCE_DOMAIN, 1)

    def arm_dealer(self, dealer: zmq.Socket[bytes], server_key: str) -> None:
        """Whoever answers must have this key."""
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.reveal().encode())

    # ------------------------------------------------------------ handshakes

    def _authenticate(self) -> None:
        if self._zap is None or self._inlet is None or self._loop is None:
            return
        for _ in range(DRAIN_MESSAGES):
            parts = self._inlet.take()
            if parts is None:
                return
            self._answer([part.bytes for part in parts])
        self._loop.call_soon(self._authenticate)

    def _answer(self, parts: list[bytes]) -> None:
        """One request of RFC 27: [route, "", version, request id, domain, address, identity, mechanism, key]."""
        if len(parts) < 4 or self._zap is None:
            return
        key = ""
        status, text = b"500", b"error"
        try:
            key, problem = self._judged(parts)
            status, text = (b"400", b"not admitted") if problem else (b"200", b"OK")
            if problem:
                self.refused(key or "?", f"refused a connection from {_shown(parts[5])}: {problem}")
        except Exception as error:  # whatever it was, nobody is let in by it
            self.refused("authenticator", f"the authenticator failed: {type(error).__name__}: {error}")
        user = key.encode() if status == b"200" else b""
        with contextlib.suppress(zmq.ZMQError):  # the connection has gone meanwhile
            self._zap.send_multipart([parts[0], b"", b"1.0", parts[3], status, text, user, b""], zmq.NOBLOCK)

    def _judged(self, parts: list[bytes]) -> tuple[str, str]:
        """The key that asks, and why it's refused ("" if it is not)."""
        from zmq.utils import z85

        if len(parts) != 9 or parts[2] != b"1.0" or parts[4] != DOMAIN or parts[7] != b"CURVE" or len(parts[8]) != 32:
            return "", "it does not speak CURVE"
        key = z85.encode(parts[8]).decode()
        if self.admission.find(key, self._wall()) is None:
            return key, f"key {fingerprint(key)} is not admitted"
        return key, ""

    # ------------------------------------------------------------ packets

    def source(self, identity: zmq.Frame, parse: Callable[[bytes, str], Source | None]) -> Source | None:
        """Whose a packet at the ROUTER is; None for nobody's. `parse`: the source that an identity and a key name."""
        name = identity.bytes
        key = _user(identity)
        source = self.known.get((name, key)) or parse(name, key)
        if source is None:
            return None
        entry = self.admission.find(key, self._wall())
        if entry is not None and entry.id == source.id:
            return source
        why = self.admission.refusal(key, source.id, self._wall())
        self.refused(f"{key} {source.id}", f"refused packets as {source.id} with key {fingerprint(key)}: {why}")
        self._hang_up(identity)
        return None

    def answered(self, key: str, lane: int) -> Source | None:
        """Whose a packet on a connection is that this process dialled; None for nobody's."""
        entry = self.admission.find(key, self._wall())
        if entry is None:
            self.refused(key, f"refused packets of key {fingerprint(key)}: {self.admission.refusal(key, '', 0)}")
            return None
        return Source(entry.id, 0, lane, key)

    def expulsion(self, peer: PeerRef) -> str:
        """Why the link to a peer has to end; "" if it has not."""
        if not peer.key or peer.key == self.keys.public:
            return ""
        entry = self.admission.find(peer.key, self._wall())
        if entry is not None and peer.id in ("", entry.id):
            return ""
        why = self.admission.refusal(peer.key, peer.id, self._wall())
        return f"{peer.id or 'whoever answers'} is not let in any more: {why}"

    def _hang_up(self, identity: zmq.Frame) -> None:
        """End the connection that a packet came by."""
        with contextlib.suppress(zmq.ZMQError, TypeError):
            self.keeper.hang_up(int(identity.get(zmq.SRCFD)))

    def refused(self, subject: str, text: str) -> None:
        """Count a refusal, and log it if it is time."""
        line = self.refusals.line(subject, text, self._wall())
        if line:
            self.tell(line)


def _user(identity: zmq.Frame) -> str:
    """The key that the packet's connection proved, "" if none."""
    try:
        return str(identity.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _shown(address: bytes) -> str:
    return address[:64].decode("ascii", "replace")
