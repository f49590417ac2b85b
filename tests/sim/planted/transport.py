"""Bugs of the wire and of what takes messages in."""

from __future__ import annotations

from tests.sim.planted.edit import Edit


def duplicate_update() -> list[Edit]:
    """a packet that comes twice is handed over twice, and a verdict that comes again is carried out again"""
    from pnode.core import Core
    from wire.endpoint import Endpoint

    return [
        Edit(
            Endpoint._data,
            'self.counters["duplicates"] += 1',
            'self.counters["duplicates"] += 1\n'
            "if type(packet) is Data and not packet.chunks:\n"
            "    self._in_order(peer, packet, frames, now, out)",
        ),
        Edit(
            Core._verdict,
            "step = event.decision.step",
            "step = event.decision.step\n"
            "if self.step - 1 == step >= self.share.start_step and self.state is State.RUNNING:\n"
            "    again = Job(JobKind.UPDATE, step, scale=event.decision.scale, count=event.decision.count)\n"
            "    return self._queue(again, out)",
        ),
    ]


def resend_dropped() -> list[Edit]:
    """what was lost on the way is not sent again: both sides go on as if it had come"""
    from wire.peer import Peer

    return [
        Edit(
            Peer.acknowledged,
            "out.append(self.transmit(lane, parcel))",
            "sending.flying_bytes -= sending.flying.pop(parcel.seq).size",
        )
    ]


def epoch_ignored() -> list[Edit]:
    """a PNode that has a session takes a new epoch's Prepare, StartRun and messages for those of its own"""
    from pnode.daemon import Daemon
    from pnode.deployments import Deployments

    return [
        Edit(
            Deployments.prepare,
            "if seat is not None and seat.epoch == message.epoch and seat.session is not None:",
            "if seat is not None and seat.session is not None:",
        ),
        Edit(Deployments.control, "session is None or session.share.epoch != message.epoch", "session is None"),
        Edit(Daemon._data, "session is None or session.share.epoch != epoch", "session is None"),
    ]


def old_epoch_taken() -> list[Edit]:
    """a PNode takes activations, gradients, reports and verdicts of epochs that are over"""
    from pnode.daemon import Daemon

    return [Edit(Daemon._data, "session.share.epoch != epoch", "session.share.epoch < epoch")]
