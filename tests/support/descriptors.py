"""Descriptors and mappings of the test's own process."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from pathlib import Path


def open_fds() -> set[str]:
    """Those that are open, after what earlier tests left to the collector: it must not close in between."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def held() -> Counter[str]:
    """Descriptors by what they are, and mappings of ours. What is compared with an earlier count must not have grown:
    it may have shrunk, by what an earlier test's thread closed in between."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").rstrip("0123456789[]:")] += 1
    maps = Path("/proc/self/maps").read_text()
    found["mappings"] = maps.count("infinity-") + maps.count(".swap")
    return found
