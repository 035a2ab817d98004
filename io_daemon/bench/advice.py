"""One plain sentence at the end: what the figures mean for a training engineer. Pure."""

from __future__ import annotations

from io_daemon.bench.report.sheet import METRIC_NAMES, setting_of
from io_daemon.bench.result import CompareResult, IoResult, SweepResult
from io_daemon.bench.settings import TRAINING_READ_PERCENT, IoSettings
from io_daemon.command.units import block_text

READ_BYTES_PER_PARAM, WRITE_BYTES_PER_PARAM = 16, 14
"""Exact fp32 Adam with 16-bit weights, nothing kept in memory: 2 + 2 + 12 read, 2 + 12 written a step."""
EXAMPLE_PARAMS = 7_000_000_000
WORTH_SAYING = 0.05


def advise_io(settings: IoSettings, result: IoResult) -> str:
    if result.verification is not None and result.verification.num_bad_blocks:
        return (
            f"Do not train on this: {result.verification.num_bad_blocks} of {result.verification.num_blocks} blocks "
            "read back were not what was written."
        )
    rate = sum(way.bw_bytes for way in (result.read, result.write) if way is not None)
    since = ""
    if result.steady.reached and result.steady.burst_bw_bytes is not None and result.steady.bw_bytes is not None:
        rate = result.steady.bw_bytes
        since = f" once steady, after {result.steady.begin_s or 0.0:.0f} s"
    moved = f"{rate / 1e9:.2f} GB/s{since}"
    if settings.mixed and settings.rwmixread == TRAINING_READ_PERCENT:
        return (
            f"This drive moves {moved} of training's mix, so a step of a 7B-parameter model with nothing kept in "
            f"memory spends {mixed_step_s(rate):.0f} s on I/O: hide it behind as much compute (larger batches, "
            "more accumulation), or give the daemon more host memory."
        )
    name = "Mixed I/O" if settings.reads and settings.writes else "Reads" if settings.reads else "Writes"
    return (
        f"{name} with --bs {block_text(settings.bs)} --iodepth {settings.iodepth} reach {moved}; "
        f"training mixes {TRAINING_READ_PERCENT} % of reads with writes, so measure with --rw rw before you size a "
        "machine."
    )


def mixed_step_s(bw_bytes: float, num_params: int = EXAMPLE_PARAMS) -> float:
    """Seconds of I/O of one streamed step at so many bytes a second, reads and writes together."""
    if not bw_bytes:
        return float("inf")
    return num_params * (READ_BYTES_PER_PARAM + WRITE_BYTES_PER_PARAM) / bw_bytes


def advise_sweep(result: SweepResult) -> str:
    chosen = result.chosen
    setting = f"{chosen.engine} with block_size {block_text(chosen.bs)} and queue_depth {chosen.iodepth}"
    rate = chosen.score_bw_bytes
    if result.confirmation is not None:
        if result.confirmation.verification is not None and result.confirmation.verification.num_bad_blocks:
            return f"Do not train on this: {result.confirmation.verification.num_bad_blocks} blocks came back wrong."
        confirmed = [way.bw_bytes for way in (result.confirmation.read, result.confirmation.write) if way is not None]
        rate = result.confirmation.steady.bw_bytes or sum(confirmed)
    kept = "which a daemon here uses by itself" if result.remembered_in else "which belongs into the job's config"
    return (
        f"Use {setting}, {kept}: it moves {rate / 1e9:.2f} GB/s of training's mix, so a step of a 7B-parameter model "
        f"with nothing kept in memory spends {mixed_step_s(rate):.0f} s on I/O{_replay_clause(result)}."
    )


def _replay_clause(result: SweepResult) -> str:
    """What choosing by bandwidth would have cost, if anything."""
    if result.replay is None:
        return ""
    steps_s = {setting_of(finalist): finalist.step_s for finalist in result.replay.finalists}
    fastest = next(cell for cell in result.cells if setting_of(cell) in steps_s)
    longer = steps_s[setting_of(fastest)] / steps_s[setting_of(result.chosen)] - 1
    if longer < WORTH_SAYING:
        return ""
    return (
        f"; {fastest.engine} {block_text(fastest.bs)} at depth {fastest.iodepth} was at least as fast there, but a "
        f"replayed training step took {longer:.0%} longer with it"
    )


def advise_compare(result: CompareResult) -> str:
    outside = [line for line in result.lines if not line.inside]
    if not outside:
        return f"All {len(result.lines)} figures lie within what two equal runs of fio differ by: trust either."
    worst = max(outside, key=lambda line: abs(line.ratio - 1))
    return (
        f"{len(outside)} of {len(result.lines)} figures differ from fio's by more than fio's own runs do; the farthest "
        f"is {METRIC_NAMES[worst.metric]} of {worst.rw} with {worst.engine}, {block_text(worst.bs)}, depth "
        f"{worst.iodepth}: {worst.ratio:.2f} x."
    )
