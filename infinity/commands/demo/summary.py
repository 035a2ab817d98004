"""What the demo's run came to: the figures, their table, and whether it learned."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from infinity.commands.demo.footprint import Footprint
from infinity.commands.demo.training import Settings, StepRecord, host_budget_bytes, state_bytes

AVERAGED_STEPS = 10
LOSS_RATIO_MAX = 0.7


@dataclass(frozen=True, kw_only=True)
class Summary:
    num_parameters: int
    dtype: str
    num_steps: int
    tokens_per_step: int
    first_loss: float
    """Mean of the first ten steps, nats a byte; ``last_loss`` of the last ten."""
    last_loss: float
    unigram_entropy: float
    state_bytes: int
    host_budget_bytes: int
    read_bytes_per_step: float
    written_bytes_per_step: float
    hit_rate: float
    stall_share: float
    peak_pss_bytes: int
    step_s: float
    """Median."""
    training_s: float

    @property
    def learned(self) -> bool:
        return self.last_loss < self.unigram_entropy and self.last_loss <= LOSS_RATIO_MAX * self.first_loss


def summarise(
    settings: Settings,
    num_parameters: int,
    records: Sequence[StepRecord],
    *,
    unigram_entropy: float,
    footprint: Footprint,
) -> Summary:
    """Traffic is averaged over the steps after the first, which also moves the model to NVMe."""
    steady = records[1:] or records
    return Summary(
        num_parameters=num_parameters,
        dtype=str(settings.dtype).removeprefix("torch."),
        num_steps=len(records),
        tokens_per_step=settings.tokens_per_step,
        first_loss=statistics.fmean(record.loss for record in records[:AVERAGED_STEPS]),
        last_loss=statistics.fmean(record.loss for record in records[-AVERAGED_STEPS:]),
        unigram_entropy=unigram_entropy,
        state_bytes=state_bytes(num_parameters, settings.dtype),
        host_budget_bytes=host_budget_bytes(num_parameters, settings.dtype),
        read_bytes_per_step=statistics.fmean(record.read_bytes for record in steady),
        written_bytes_per_step=statistics.fmean(record.written_bytes for record in steady),
        hit_rate=statistics.fmean(record.hit_rate for record in steady),
        stall_share=sum(record.stall_s for record in steady) / sum(record.seconds for record in steady),
        peak_pss_bytes=footprint.peak_pss,
        step_s=statistics.median(record.seconds for record in steady),
        training_s=sum(record.seconds for record in records),
    )


def as_table(summary: Summary) -> Table:
    ratio = summary.last_loss / summary.first_loss
    table = Table(title=f"{summary.num_parameters:,} parameters in {summary.dtype}, trained from NVMe")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    rows = (
        ("loss, mean of first 10 steps", f"{summary.first_loss:.3f} nats", ""),
        ("loss, mean of last 10 steps", f"{summary.last_loss:.3f} nats", f"{ratio:.2f} x the first"),
        ("unigram entropy of the text", f"{summary.unigram_entropy:.3f} nats", "the best loss without context"),
        ("model state", f"{summary.state_bytes / 1e6:,.0f} MB", "weights, master weights, moments"),
        (
            "host budget",
            f"{summary.host_budget_bytes / 1e6:,.0f} MB",
            f"{summary.host_budget_bytes / summary.state_bytes:.0%} of the state",
        ),
        ("peak memory, all processes", f"{summary.peak_pss_bytes / 1e6:,.0f} MB", "sum of PSS, interpreter included"),
        ("read from NVMe", f"{summary.read_bytes_per_step / 1e6:,.0f} MB/step", ""),
        ("written to NVMe", f"{summary.written_bytes_per_step / 1e6:,.0f} MB/step", ""),
        ("host tier hit rate", f"{summary.hit_rate:.0%}", ""),
        ("time stalled on I/O", f"{summary.stall_share:.0%}", ""),
        ("step", f"{summary.step_s:.2f} s", f"{summary.tokens_per_step / summary.step_s:.0f} tokens/s"),
        ("training", f"{summary.training_s:.0f} s", f"{summary.num_steps} steps of {summary.tokens_per_step} tokens"),
    )
    for row in rows:
        table.add_row(*row)
    return table
