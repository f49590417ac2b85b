"""What the errors of a disk mean, with the path, the room that is left, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from storage.store import CorruptError, NotFoundError, StoreError, StoreUnavailableError

FULL = {errno.ENOSPC, errno.EDQUOT}
FORBIDDEN = {errno.EACCES, errno.EPERM}


def explain_os_error(where: str, folder: Path, error: OSError, *, key: str = "") -> StoreError:
    """The error to raise for one of the system's. `where`: what to name; `folder`: a folder on that disk."""
    text = f"{where}: {error.strerror or error}"
    if error.errno in FULL:
        hint = f"make room on the disk of {folder} (dcnr gc), then try again: nothing is lost"
        return StoreUnavailableError(f"{text}; {room_on(folder)}", key=key, hint=hint)
    if error.errno == errno.EFBIG:
        return StoreUnavailableError(f"{text}; a limit of this process or disk", key=key, hint="see ulimit -f")
    if error.errno == errno.EROFS:
        hint = f"the disk of {folder} is mounted read-only, often after a fault of the disk: check it and remount it"
        return StoreUnavailableError(text, key=key, hint=hint)
    if error.errno in FORBIDDEN:
        return StoreUnavailableError(text, key=key, hint=f"{folder} must be writable by user {os.geteuid()}")
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{where} is not there", key=key)
    if isinstance(error, NotADirectoryError | IsADirectoryError):
        return StoreError(f"{text}: one key can't be both an object and the folder of others", key=key)
    if error.errno == errno.ELOOP:
        return CorruptError(f"{where} is or passes through a symbolic link", key=key, hint="remove it")
    return StoreUnavailableError(text, key=key, hint=f"check the disk of {folder}")


def room_on(folder: Path) -> str:
    """What an ordinary user may still write on the disk of `folder`."""
    for place in (folder, *folder.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        free = f"{status.f_bavail * status.f_frsize} bytes are free"
        return free if status.f_favail or not status.f_files else f"{free}, but no more files are allowed"
    return "nobody knows what is free"
