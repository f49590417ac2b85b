"""Whole objects brought here: verified, taken up again when they arrive damaged, and never limited in time as a whole.

`on_bytes(n)` is called in the event loop for each n bytes that arrived, whether or not they are read again later: it
shows that something moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from storage.disk import explain_os_error
from storage.reread import read_again
from storage.store import CorruptError, Store
from storage.temporary import new_temporary, sweep

OnBytes = Callable[[int], None]


async def read_verified(
    store: Store, key: str, sha256: str, size_bytes: int, *, on_bytes: OnBytes | None = None
) -> bytearray:
    """An object of a known digest and size. Raises NotFoundError, CorruptError that is to be believed."""

    async def read() -> bytearray:
        data = bytearray()
        async with contextlib.aclosing(_counted(store, key, sha256, on_bytes)) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) > size_bytes:
                    raise CorruptError(f"{key} has more than the {size_bytes} bytes that it should have", key=key)
        return data

    return await read_again(read)


async def check_verified(store: Store, key: str, sha256: str) -> None:
    """Read an object and keep nothing. Raises NotFoundError, CorruptError that is to be believed."""

    async def read() -> None:
        async with contextlib.aclosing(store.get_stream(key, sha256=sha256)) as chunks:
            async for _ in chunks:
                pass

    await read_again(read)


async def fetch_verified(store: Store, key: str, sha256: str, path: Path, *, on_bytes: OnBytes | None = None) -> None:
    """Write an object of a known digest to `path`, whole or not at all.

    Raises NotFoundError, CorruptError that is to be believed, StoreUnavailableError if the disk here is full.
    """
    folder = path.parent

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)

    try:
        await asyncio.to_thread(prepare)
        temporary, file = await asyncio.to_thread(new_temporary, folder, hidden=True)

        async def read() -> None:
            file.seek(0)
            file.truncate()
            async with contextlib.aclosing(_counted(store, key, sha256, on_bytes)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk)

        try:
            await read_again(read)
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
