"""``bench step``: the I/O of a real training step, through the daemon's own policy, with as much work beside it.

A private daemon serves the directories as in training; one rank, which moves what all of the node's would, attaches
with the arena of the trace's plan and takes its steps (``replay``), the others' round trips beside it. What was
replayed at a scale is said for the full model.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from io_daemon.bench.result import StepResult
from io_daemon.bench.run import Observer, Silent, loop_warnings
from io_daemon.bench.settings import FREE_SHARE_KEPT
from io_daemon.bench.steps.break_even import StepParts, break_even_note, hidden_from
from io_daemon.bench.steps.drive_life import DriveWear, drive_life
from io_daemon.bench.steps.replay import Replay, StepFigures, writes_at_most
from io_daemon.bench.steps.room import arena_room_bytes, disk_room_bytes
from io_daemon.bench.steps.step_scale import is_fine, of_node, scaled, with_budget
from io_daemon.bench.steps.step_settings import StepSettings
from io_daemon.command.units import block_text, seconds_text
from io_daemon.config import DaemonSettings
from io_daemon.errors import BudgetError, ConfigError, SwapSpaceError
from io_daemon.machine.cpu_load import AcceleratorLoad, CpuLoad, Load
from io_daemon.machine.facts import describe_machine
from io_daemon.machine.meminfo import available_bytes
from io_daemon.machine.tuning import Chosen, choose
from io_daemon.policy.step_trace import StepTrace, load, work_before
from io_daemon.policy.window import ahead_bytes
from io_daemon.rank.client import Client
from io_daemon.rank.process import DaemonProcess

SETTLE_STEPS_MIN, SETTLE_STEPS_MAX = 2, 6
"""So many steps follow the plan before any is measured."""
SETTLED_CHANGE: Final = 0.05
"""Bytes moved change by less from step to step once a replay has settled."""
WORK_S_MAX: Final = 60.0
"""The work of one replayed step: beyond, minutes become hours and the answer is compute-bound anyway."""
DAY_S: Final = 86_400


def run_step(settings: StepSettings, observer: Observer | None = None) -> StepResult:
    """Raises ConfigError, BudgetError, SwapSpaceError, DeviceIOError, DaemonLostError; leaves no file behind."""
    observer = observer or Silent()
    rank = load(settings.trace)
    if settings.host_budget_bytes is not None:
        try:
            rank = with_budget(rank, settings.host_budget_bytes)
        except BudgetError as error:  # here a setting like any other
            raise ConfigError(error.key, error.budget_bytes, error.remedy) from error
    room_bytes = disk_room_bytes(settings.directories)
    chosen = choose(settings.directories, settings.daemon_engine, settings.bs, settings.iodepth)
    ahead = ahead_bytes(chosen.queue_depth, chosen.block_bytes, len(settings.directories))
    full = of_node(rank, ahead_bytes=ahead)
    trace, scale = scaled(full, _affordable_share(full, min(settings.size, room_bytes)), ahead_bytes=ahead)
    if trace.swap_bytes > room_bytes:
        raise SwapSpaceError(
            path=", ".join(str(path) for path in settings.directories),
            needed_bytes=trace.swap_bytes,
            free_bytes=room_bytes,
            remedy=f"{FREE_SHARE_KEPT:.0%} of a disk stay free: free some space, or name another directory",
        )
    check_writes(settings, trace)
    with (
        CpuLoad(settings.threads or _threads_of(full)) as cpu,
        _daemon_for(settings, chosen) as daemon,
        contextlib.ExitStack() as ranks,
    ):
        chosen = chosen._replace(engine=str(daemon.ready["engine"]))
        client, *others = (
            ranks.enter_context(Client.connect(str(daemon.socket), job=f"bench-{os.getpid()}", rank=number))
            for number in range(rank.ranks_per_node)
        )
        replay = Replay(client, trace, _load_for(settings, trace, cpu), client.swap_dirs, others)
        num_warm_up_steps = _settle(replay, observer)
        observer.phase("replaying steps", settings.steps)
        figures = []
        for number in range(settings.steps):
            figures.append(replay.take_step())
            observer.progress(number + 1)
        alone_s = replay.work_alone_s()
    return _result(settings, rank, trace, scale, chosen, num_warm_up_steps, figures, alone_s)


def check_writes(settings: StepSettings, trace: StepTrace) -> None:
    """Raises ConfigError if a replay of ``trace`` may write more than the limit."""
    expected_bytes = writes_expected(trace, settings.steps)
    if expected_bytes > settings.write_limit_bytes:
        raise ConfigError(
            "write_limit",
            settings.write_limit_bytes,
            f"this replay may write {expected_bytes} bytes: lower --size or --steps, raise --write-limit, or say --yes",
        )


def writes_expected(trace: StepTrace, num_steps: int) -> int:
    """At most, with the steps that settle."""
    return writes_at_most(trace, 1 + SETTLE_STEPS_MAX + num_steps)


def _affordable_share(trace: StepTrace, size_bytes: int) -> float:
    """The share of the state that disk and memory have room for."""
    swap_share = size_bytes / max(1, trace.swap_bytes)
    ram_share = arena_room_bytes() / (trace.num_frames * trace.frame_bytes)
    return min(1.0, swap_share, ram_share)


def _threads_of(trace: StepTrace) -> int:
    """The threads that were traced, else all cores but one, which is the daemon's."""
    return trace.rates.num_threads if trace.rates else max(1, len(os.sched_getaffinity(0)) - 1)


