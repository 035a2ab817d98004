"""What the two sides of a side-by-side run share: a worker takes steps when it is told to, over its standard streams.

The driver writes ``{"steps": n}`` lines, the worker answers one line each with the seconds, the loss and the costs of
every step; ``{"steps": 0}`` ends it. Standard output carries nothing else, so libraries that print are sent to
standard error. Needs nothing but the standard library: it runs in every virtual environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def _cost(before: resource.struct_rusage, after: resource.struct_rusage) -> dict[str, float]:
    """What the kernel counted of this process during a step."""
    return {
        "page_faults": after.ru_minflt - before.ru_minflt,
        "user_s": after.ru_utime - before.ru_utime,
        "system_s": after.ru_stime - before.ru_stime,
        "sleeps": after.ru_nvcsw - before.ru_nvcsw,
    }


def claim_stdout() -> int:
    """Keep the real standard output for answers; whatever else prints goes to standard error."""
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    return answers_fd


def serve_steps(answers_fd: int, step: Callable[[int], float], report: Callable[[], dict[str, Any]]) -> None:
    """Answer the driver until it says stop. ``step(index)`` trains one step and returns its loss."""
    answers = os.fdopen(answers_fd, "w", buffering=1)
    print(json.dumps({"ready": True, **report()}), file=answers)
    index = 0
    for line in sys.stdin:
        num_steps = json.loads(line)["steps"]
        if num_steps == 0:
            break
        seconds, losses, costs = [], [], []
        for _ in range(num_steps):
            before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            losses.append(step(index))
            seconds.append(time.perf_counter() - started)
            costs.append(_cost(before, resource.getrusage(resource.RUSAGE_SELF)))
            index += 1
        print(json.dumps({"seconds": seconds, "losses": losses, "costs": costs, **report()}), file=answers)
    print(json.dumps({"ended": True}), file=answers)
