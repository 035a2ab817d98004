"""What the two sides of a side-by-side run share: a worker takes steps when it is told to, over its standard streams.

The driver writes ``{"steps": n}`` lines, the worker answers one line each with the seconds and the loss of every step;
``{"steps": 0}`` ends it. Standard output carries nothing else, so libraries that print are sent to standard error.
Needs nothing but the standard library: it runs in every virtual environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


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
        seconds, losses = [], []
        for _ in range(num_steps):
            started = time.perf_counter()
            losses.append(step(index))
            seconds.append(time.perf_counter() - started)
            index += 1
        print(json.dumps({"seconds": seconds, "losses": losses, **report()}), file=answers)
    print(json.dumps({"ended": True}), file=answers)
