"""Where a figure was taken: without this a figure means nothing to anyone else."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch

from infinity.demo.footprint import meminfo


def _block_device(directory: Path) -> dict[str, Any]:
    """The whole-disk block device below ``directory``, with what its queue says; empty for none (tmpfs, overlay)."""
    number = directory.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not node.exists():
        return {}
    node = node.resolve()
    disk = node if (node / "queue").is_dir() else node.parent
    queue = disk / "queue"
    model = disk / "device" / "model"
    return {
        "name": disk.name,
        "model": model.read_text().strip() if model.exists() else "unnamed",
        "rotational": (queue / "rotational").read_text().strip() == "1",
        "logical_block_bytes": int((queue / "logical_block_size").read_text()),
        "scheduler": (queue / "scheduler").read_text().strip(),
    }


def _filesystem(directory: Path) -> str:
    """Type of the filesystem that holds ``directory``: the longest mount point above it."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, filesystem, *_ = line.split()
        if directory.resolve().is_relative_to(mount) and len(mount) > len(best):
            best, kind = mount, filesystem
    return kind


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe_machine(swap_dir: Path) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": meminfo()["MemTotal"],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "swap_device": _block_device(swap_dir),
        "swap_filesystem": _filesystem(swap_dir),
        "swap_free_bytes": shutil.disk_usage(swap_dir).free,
    }
