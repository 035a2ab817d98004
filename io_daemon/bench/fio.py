"""fio as a yardstick: the same file, blocks, depth and engine, and what it says of itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from io_daemon.bench.settings import IoSettings
from io_daemon.bench.target import DATA_OFFSET
from io_daemon.errors import ConfigError, WorldError
from io_daemon.shared.protocol import PAGE_BYTES

SLACK_S: Final = 60.0
RUNTIME_ERROR_MAX: Final = 0.1


@dataclass(frozen=True)
class Figures:
    """One run's figures, fio's or ours. Rates of reads and writes together; latencies of reads, where there are any."""

    bw_bytes: float
    clat_p50_ns: float
    clat_p99_ns: float
    cpu_s_per_gb: float


def fio_version() -> str:
    """Raises ConfigError if fio is not installed."""
    program = shutil.which("fio")
    if program is None:
        raise ConfigError("compare", "fio", "is not installed: apt install fio, or the like")
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def run_fio(settings: IoSettings, path: Path, buffers: Path) -> Figures:
    """One run over the blocks of a laid-out target. Raises WorldError with what fio says if it fails."""
    command = fio_command(settings, path, buffers)
    timeout_s = settings.runtime_s + settings.ramp_time_s + SLACK_S
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise WorldError(f"fio has not ended within {timeout_s:g} s: {' '.join(command)}") from error
    if run.returncode != 0:
        raise WorldError(f"fio ended with {run.returncode}: {run.stderr.strip() or run.stdout.strip()}")
    report = json.loads(run.stdout[run.stdout.index("{") :])
    ran_s = report["jobs"][0]["job_runtime"] / 1e3
    if abs(ran_s - settings.runtime_s) > RUNTIME_ERROR_MAX * settings.runtime_s:
        raise WorldError(f"fio ran for {ran_s:g} s where {settings.runtime_s:g} s were asked for")
    return parse_fio(report, settings)


def _milliseconds(seconds: float) -> str:
    """fio cuts fractions of a second off."""
    return f"{round(seconds * 1000)}ms"


def buffer_bytes(settings: IoSettings) -> int:
    """What fio needs of them: it aligns them itself."""
    return settings.iodepth * settings.bs + PAGE_BYTES


def fio_command(settings: IoSettings, path: Path, buffers: Path) -> list[str]:
    """One fio job. ``buffers``: a file for it to map, in memory like ours. Pages of its own lie scattered one time and
    together another, which makes twice the bandwidth on some machines and is not what two programs differ in."""
    return [
        "fio",
        "--name=bench",
        f"--filename={path}",
        f"--offset={DATA_OFFSET}",
        f"--size={settings.num_blocks * settings.bs}",
        f"--rw={settings.rw}",
        *([f"--rwmixread={settings.rwmixread}"] if settings.mixed else []),
        f"--bs={settings.bs}",
        f"--ioengine={settings.engine}",
        f"--iodepth={settings.iodepth}",
        f"--direct={int(settings.direct)}",
        f"--mem=mmapshared:{buffers}",
        f"--runtime={_milliseconds(settings.runtime_s)}",
        f"--ramp_time={_milliseconds(settings.ramp_time_s)}",
        f"--randseed={settings.seed}",
        *(["--fixedbufs=1", "--registerfiles=1"] if settings.engine == "io_uring" else []),  # as the reactor does
        "--time_based",
        "--group_reporting",
        "--output-format=json",
    ]


def parse_fio(report: dict[str, Any], settings: IoSettings) -> Figures:
    """Figures from fio's JSON."""
    job = report["jobs"][0]
    ways = [job[name] for name in ("read", "write") if job[name]["total_ios"]]
    percentiles = job["read" if settings.reads else "write"]["clat_ns"]["percentile"]
    moved_bytes = sum(way["io_bytes"] for way in ways)
    cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Figures(
        bw_bytes=float(sum(way["bw_bytes"] for way in ways)),
        clat_p50_ns=float(percentiles["50.000000"]),
        clat_p99_ns=float(percentiles["99.000000"]),
        cpu_s_per_gb=cpu_share * job["job_runtime"] / 1e3 / (moved_bytes / 1e9),
    )
