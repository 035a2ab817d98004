"""What the processor is called, as /proc/cpuinfo has it (proc(5))."""

from __future__ import annotations

from pathlib import Path

from io_daemon.disk.kernel_text import read_text
from io_daemon.disk.mounts import PROC


def processor_name(proc: Path = PROC) -> str | None:
    """None where the kernel names none, as on most ARM machines."""
    for line in (read_text(proc / "cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None
