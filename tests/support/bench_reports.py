"""One made-up Report per kind of ``io-daemon bench``: whole, plausible, the same in every run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from io_daemon.bench.result import (
    CompareLine,
    ComparePair,
    CompareResult,
    Cpu,
    Direction,
    IoResult,
    LatencySummary,
    Report,
    SteadyState,
    StepResult,
    SweepCell,
    SweepFinalist,
    SweepReplay,
    SweepResult,
    TimeSeries,
    Verification,
)
from io_daemon.machine.block_device import BlockDevice, PcieLink
from io_daemon.machine.drive_health import DriveHealth
from io_daemon.machine.facts import DirectoryFacts, EngineFact, MachineFacts

GB = 10**9
DIRECTORY = "/nvme0/swap"
WARNING = "the file fits twice into RAM and I/O is buffered: these are the page cache's figures"


def latency(p50_ns: int) -> LatencySummary:
    return LatencySummary(
        num_ios=40_000,
        min_ns=p50_ns // 2,
        mean_ns=p50_ns * 1.1,
        p50_ns=p50_ns,
        p99_ns=p50_ns * 4,
        p999_ns=p50_ns * 9,
        max_ns=p50_ns * 30,
    )


def direction(bw_bytes: float) -> Direction:
    return Direction(
        io_bytes=int(bw_bytes * 20),
        num_ios=40_000,
        bw_bytes=bw_bytes,
        iops=bw_bytes / (1 << 20),
        slat=latency(4_000),
        clat=latency(1_800_000),
        lat=latency(1_804_000),
    )


def series(seconds: int = 20) -> TimeSeries:
    """Two seconds of ramp, a burst until 6 s, then the steady rate with a ripple; 0.5 s apart."""
    at_s = [-2 + 0.25 + 0.5 * index for index in range(2 * (seconds + 2))]
    rates = [(3.2 if at < 6 else 1.9) * GB * (1 + 0.03 * math.sin(3 * at)) for at in at_s]
    return TimeSeries(
        interval_s=0.5,
        at_s=at_s,
        read_bw_bytes=rates,
        write_bw_bytes=[0.88 * rate for rate in rates],
        clat_p99_ns=[int(14e15 / rate) for rate in rates],
    )


def io_result(**changes: Any) -> IoResult:
    result = IoResult(
        engine="io_uring",
        direct=True,
        measured_s=20.0,
        read=direction(2.1 * GB),
        write=direction(1.85 * GB),
        cpu=Cpu(user_s=1.5, system_s=2.5, s_per_gb=0.05),
        series=series(),
        steady=SteadyState(reached=True, begin_s=6.0, bw_bytes=3.57 * GB, burst_bw_bytes=6.02 * GB),
        num_short_ios=0,
        verification=Verification(num_blocks=2048, num_bad_blocks=0, seconds=1.2, bad=[]),
        warnings=[],
    )
    return result.model_copy(update=changes)


def sweep_result(**changes: Any) -> SweepResult:
    cells = [
        SweepCell(
            engine=engine,
            bs=bs,
            iodepth=iodepth,
            score_bw_bytes=(rate := _cell_rate(engine, bs, iodepth)),
            rounds=[rate * 0.98, rate, rate * 1.01],
        )
        for engine in ("io_uring", "libaio", "posix")
        for bs in (128 << 10, 512 << 10, 1 << 20, 4 << 20)
        for iodepth in (1, 4, 16, 64)
        if (engine, bs, iodepth) != ("posix", 128 << 10, 1)  # the search leaves cells out
    ]
    cells.sort(key=lambda cell: -cell.score_bw_bytes)
    chosen = cells[0]
    result = SweepResult(
        cells=cells,
        chosen=chosen,
        seconds=71.0,
        num_grid_cells=48,
        replay=SweepReplay(
            trace="gpt-168m",
            state_bytes=512 << 20,
            seconds=14.0,
            finalists=[
                SweepFinalist(
                    engine=cell.engine,
                    bs=cell.bs,
                    iodepth=cell.iodepth,
                    step_s=0.3 + 0.05 * number,
                    steps_s=[0.29 + 0.05 * number, 0.3 + 0.05 * number, 0.35 + 0.05 * number],
                )
                for number, cell in enumerate(cells[:3])
            ],
        ),
        confirmation=io_result(),
        io_daemon={"engine": chosen.engine, "block_size": chosen.bs, "queue_depth": chosen.iodepth},
        remembered_in="/var/lib/io-daemon/tuning.json",
        warnings=[],
    )
    return result.model_copy(update=changes)


def _cell_rate(engine: str, bs: int, iodepth: int) -> float:
    share = {"io_uring": 1.0, "libaio": 0.97, "posix": 0.85}[engine]
    return 6.4 * GB * share * (1 - math.exp(-bs * iodepth / (6 << 20))) * (0.9 if bs > 1 << 20 else 1)


def compare_result(**changes: Any) -> CompareResult:
    lines = []
    for rw in ("read", "write", "rw"):
        for engine in ("io_uring", "libaio"):
            lines += [
                compare_line(rw, engine, "bw_bytes", 1.9 * GB, ratio=1.004, spread=(0.97, 1.03)),
                compare_line(rw, engine, "clat_p50_ns", 1.8e6, ratio=0.996, spread=(0.98, 1.02)),
                compare_line(rw, engine, "clat_p99_ns", 6.1e6, ratio=1.09, spread=(0.86, 1.12)),
                compare_line(rw, engine, "cpu_s_per_gb", 0.05, ratio=1.11, spread=(0.95, 1.06)),
            ]
    return CompareResult(lines=lines, fio_version="fio-3.33", warnings=[]).model_copy(update=changes)


def compare_line(
    rw: str, engine: str, metric: Any, fio: float, *, ratio: float, spread: tuple[float, float]
) -> CompareLine:
    return CompareLine(
        rw=rw,
        engine=engine,
        bs=1 << 20,
        iodepth=32,
        metric=metric,
        pairs=[ComparePair(ours=fio * ratio * (1 + 0.01 * (index - 4.5) / 4.5), fio=fio) for index in range(10)],
        ratio=ratio,
        fio_spread=spread,
        inside=spread[0] <= ratio <= spread[1] or metric == "cpu_s_per_gb",
    )


def step_result(**changes: Any) -> StepResult:
    result = StepResult(
        trace="gpt-7b",
        model="gpt-7b",
        num_params=7 * 10**9,
        tokens_per_step=262_144,
        scale=0.04,
        num_steps=5,
        num_warm_up_steps=2,
        host_budget_bytes=16 << 30,
        arena_bytes=655 << 20,
        engine="io_uring",
        bs=1 << 20,
        iodepth=32,
        step_s=96.0,
        steps_s=[97.5, 96.0, 95.1, 95.8, 96.4],
        compute_s=41.0,
        update_s=22.0,
        stall_s=33.0,
        update_stall_s=25.0,
        stall_share=33 / 96,
        read_bytes=112 * GB,
        write_bytes=98 * GB,
        bytes_per_day_written=88e12,
        drive_life_days=82.0,
        drive_life_note="at 7,200 TB that the vendor promises, 0 of them written so far",
        cpu_offload_step_s=64.0,
        hidden_from_compute_s=130.0,
        break_even_note="cpu offload is 1.5 x faster, and needs 126 GB of host memory",
        warnings=[],
    )
    return result.model_copy(update=changes)


def nvme(name: str, numa_node: int = 0) -> BlockDevice:
    return BlockDevice(
        name=name,
        kind="disk",
        layer=None,
        model="ACME Turbo 3840",
        size_bytes=3840 * GB,
        logical_block_bytes=512,
        physical_block_bytes=4096,
        scheduler="none",
        rotational=False,
        nr_requests=1023,
        write_cache="write back",
        numa_node=numa_node,
        pcie=PcieLink(gt_per_s=16.0, num_lanes=4, gt_per_s_max=16.0, num_lanes_max=4),
        raid_chunk_bytes=None,
        health=DriveHealth(source="smartctl", temperature_c=41, percent_used=3, written_bytes=212_000 * GB),
        below=[],
        notes=[],
    )


def raid0(*disks: BlockDevice) -> BlockDevice:
    return nvme("md0").model_copy(
        update={
            "kind": "raid",
            "layer": "raid0",
            "model": None,
            "health": None,
            "pcie": None,
            "numa_node": None,
            "raid_chunk_bytes": 512 << 10,
            "below": list(disks),
        }
    )


def machine_facts(directory: str = DIRECTORY, **changes: Any) -> MachineFacts:
    facts = MachineFacts(
        version="0.1.0",
        python="3.11.9",
        kernel="6.8.0-45-generic",
        processor="ACME EPYC-like 32-Core",
        architecture="x86_64",
        num_cores=32,
        num_cores_online=32,
        numa_nodes="0-1",
        ram_bytes=256 << 30,
        ram_available_bytes=240 << 30,
        cgroup_ram_max_bytes=None,
        swap_bytes=0,
        page_bytes=4096,
        memlock_bytes="unlimited",
        aio_nr=0,
        aio_max_nr=65536,
        io_uring_disabled=0,
        engines=[
            EngineFact(name="io_uring", compiled=True, works=True, reason=None),
            EngineFact(name="libaio", compiled=True, works=True, reason=None),
            EngineFact(name="posix", compiled=True, works=True, reason=None),
        ],
        directories=[
            DirectoryFacts(
                path=directory,
                filesystem="xfs",
                mount_point="/nvme0",
                mount_options=["rw", "noatime"],
                source="/dev/md0",
                free_bytes=6_000 * GB,
                total_bytes=7_680 * GB,
                direct=True,
                direct_refusal=None,
                device=raid0(nvme("nvme0n1"), nvme("nvme1n1", numa_node=1)),
                notes=[],
            )
        ],
        notes=[],
    )
    return facts.model_copy(update=changes)


RESULTS: dict[str, Callable[..., Any]] = {
    "io": io_result,
    "sweep": sweep_result,
    "compare": compare_result,
    "step": step_result,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "io": {"rw": "rw", "rwmixread": 53, "bs": 1 << 20, "iodepth": 32, "numjobs": 1, "direct": True,
           "engine": "io_uring", "size": 2 << 30, "runtime_s": 20.0, "ramp_time_s": 2.0, "verify": True, "seed": 1},
    "sweep": {"rwmixread": 53, "engines": ["io_uring", "libaio", "posix"], "size": 2 << 30, "cell_s": 0.8, "seed": 1},
    "compare": {"rws": ["read", "write", "rw"], "engines": ["io_uring", "libaio"], "block_sizes": [1 << 20],
                "iodepths": [32], "pairs": 10, "direct": True, "size": 2 << 30, "seed": 1},
    "step": {"trace": "gpt-7b", "engine": "auto", "bs": 1 << 20, "iodepth": 32, "size": 4 << 30,
             "host_budget_bytes": 16 << 30, "steps": 5, "seed": 1},
}  # fmt: skip


def report(kind: Any, *, directory: str = DIRECTORY, machine: MachineFacts | None = None, **changes: Any) -> Report:
    """``changes``: of the result's fields."""
    return Report(
        kind=kind,
        version="0.1.0",
        started="2026-11-21T04:00:00+00:00",
        command=["io-daemon", "bench", kind, directory],
        settings={"directories": [directory], **SETTINGS[kind]},
        machine=(machine or machine_facts(directory)).model_dump(mode="json"),
        result=RESULTS[kind](**changes),
        advice="Use io_uring with block_size 1024K and queue_depth 64: it moves 6.40 GB/s of training's mix.",
    )
