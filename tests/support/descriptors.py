"""Descriptors of the test's own process."""

from __future__ import annotations

import gc
import os


def open_fds() -> set[str]:
    """Those that are open, after what earlier tests left to the collector: it must not close in between."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
