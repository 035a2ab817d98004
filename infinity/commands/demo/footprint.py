"""What a tree of processes costs the machine, sampled from /proc while it runs.

Memory is the sum of PSS: pages that several processes share (the arena) count once in all, where RSS would count them
in each. Growth of Cached and Shmem shows what hides in the page cache; open swap files are checked for O_DIRECT.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from io_daemon.disk.kernel_text import read_text
from io_daemon.machine.meminfo import meminfo

PROC = Path("/proc")
SAMPLE_INTERVAL_S = 0.1


def process_tree(root_pid: int) -> list[int]:
    """``root_pid`` and all its descendants that live now."""
    found, unexplored = [], [root_pid]
    while unexplored:
        pid = unexplored.pop()
        found.append(pid)
        for children in (PROC / str(pid) / "task").glob("*/children"):
            try:
                unexplored += [int(child) for child in children.read_text().split()]
            except OSError:  # the thread ended while we looked
                continue
    return found


def _fields(path: Path) -> dict[str, int]:
    """``name: value [kB]`` lines as bytes where kB is given; empty if the process has ended."""
    values = {}
    for line in (read_text(path) or "").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            values[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return values


def pss_bytes(pid: int) -> int:
    return _fields(PROC / str(pid) / "smaps_rollup").get("Pss", 0)


def pss_of(pids: list[int], above: int = 0) -> dict[int, int]:
    """PSS of each process, bytes; where the sum is ``above`` a former peak, the lesser of two looks, there and back.

    Processes are looked at one after another. While the daemon maps an arena that the rank has had alone, a look at the
    rank before and at the daemon after it counts the arena one and a half times; the look back sees it too small.
    """
    found = {pid: pss_bytes(pid) for pid in pids}
    if sum(found.values()) <= above:
        return found
    back = {pid: pss_bytes(pid) for pid in reversed(pids)}
    return min(found, back, key=lambda look: sum(look.values()))


@dataclass(frozen=True)
class DeviceBytes:
    """What processes made the block layer move: /proc/PID/io."""

    read: int
    written: int

    @classmethod
    def of(cls, pids: list[int]) -> DeviceBytes:
        counters = [_fields(PROC / str(pid) / "io") for pid in pids]
        return cls(sum(c.get("read_bytes", 0) for c in counters), sum(c.get("write_bytes", 0) for c in counters))

    def __sub__(self, other: DeviceBytes) -> DeviceBytes:
        return DeviceBytes(self.read - other.read, self.written - other.written)


def process_name(pid: int) -> str:
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended"
    return " ".join(word.decode(errors="replace").rsplit("/", 1)[-1] for word in command[:4] if word)


def swap_descriptors(pid: int, swap_dir: Path) -> dict[str, bool]:
    """Regular files under ``swap_dir`` that the process holds open now -> whether they are open with O_DIRECT."""
    found = {}
    try:
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            try:
                target = os.readlink(descriptor)
                if not target.startswith(f"{swap_dir}/") or not Path(target).is_file():
                    continue
                lines = (PROC / str(pid) / "fdinfo" / descriptor.name).read_text().splitlines()
            except OSError:  # closed while we looked
                continue
            flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
            found[target] = bool(flags & os.O_DIRECT)
    except OSError:
        return found
    return found


@dataclass(frozen=True)
class Sample:
    """One look at a process tree: seconds since the sampler started, then bytes."""

    seconds: float
    pss: int
    device: DeviceBytes


@dataclass
class Footprint:
    """Peaks over the sampled time, bytes."""

    peak_pss: int = 0
    peak_pss_by_process: dict[str, int] = field(default_factory=dict)
    cached_growth: int = 0
    shmem_growth: int = 0
    timeline: list[Sample] = field(default_factory=list)
    direct_files: set[str] = field(default_factory=set)
    buffered_files: set[str] = field(default_factory=set)

    @property
    def samples_per_second(self) -> float:
        return len(self.timeline) / self.timeline[-1].seconds if self.timeline else 0.0

    def as_json(self) -> dict[str, object]:
        return {
            "peak_pss_bytes": self.peak_pss,
            "peak_pss_bytes_by_process": self.peak_pss_by_process,
            "cached_growth_bytes": self.cached_growth,
            "shmem_growth_bytes": self.shmem_growth,
            "samples_per_second": round(self.samples_per_second, 2),
            "direct_files": len(self.direct_files),
            "buffered_files": len(self.buffered_files),
        }


class FootprintSampler:
    """Samples a process tree on a thread from ``start`` until ``stop``."""

    def __init__(self, root_pid: int, swap_dir: Path) -> None:
        self.footprint = Footprint()
        self._root_pid, self._swap_dir = root_pid, swap_dir
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="footprint", daemon=True)
        self._before = meminfo()

    def start(self) -> FootprintSampler:
        self._thread.start()
        return self

    def stop(self) -> Footprint:
        self._ended.set()
        self._thread.join()
        return self.footprint

    def _run(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self._sample(started)

    def _sample(self, started: float) -> None:
        pids = process_tree(self._root_pid)
        pss = pss_of(pids, above=self.footprint.peak_pss)
        self.footprint.timeline.append(Sample(time.monotonic() - started, sum(pss.values()), DeviceBytes.of(pids)))
        if sum(pss.values()) > self.footprint.peak_pss:
            self.footprint.peak_pss = sum(pss.values())
            self.footprint.peak_pss_by_process = {f"{pid} {process_name(pid)}": size for pid, size in pss.items()}
        now = meminfo()
        for name, attribute in (("Cached", "cached_growth"), ("Shmem", "shmem_growth")):
            growth = now[name] - self._before[name]
            setattr(self.footprint, attribute, max(getattr(self.footprint, attribute), growth))
        for pid in pids:
            for path, direct in swap_descriptors(pid, self._swap_dir).items():
                (self.footprint.direct_files if direct else self.footprint.buffered_files).add(path)
