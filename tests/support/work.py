"""How much work a call does, counted in lines of our code: a number that no machine's pace changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object], room: str = "io_daemon/policy") -> int:
    """Lines of the room that ``call`` executes. (What C does inside one is not seen.)"""
    num_lines = 0

    def trace_line(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace_line

    def trace_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return trace_line if f"/{room}/" in frame.f_code.co_filename else None

    earlier = sys.gettrace()
    sys.settrace(trace_call)
    try:
        call()
    finally:
        sys.settrace(earlier)
    return num_lines
