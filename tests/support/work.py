"""How much work a call does, counted in lines of the policy's code: a number that no machine's pace changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Lines of io_daemon.policy that ``call`` executes. (What C does inside one is not seen.)"""
    num_lines = 0

    def trace_line(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace_line

    def trace_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return trace_line if "/io_daemon/policy/" in frame.f_code.co_filename else None

    earlier = sys.gettrace()
    sys.settrace(trace_call)
    try:
        call()
    finally:
        sys.settrace(earlier)
    return num_lines