def _load_for(settings: StepSettings, trace: StepTrace, cpu: CpuLoad) -> Load:
    """Who computes. Raises ConfigError if it would take for ever."""
    flops = sum(work.flops for work in work_before(trace))
    if settings.compute_tflops is not None:
        if trace.rates is not None:
            raise ConfigError(
                "compute_tflops",
                settings.compute_tflops,
                f"{settings.trace} was measured on a CPU, in seconds: record FLOPs with `infinity trace --meta`",
            )
        rate, computes = settings.compute_tflops * 1e12, "an accelerator of so many TFLOPS"
    elif trace.rates is not None:
        return cpu
    else:
        rate, computes = cpu.calibrate().flops, f"this CPU with {cpu.num_threads} threads"
    if flops / rate > WORK_S_MAX:
        raise ConfigError(
            "compute_tflops",
            settings.compute_tflops,
            f"a replayed step would compute for {flops / rate:.0f} s on {computes} ({rate / 1e12:.3g} TFLOPS): say "
            "what will train it with --compute-tflops, or lower --size",
        )
    return cpu if settings.compute_tflops is None else AcceleratorLoad(cpu, rate)


def _daemon_for(settings: StepSettings, chosen: Chosen) -> DaemonProcess:
    """A daemon of our own, as training starts one."""
    values = {"engine": chosen.engine, "block_size": chosen.block_bytes, "queue_depth": chosen.queue_depth}
    daemon_settings = DaemonSettings.model_validate({**values, "verify_checksums": settings.verify})
    return DaemonProcess(swap_dirs=settings.directories, options=daemon_settings.options())


def _settle(replay: Replay, observer: Observer) -> int:
    """Steps until the plan is followed and as many bytes move as in the step before; how many it took."""
    observer.phase("settling", 1 + SETTLE_STEPS_MAX)
    replay.take_step()
    replay.wait_for_plan()
    moved_before, num_steps = 0, 1
    for number in range(SETTLE_STEPS_MAX):
        observer.progress(num_steps)
        figures = replay.take_step()
        num_steps += 1
        moved = figures.read_bytes + figures.write_bytes
        if number + 1 >= SETTLE_STEPS_MIN and abs(moved - moved_before) <= SETTLED_CHANGE * moved:
            break
        moved_before = moved
    return num_steps


