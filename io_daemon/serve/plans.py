"""The plans of one tenant that are being made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Set

from io_daemon.errors import WorldError
from io_daemon.policy.residency import Plan, PlanRequest
from io_daemon.serve.planner import Planner

log = logging.getLogger(__name__)


class PlansToCome:
    """One after the other, so that tenants take turns at the planner."""

    def __init__(self, planner: Planner, whose: str) -> None:
        self.num_made = 0
        self._planner, self._whose = planner, whose
        self._turn = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The work on each, by trace."""

    @property
    def traces(self) -> Set[int]:
        """Those that wait for their plan."""
        return self._tasks.keys()

    async def ask(self, trace_id: int, request: PlanRequest, adopt: Callable[[int, Plan], Awaitable[None]]) -> None:
        """Have a plan made and given to ``adopt``, in the place of one that the trace still waits for."""
        if (earlier := self._tasks.pop(trace_id, None)) is not None:
            await _end([earlier])
        self._tasks[trace_id] = asyncio.ensure_future(self._make(trace_id, request, adopt))

    async def end(self) -> None:
        """No plan comes any more."""
        await _end(self._tasks.values())
        self._tasks.clear()  # a task that was cancelled holds its frames, and they the tenant and its descriptors

    async def _make(self, trace_id: int, request: PlanRequest, adopt: Callable[[int, Plan], Awaitable[None]]) -> None:
        try:
            async with self._turn:
                plan = await self._planner.plan(request)
            await adopt(trace_id, plan)
            self.num_made += 1
        except (WorldError, OSError, ValueError) as error:  # chunks may have gone since it was asked for
            log.warning("%s: goes on without a plan for trace %d: %s", self._whose, trace_id, error)
        finally:
            if self._tasks.get(trace_id) is asyncio.current_task():
                del self._tasks[trace_id]


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel them, and wait until they have ended."""
    cancelled = [task for task in tasks if task.cancel()]
    await asyncio.gather(*cancelled, return_exceptions=True)
