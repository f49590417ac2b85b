"""Commits: whole, in one line, durable; what is kept stays.

- A manifest names only parts that are stored at that moment, whole and under their digest; a head names only a manifest
  that is stored. Every member of the epoch has applied the head's step. Its hash is that of the truth's state.
- A head's parent is the head before it; steps of heads grow; no head belongs to another epoch than the newest recorded
  one, and an epoch starts from the head that there is.
- When anybody is told that a step is committed, the head is there already, and never falls behind again.
- Nothing that one of the newest `keep` checkpoints needs is deleted or replaced by other bytes.
"""

from __future__ import annotations

from tests.sim.checks.breach import Check, name_of
from tests.sim.checks.formats import Manifest, Record, sha256
from tests.sim.checks.model import Model, Thing
from tests.sim.history import Delivered, History, Told, Truth, Wrote


class Commits(Check):
    """See the module."""

    def __init__(self, truth: Truth, session: str) -> None:
        super().__init__()
        self._truth = truth
        self._session = session
        self._promised: dict[str, tuple[int, Told | Delivered]] = {}
        self._written: set[str] = set()

    def wrote(self, event: Wrote, thing: Thing, model: Model) -> None:
        """See the module."""
        if thing.key.kind in ("head", "manifest", "part"):
            self._kept(event, thing, model)
        if event.how == "delete":
            return
        if thing.problem and thing.key.kind in ("head", "manifest"):
            self.breach("whole commits", event.t, f"{event.key}: {thing.problem}", who=[_by(event)], events=[event])
        elif thing.key.kind == "manifest":
            self._manifest(event, thing, model)
        elif thing.key.kind == "head":
            self._head(event, thing, model)
        elif thing.record is not None:
            self._start(event, thing.record, model)

    # ------------------------------------------------------------ what is written

    def _manifest(self, event: Wrote, thing: Thing, model: Model) -> None:
        manifest, key = thing.manifest, thing.key
        assert manifest is not None
        if sha256(event.data) != key.digest or manifest.step != key.step or manifest.session != key.session:
            self.breach(
                "whole commits", event.t, f"{event.key} holds step {manifest.step} of {manifest.session}, "
                f"digest {sha256(event.data)[:12]}", who=[_by(event)], step=manifest.step, events=[event],
            )  # fmt: skip
        if event.key not in self._written:  # again: a write that was late, of a manifest that may be over
            self._written.add(event.key)
            self._parts(event, manifest, key.prefix, model)

    def _parts(self, event: Wrote, manifest: Manifest, prefix: str, model: Model) -> None:
        for vnode, (digest, size) in sorted(manifest.parts.items()):
            stored = model.store.get(f"{prefix}parts/{digest}.safetensors")
            if stored is None:
                problem = "is not stored"
            elif stored.sha256 != digest or stored.size != size:
                problem = f"is stored as {stored.size} bytes of digest {stored.sha256[:12]}"
            else:
                continue
            self.breach(
                "whole commits", event.t,
                f"step {manifest.step} names the part {digest[:12]} ({size} bytes) of {vnode}, which {problem}",
                who=[_by(event)], step=manifest.step, events=[event, *([stored.by] if stored is not None else [])],
            )  # fmt: skip

    def _head(self, event: Wrote, thing: Thing, model: Model) -> None:
        head, key = thing.head, thing.key
        assert head is not None
        step = head.step
        who, shown = [_by(event)], [event]
        named = model.things.get(head.manifest_key)
        manifest = named.manifest if named is not None else None
        if manifest is None or model.store[head.manifest_key].sha256 != head.manifest_digest:
            self.breach(
                "whole commits", event.t, f"the head names {head.manifest_key}, which is not stored", who=who,
                step=step, events=shown,
            )  # fmt: skip
            return
        shown.append(model.store[head.manifest_key].by)
        self._parts(event, manifest, key.prefix, model)
        said = (head.step, head.epoch, head.term, head.hash)
        if said != (manifest.step, manifest.epoch, manifest.term, manifest.hash):
            self.breach("whole commits", event.t, "head and manifest differ", who=who, step=step, events=shown)
        if key.session == self._session and manifest.hash != self._truth.hashes.get(step, manifest.hash):
            self.breach(
                "same numbers", event.t,
                f"the checkpoint's hash is {manifest.hash[:12]}, the truth's {self._truth.hashes[step][:12]}",
                who=who, step=step, events=shown,
            )  # fmt: skip
        self._line(event, thing, manifest, model)
        self._applied(event, manifest, model)

    def _line(self, event: Wrote, thing: Thing, manifest: Manifest, model: Model) -> None:
        before = model.head(thing.key.session)
        who, step = [_by(event)], manifest.step
        parent = before[1].manifest_key if before is not None else ""
        shown = [event] if before is None else [model.store[before[0]].by, event]
        if manifest.parent != parent:
            self.breach(
                "one line of heads", event.t, f"its parent is {manifest.parent or 'nothing'}, the head is "
                f"{parent or 'nothing'}", who=who, step=step, events=shown,
            )  # fmt: skip
        if before is not None and step <= before[1].step:
            self.breach(
                "one line of heads", event.t, f"the head moved from step {before[1].step} to step {step}", who=who,
                step=step, events=shown,
            )  # fmt: skip
        newest = model.newest.get(thing.key.session, 0)
        if manifest.epoch != newest:
            known = model.epochs.get((thing.key.session, newest))
            self.breach(
                "one line of heads", event.t, f"a cut of epoch {manifest.epoch} was committed in epoch {newest}",
                who=who, step=step, events=[*([known.by] if known is not None else []), event],
            )  # fmt: skip

    def _applied(self, event: Wrote, manifest: Manifest, model: Model) -> None:
        epoch = model.epochs.get((manifest.session, manifest.epoch))
        if epoch is None:
            return
        for pnode in sorted(epoch.members):
            last = model.applied.get((manifest.session, manifest.epoch, pnode), epoch.record.start_step)
            if last < manifest.step:
                self.breach(
                    "one line of heads", event.t, f"step {manifest.step} was committed in epoch {manifest.epoch}, in "
                    f"which {pnode} has applied only step {last}", who=[_by(event), pnode], step=manifest.step,
                    events=[event],
                )  # fmt: skip

    def _start(self, event: Wrote, record: Record, model: Model) -> None:
        """An epoch begins at the head."""
        if record.epoch <= model.newest.get(record.session, 0):
            return
        found = model.head(record.session)
        step = found[1].step if found is not None else 0
        if record.start_step != step:
            self.breach(
                "one line of heads", event.t,
                f"epoch {record.epoch} starts at step {record.start_step}, but the head is step {step}",
                who=[_by(event)], step=step, events=[*([model.store[found[0]].by] if found else []), event],
            )  # fmt: skip

    # ------------------------------------------------------------ what stays

    def _kept(self, event: Wrote, thing: Thing, model: Model) -> None:
        kept = model.kept(thing.key.session).get(event.key) if event.key in model.store else None
        if kept is None:
            return
        step, digest, _ = kept
        if event.how == "delete":
            self.breach(
                "kept is kept", event.t, f"{event.key} was deleted, which the kept checkpoint of step {step} needs",
                who=[_by(event)], step=step, events=[model.store[event.key].by, event],
            )  # fmt: skip
        elif digest and event.sha256 != digest:
            self.breach(
                "kept is kept", event.t, f"{event.key} was overwritten with other bytes, which step {step} needs",
                who=[_by(event)], step=step, events=[model.store[event.key].by, event],
            )  # fmt: skip

    def delivered(self, event: Delivered, model: Model) -> None:
        """PNodes are told of a commit after it."""
        if event.kind == "Committed":
            session, step = event.fields.get("session"), event.fields.get("step")
            if isinstance(session, str) and isinstance(step, int):
                self._promise(event, session, step, model)

    def told(self, event: Told, model: Model) -> None:
        """The client is told of a commit after it."""
        if event.what == "committed":
            self._promise(event, event.session, event.step, model)

    def _promise(self, event: Told | Delivered, session: str, step: int, model: Model) -> None:
        found = model.head(session)
        there = found[1].step if found is not None else 0
        who = [name_of(event.src, event.src_boot), event.dst] if isinstance(event, Delivered) else ["client"]
        if there < step:
            self.breach(
                "committed is durable", event.t, f"step {step} was called committed, but the head is step {there}",
                who=who, step=step, events=[*([model.store[found[0]].by] if found else []), event],
            )  # fmt: skip
        if step > self._promised.get(session, (0,))[0]:
            self._promised[session] = (step, event)

    def end(self, history: History, model: Model) -> None:
        """Everything promised is there; what is stored is what was written."""
        for session, (step, event) in self._promised.items():
            found = model.head(session)
            if found is None or found[1].step < step:
                self.breach(
                    "committed is durable", history.end_s, f"step {step} was promised, and is gone at the end",
                    step=step, events=[event],
                )  # fmt: skip
        for key, (step, digest, _) in model.kept(history.session).items():
            stored = history.store.get(key)
            written = model.store.get(key)
            if stored is None or (digest and stored[0] != digest) or written is None or stored[0] != written.sha256:
                what = "is gone" if stored is None else f"has digest {stored[0][:12]}"
                self.breach(
                    "kept is kept", history.end_s, f"{key}, which step {step} needs, {what} at the end", step=step,
                    events=[written.by] if written is not None else [],
                )  # fmt: skip
        self._final(history, model)

    def _final(self, history: History, model: Model) -> None:
        if history.ended != "finished":
            return
        found = model.head(history.session)
        head = found[1] if found is not None else None
        if head is None or head.step != history.steps or head.hash != self._truth.hashes.get(history.steps, ""):
            have = f"step {head.step}, hash {head.hash[:12]}" if head is not None else "nothing"
            self.breach(
                "final hash", history.end_s,
                f"the head is {have}, expected step {history.steps}, "
                f"hash {self._truth.hashes.get(history.steps, 'unknown')[:12]}",
                step=history.steps,
            )  # fmt: skip


def _by(event: Wrote) -> str:
    return name_of(event.by, event.boot)
