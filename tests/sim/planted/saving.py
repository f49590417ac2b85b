"""Bugs of checkpoints: saving, committing, keeping, going back to one."""

from __future__ import annotations

from tests.sim.planted.edit import Edit


def commit_before_upload() -> list[Edit]:
    """parts are called saved before they are stored, and a commit does not look whether they are there"""
    from storage.checkpoints import commit, save_part_bytes

    return [
        Edit(
            save_part_bytes,
            "await store.put(part_key(prefix, digest), data)",
            "asyncio.get_running_loop().call_later(\n"
            "    3.0, asyncio.ensure_future, store.put(part_key(prefix, digest), data)\n"
            ")",
        ),
        Edit(commit, "if missing:", "if False:"),
    ]


def head_before_manifest() -> list[Edit]:
    """a head is written before the manifest that it names"""
    from storage.checkpoints import commit

    return [
        Edit(commit, "await store.put(key, data)", "pass"),
        Edit(commit, "return Head(body.step", "await store.put(key, data)\nreturn Head(body.step"),
    ]


def stale_head_accepted() -> list[Edit]:
    """a head is written without looking whether the one there is is newer, or still the one that was read"""
    from orchestrator.commits import Committer
    from storage.checkpoints import commit

    return [
        Edit(Committer._commit, "if self.head is not None and manifest.step <= self._reached:", "if False:"),
        Edit(
            commit,
            "store.put_if_match(head_key(prefix), sealed, expected_head.etag)",
            "store.put(head_key(prefix), sealed)",
        ),
    ]


def kept_part_pruned() -> list[Edit]:
    """the oldest checkpoint that is to be kept is pruned with those before it"""
    from storage.retention import prune

    return [Edit(prune, "old = lines[keep:]", "old = lines[max(1, keep - 1) :]")]


def committed_too_early() -> list[Edit]:
    """everybody is told that a step is committed as soon as its parts are there"""
    from orchestrator.sessions import Session

    return [
        Edit(
            Session._parts_arrived,
            "out.append(events.Commit(event.step))",
            "out.append(events.Commit(event.step))\n"
            "out.append(Tell(tuple(self.pnodes), messages.Committed(self.id, event.epoch, 0, event.step)))",
        )
    ]


def old_cut_resumed() -> list[Edit]:
    """a recovery goes back to the checkpoint before the last one"""
    from storage.retention import newest_complete

    return [Edit(newest_complete, "if not missing:", "if not missing and not (manifest.parent and len(seen) == 1):")]
