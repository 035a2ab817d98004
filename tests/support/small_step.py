"""A step trace of a few chunks, as ``infinity trace`` would write it. Pure."""

from __future__ import annotations

from io_daemon.policy.step_trace import CpuRates, Events, Leases, StepTrace
from tests.support.step_traces import GRAD, STATE, WEIGHT, chunk_specs, training_step

FRAME_BYTES = 64 << 10
RATES = CpuRates(num_threads=1, flops=5e10, copied_bytes=1e10, updated_bytes=2e10)


def small_step(
    num_chunks: int = 6,
    *,
    num_frames: int = 24,
    ahead: int = 1,
    gap: float = 1e-5,
    measured: bool = True,
    pinned_mask: int = 0,
    staging_bytes: int = 0,
) -> StepTrace:
    """Each lease is waited for ``ahead`` leases after it was asked for; ``gap`` before every event."""
    accesses = training_step(range(num_chunks))
    ops, lease = [], []
    for number in range(len(accesses) + ahead):
        if number < len(accesses):
            ops.append("a")
            lease.append(number)
        if number >= ahead:
            ops += ["w", "r"]
            lease += [number - ahead] * 2
    return StepTrace(
        model="small",
        num_params=num_chunks * FRAME_BYTES // 2,
        tokens_per_step=64,
        gap_unit="seconds" if measured else "flops",
        tail=gap,
        rates=RATES if measured else None,
        machine="a test",
        config={},
        host_budget_bytes=staging_bytes + num_frames * FRAME_BYTES + 4096,
        staging_bytes=staging_bytes,
        frame_bytes=FRAME_BYTES,
        num_frames=num_frames,
        chunks=[(list(spec.object_bytes), pinned_mask) for spec in chunk_specs(num_chunks, FRAME_BYTES)],
        accesses=[(a.chunk, a.read_mask, a.write_mask, a.dead_mask) for a in accesses],
        leases=Leases(
            chunk=[a.chunk for a in accesses],
            read=[a.read_mask for a in accesses],
            write=[a.write_mask for a in accesses],
            dirty=[a.write_mask for a in accesses],
            dead=[a.dead_mask for a in accesses],
        ),
        events=Events(ops="".join(ops), lease=lease, gap=[gap] * len(ops)),
    )


__all__ = ["FRAME_BYTES", "GRAD", "RATES", "STATE", "WEIGHT", "small_step"]
