"""Whole objects brought here: verified, taken up again when they arrive damaged, and never limited in time as a whole.

`on_bytes(n)` is called in the event loop for each n bytes that arrived, whether or not they are read again later: it
shows that something moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from storage.disk import explain_os_error
from storage.store import CorruptError, Store
from storage.temporary import new_temporary, sweep

OnBytes = Callable[[int], None]

READS = 3
PAUSE_S = 0.2


async def read_verified(
    store: Store, key: str, sha256: str, size_bytes: int, *, on_bytes: OnBytes | None = None
) -> bytearray:
    """An object of a known digest and size. Raises NotFoundError, CorruptError if each of some reads is damaged."""
    for tries in range(1, READS + 1):
        data = bytearray()
        try:
            async with contextlib.aclosing(_counted(store, key, sha256, on_bytes)) as chunks:
                async for chunk in chunks:
                    data += chunk
                    if len(data) > size_bytes:
                        raise CorruptError(f"{key} has more than the {size_bytes} bytes that it should have", key=key)
            return data
        except CorruptError:
            if tries == READS:
                raise
        await asyncio.sleep(random.uniform(0, tries * PAUSE_S))
    raise AssertionError("unreachable")


async def check_verified(store: Store, key: str, sha256: str) -> None:
    """Read an object and keep nothing. Raises NotFoundError, CorruptError if each of some reads is damaged."""
    for tries in range(1, READS + 1):
        try:
            async with contextlib.aclosing(store.get_stream(key, sha256=sha256)) as chunks:
                async for _ in chunks:
                    pass
            return
        except CorruptError:
            if tries == READS:
                raise
        await asyncio.sleep(random.uniform(0, tries * PAUSE_S))


async def fetch_verified(store: Store, key: str, sha256: str, path: Path, *, on_bytes: OnBytes | None = None) -> None:
    """Write an object of a known digest to `path`, whole or not at all.

    Raises NotFoundError, CorruptError if each of some reads is damaged, StoreUnavailableError if the disk here is full.
    """
    folder = path.parent

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)

    try:
        await asyncio.to_thread(prepare)
        temporary, file = await asyncio.to_thread(new_temporary, folder, hidden=True)
        try:
            for tries in range(1, READS + 1):
                try:
                    async with contextlib.aclosing(_counted(store, key, sha256, on_bytes)) as chunks:
                        async for chunk in chunks:
                            await asyncio.to_thread(file.write, chunk)
                    break
                except CorruptError:
                    if tries == READS:
                        raise
                    file.seek(0)
                    file.truncate()
                await asyncio.sleep(random.uniform(0, tries * PAUSE_S))
            await asyncio.to_thread(file.flush)
            await asyncio.to_thread(os.fsync, file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                file.close()
    except OSError as error:
        raise explain_os_error(f"{path} can't be written", folder, error, key=key) from error


async def _counted(store: Store, key: str, sha256: str, on_bytes: OnBytes | None) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(store.get_stream(key, sha256=sha256)) as chunks:
        async for chunk in chunks:
            if on_bytes is not None:
                on_bytes(len(chunk))
            yield chunk
