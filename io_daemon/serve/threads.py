"""Work in a thread that nobody leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from io_daemon.machine.limits import too_few_threads

T = TypeVar("T")
POOL_THREADS: Final = 16
"""They wait for the disk, not for a core: ranks that attach at once, and those that leave meanwhile."""


def start_pool() -> ThreadPoolExecutor:
    """Threads for all that waits, started now. One that is missing when a rank attaches or leaves would end that rank
    in words that help nobody, or keep what it held. Raises WorldError where the system gives no more."""
    pool = ThreadPoolExecutor(POOL_THREADS, "io-daemon")
    all_there = threading.Barrier(POOL_THREADS)
    try:
        for _ in range(POOL_THREADS):
            pool.submit(_wait, all_there)  # none is idle before all are there, so that each starts another
    except RuntimeError as error:
        raise too_few_threads(error, f"the daemon needs about {POOL_THREADS} threads") from error
    finally:
        all_there.abort()
    return pool


def _wait(barrier: threading.Barrier) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()


async def in_thread(work: Callable[[], T]) -> T:
    """Whoever is cancelled goes on when the thread has ended: what it works on may not be given away before."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise
    finally:
        del working  # what the work raised holds this frame