def _result(
    settings: StepSettings,
    rank: StepTrace,
    trace: StepTrace,
    scale: float,
    chosen: Chosen,
    num_warm_up_steps: int,
    figures: Sequence[StepFigures],
    alone_s: float,
) -> StepResult:
    middle = _typical(figures, scale)
    parts = StepParts(
        compute_s=max(0.0, middle.step_s - middle.update_s - middle.stall_s),
        between_s=middle.between_s,
        update_s=middle.update_s,
        compute_stall_s=max(0.0, middle.stall_s - middle.update_stall_s),
        update_stall_s=middle.update_stall_s,
    )
    day_bytes = middle.write_bytes / middle.step_s * DAY_S
    wears = _wears(settings.directories)
    life = drive_life(day_bytes, tbw_bytes=None if settings.tbw is None else settings.tbw * 1e12, drives=wears)
    tokens = rank.tokens_per_step
    return StepResult(
        trace=settings.trace,
        model=rank.model,
        num_params=rank.num_params,
        tokens_per_step=tokens,
        num_nodes=rank.num_nodes,
        ranks_per_node=rank.ranks_per_node,
        node_tokens_per_step=None if tokens is None else tokens // rank.num_nodes,
        scale=scale,
        num_steps=len(figures),
        num_warm_up_steps=num_warm_up_steps,
        host_budget_bytes=rank.host_budget_bytes,
        arena_bytes=trace.num_frames * trace.frame_bytes,
        engine=chosen.engine,
        bs=chosen.block_bytes,
        iodepth=chosen.queue_depth,
        step_s=middle.step_s,
        steps_s=[step.step_s / scale for step in figures],
        compute_s=parts.compute_s,
        update_s=parts.update_s,
        stall_s=middle.stall_s,
        update_stall_s=middle.update_stall_s,
        stall_share=middle.stall_s / middle.step_s,
        read_bytes=middle.read_bytes,
        write_bytes=middle.write_bytes,
        bytes_per_day_written=day_bytes,
        drive_life_days=life.days,
        drive_life_note=life.note,
        cpu_offload_step_s=alone_s / scale,
        hidden_from_compute_s=hidden_from(parts),
        break_even_note=break_even_note(parts, tokens),
        warnings=_warnings(settings, rank, trace, scale, chosen),
    )


def _typical(figures: Sequence[StepFigures], scale: float) -> StepFigures:
    """Seconds are those of one step, the median (of two in the middle the shorter), so that its parts add up; bytes
    are shared out evenly: whichever step's writes the daemon put off count as the next one's, so that a single step's
    may be more than it made dirty."""
    median = sorted(figures, key=lambda step: step.step_s)[(len(figures) - 1) // 2]
    return StepFigures(
        step_s=median.step_s / scale,
        between_s=median.between_s / scale,
        update_s=median.update_s / scale,
        stall_s=median.stall_s / scale,
        update_stall_s=median.update_stall_s / scale,
        read_bytes=round(statistics.fmean(step.read_bytes for step in figures) / scale),
        write_bytes=round(statistics.fmean(step.write_bytes for step in figures) / scale),
    )


def _wears(directories: Sequence[Path]) -> list[DriveWear]:
    """The wear of every drive below the directories, which share evenly what is written, as far as it tells."""
    wears: dict[str, DriveWear] = {}
    for facts in describe_machine(directories).directories:
        for disk, share in facts.device.write_shares() if facts.device is not None else ():
            before = wears[disk.name].write_share if disk.name in wears else 0.0
            write_share = None if share is None or before is None else before + share / len(directories)
            health = disk.health
            wears[disk.name] = (
                DriveWear(write_share=write_share)
                if health is None
                else DriveWear(health.percent_used, health.written_bytes, write_share)
            )
    return list(wears.values())


def _warnings(settings: StepSettings, rank: StepTrace, trace: StepTrace, scale: float, chosen: Chosen) -> list[str]:
    found = [note for path in settings.directories for note in loop_warnings(path)]
    if rank.num_nodes * rank.ranks_per_node > 1:
        found.append("the ranks' communication is left out: add what of it your network does not hide behind compute")
    if rank.ranks_per_node > 1 and rank.frame_bytes < chosen.block_bytes:
        found.append(
            f"each rank's I/Os are of {block_text(rank.frame_bytes)} at most, but the replay joins those of "
            f"{rank.ranks_per_node} ranks: expect a longer step"
        )
    if settings.host_budget_bytes is not None and settings.host_budget_bytes > (there_bytes := available_bytes()):
        found.append(
            f"--host-budget-bytes of {settings.host_budget_bytes / 1e9:.1f} GB is more than this machine has: "
            f"{there_bytes / 1e9:.1f} GB are available, and training here needs a budget below that"
        )
    if scale < 1 and not is_fine(trace):
        found.append(
            f"at a scale of {scale:.3g} the arena holds only a few of the largest leases, which shortens prefetching: "
            "raise --size for a finer prediction"
        )
    if rank.rates is None and settings.compute_tflops is None:
        found.append("this CPU's rate was taken for the compute: give what will train the model with --compute-tflops")
    return found


def advise_step(result: StepResult) -> str:
    """One plain sentence."""
    slower = result.step_s / result.cpu_offload_step_s
    aside = ", communication left out" if result.num_nodes * result.ranks_per_node > 1 else ""
    return (
        f"Expect {seconds_text(result.step_s)} a step{aside}, {slower:.2f} times as long as with all state in host "
        f"memory; {result.break_even_note}."
    )
