"""aiofiles as an engine, to compare with: what Python code gets that awaits its files.

``iodepth`` coroutines on an event loop in a thread of its own, and as many threads behind them that aiofiles hands its
calls to. A file object has one position, so each coroutine has its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import fcntl
import os
import threading
import time
from typing import Final

import aiofiles
import numpy as np
from aiofiles.threadpool.binary import AsyncFileIO

from io_daemon._native import Region
from io_daemon.bench.engines.engine import Headers, Places, Writes
from io_daemon.bench.engines.ledger import BlockIo, Ledger, LedgerEngine

OPEN_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 30.0


class AiofilesEngine(LedgerEngine):
    """A ``BlockEngine``. slat: the seek, which aiofiles hands to a thread too; clat: the transfer."""

    name: Final = "aiofiles"

    def __init__(self, fd: int, arena: Region, bs: int, iodepth: int, path: str) -> None:
        """Opens the file that ``fd`` refers to anew, unbuffered, direct if ``fd`` is. Raises OSError."""
        self._bs = bs
        self._arena = arena.array().data
        self._ledger = Ledger(path, bs)
        self._fd = os.dup(fd)
        self._executor = concurrent.futures.ThreadPoolExecutor(iodepth, "io-aiofiles")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="io-aiofiles-loop", daemon=True)
        self._thread.start()
        self._queue: asyncio.Queue[BlockIo | None] = asyncio.Queue()
        self._files: list[AsyncFileIO] = []
        self._coroutines: list[concurrent.futures.Future[None]] = []
        self._closed = False
        try:
            asyncio.run_coroutine_threadsafe(self._open(iodepth), self._loop).result(OPEN_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self._coroutines = [
            asyncio.run_coroutine_threadsafe(self._serve(place, file), self._loop)
            for place, file in enumerate(self._files)
        ]

    async def _open(self, num_files: int) -> None:
        direct = fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT
        again = f"/proc/self/fd/{self._fd}"

        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | direct | os.O_CLOEXEC)

        for _ in range(num_files):
            file = await aiofiles.open(
                again, "r+b", buffering=0, opener=opener, loop=self._loop, executor=self._executor
            )
            self._files.append(file)

    def submit(
        self, tag: int, writes: Writes, offsets: Places, slots: Places | None = None, headers: Headers | None = None
    ) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._loop.call_soon_threadsafe(self._enqueue, self._ledger.begin(tag, writes, offsets, slots, headers))

    def _enqueue(self, ios: list[BlockIo]) -> None:
        for io in ios:
            self._queue.put_nowait(io)

    async def _serve(self, place: int, file: AsyncFileIO) -> None:
        while (io := await self._queue.get()) is not None:
            await self._perform(file, io, io.slot_at(place, len(self._files)))

    async def _perform(self, file: AsyncFileIO, io: BlockIo, slot: int) -> None:
        block = self._arena[slot * self._bs : (slot + 1) * self._bs]
        io.write_header(np.frombuffer(block, np.uint8))
        num_moved = num_short = 0
        begin_ns = time.perf_counter_ns()
        try:
            await file.seek(io.offset)
            seeked_ns = time.perf_counter_ns()
            while num_moved < self._bs:
                rest = block[num_moved:]
                moved = await (file.write(rest) if io.write else file.readinto(rest))
                if not moved:
                    self._ledger.fail(io, None, num_moved)
                    return
                num_moved += moved
                num_short += moved < len(rest)
        except OSError as error:
            self._ledger.fail(io, error, num_moved)
            return
        self._ledger.end(io, seeked_ns - begin_ns, time.perf_counter_ns() - seeked_ns, num_short)

    def close(self) -> None:
        if self._thread.is_alive():
            if not self._closed:
                self._closed = True
                for _ in self._coroutines:
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
            if concurrent.futures.wait(self._coroutines, CLOSE_TIMEOUT_S).not_done:
                raise self._ledger.error(errno.ETIMEDOUT, "close")
            asyncio.run_coroutine_threadsafe(self._close_files(), self._loop).result(CLOSE_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._executor.shutdown()
            os.close(self._fd)

    async def _close_files(self) -> None:
        for file in self._files:
            await file.close()
