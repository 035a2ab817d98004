"""Plans, made in processes of their own: thousands of uses take seconds, and a thread of the daemon's interpreter would
hold up every rank meanwhile (measured: a round trip of 26 µs became 5 ms).

``python -m io_daemon.serve.planner`` is such a process. Its stdin is a memfd with a ``PlanRequest``, its stdout an
empty one for the ``Plan``. Arrays lie in them as they are and the daemon maps the answer: nothing of it is copied or
parsed, so that a plan of a million accesses (100 MB) does not hold the loop either.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from io_daemon.errors import WorldError
from io_daemon.policy.residency import Plan, PlanRequest, plan
from io_daemon.serve.threads import in_thread
from io_daemon.shared.protocol import align_up

PLAN_TIMEOUT_S: Final = 60.0
PROCESSES_MAX: Final = 2
"""So that a plan that takes long, or a planner that hangs, does not keep all other tenants waiting."""
NICENESS: Final = 10
"""A plan is wanted soon, the training beside it now."""
ALIGNMENT: Final = 64

_COUNT: Final = struct.Struct("<Q")


class Planner:
    """Makes PROCESSES_MAX plans at a time, in the order in which they were asked for. A tenant asks for one after the
    other, so that tenants take turns."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(PROCESSES_MAX)

    async def plan(self, request: PlanRequest) -> Plan:
        """Raises WorldError if the process fails or takes longer than PLAN_TIMEOUT_S. Cancelling ends it."""
        async with self._turns:
            with _memfd() as asked, _memfd() as answered:
                await in_thread(lambda: dump(request, asked))
                await self._run(asked, answered, len(request.trace))
                made = await in_thread(lambda: load(answered))
        if not isinstance(made, Plan):
            raise WorldError("the planner answered with something that is no plan")
        return made

    async def _run(self, asked: int, answered: int, num_accesses: int) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", __name__, stdin=asked, stdout=answered
        )
        try:
            async with asyncio.timeout(PLAN_TIMEOUT_S):
                await process.wait()
        except TimeoutError as error:
            raise WorldError(f"no plan for {num_accesses} accesses within {PLAN_TIMEOUT_S:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise WorldError(f"the planner ended with status {process.returncode}")


@contextmanager
def _memfd() -> Iterator[int]:
    fd = os.memfd_create("infinity-plan", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def dump(value: object, fd: int) -> None:
    """Pickled, its arrays behind it, each aligned; the file's offset is where it was."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = [len(view) for view in views]
    start = 0
    for left in (memoryview(_COUNT.pack(len(sizes)) + b"".join(map(_COUNT.pack, sizes))), *views):
        offset, start = start, align_up(start + len(left), ALIGNMENT)
        while left:
            written = os.pwrite(fd, left, offset)
            left, offset = left[written:], offset + written


def load(fd: int) -> Any:
    """What ``dump`` wrote; its arrays are read-only and lie in a mapping of the file. Raises WorldError if the file is
    not whole."""
    try:
        whole = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        (count,) = _COUNT.unpack_from(whole)
        sizes = [_COUNT.unpack_from(whole, _COUNT.size * (1 + index))[0] for index in range(count)]
        start = align_up(_COUNT.size * (1 + count), ALIGNMENT)
        views = []
        for size in sizes:
            views.append(whole[start : start + size])
            start = align_up(start + size, ALIGNMENT)
        return pickle.loads(views[0], buffers=views[1:])
    except (ValueError, IndexError, struct.error, pickle.UnpicklingError, EOFError, TypeError) as error:
        raise WorldError(f"the planner's answer is not whole: {error}") from error


def main() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    dump(plan(load(sys.stdin.fileno())), sys.stdout.fileno())


if __name__ == "__main__":
    main()
