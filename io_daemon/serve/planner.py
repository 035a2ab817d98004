"""Plans, made in a process of their own: thousands of uses take seconds, and a thread of the daemon's interpreter would
hold up every rank meanwhile (measured: a round trip of 26 µs became 5 ms).

``python -m io_daemon.serve.planner`` is that process: a pickled ``PlanRequest`` on stdin, the
pickled ``Plan`` on stdout.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from typing import Final

from io_daemon.errors import WorldError
from io_daemon.policy.residency import Plan, PlanRequest, plan

PLAN_TIMEOUT_S: Final = 300.0
NICENESS: Final = 10
"""A plan is wanted soon, the training beside it now."""


class Planner:
    """One plan at a time, however many tenants ask."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def plan(self, request: PlanRequest) -> Plan:
        """Raises WorldError if the process fails or takes longer than PLAN_TIMEOUT_S. Cancelling ends it."""
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            try:
                answer, _ = await asyncio.wait_for(process.communicate(pickle.dumps(request)), PLAN_TIMEOUT_S)
            except TimeoutError as error:
                raise WorldError(f"no plan for {len(request.trace)} accesses within {PLAN_TIMEOUT_S:g} s") from error
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if process.returncode != 0:
                raise WorldError(f"the planner ended with status {process.returncode}")
            made = pickle.loads(answer)
            if not isinstance(made, Plan):
                raise WorldError("the planner answered with something that is no plan")
            return made


def main() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    request = pickle.load(sys.stdin.buffer)
    pickle.dump(plan(request), sys.stdout.buffer)


if __name__ == "__main__":
    main()
