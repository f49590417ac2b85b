"""Bugs of the control plane: terms, epochs, incarnations, members."""

from __future__ import annotations

from tests.sim.planted.edit import Edit


def grant_before_store() -> list[Edit]:
    """a PNode hears of its incarnation while that is still being stored"""
    from orchestrator.members import Members

    return [Edit(Members._grant, "not await self._made_durable()", "not asyncio.ensure_future(self._made_durable())")]


def answer_before_store() -> list[Edit]:
    """whoever asks for an action is answered before it is stored"""
    from orchestrator.driver import SessionDriver

    return [Edit(SessionDriver.act, "await self._durable()", "return")]


def epoch_used_twice() -> list[Edit]:
    """a placement anew has the epoch of the one before"""
    from orchestrator.deploying import Deploying

    return [
        Edit(Deploying._placed, "max(record.epoch, self._seen_epoch) + 1", "max(record.epoch, self._seen_epoch, 1)")
    ]


def incarnation_twice() -> list[Edit]:
    """a PNode that comes back gets the number that it had, whatever process it is"""
    from orchestrator.membership import Membership

    return [Edit(Membership._admit, "max(known, message.held) + 1", "max(known, message.held, 1)")]


def term_not_raised() -> list[Edit]:
    """an orchestrator that takes over uses the term that it finds"""
    from orchestrator.truth import Truth

    return [
        Edit(
            Truth.raise_term,
            "TermRecord(found.cluster, found.term + 1,",
            "TermRecord(found.cluster, max(found.term, 1),",
        )
    ]


def hint_is_a_loss() -> list[Edit]:
    """a PNode whose connection closed is lost at once, whether it lives or not"""
    from orchestrator.membership import Membership

    return [
        Edit(
            Membership.broke,
            "member.broken, member.flowed = now, NEVER",
            'return [*self._end(member, State.LOST, "its connection closed"), *self._decide(member.id, now, 0.0)]',
        )
    ]


def released_applies() -> list[Edit]:
    """a session that was released, or whose place another epoch took, goes on computing"""
    from pnode.session import Session

    return [Edit(Session.release, "self.post(Released())", "return")]


def dead_members_parts() -> list[Edit]:
    """parts are taken from whoever says that it is a member, of whichever epoch"""
    from orchestrator.cutting import Cutting
    from orchestrator.service import Service

    return [
        Edit(Service._report, "member is None or message.epoch != driver.session.record.epoch", "False"),
        Edit(Cutting.parts_saved, "if message.epoch != record.epoch:", "if False:"),
        Edit(
            Cutting.parts_saved, "if self._cuts is None or self._cuts.epoch != message.epoch:", "if self._cuts is None:"
        ),
    ]
