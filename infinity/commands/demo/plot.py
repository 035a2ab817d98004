"""The demo's picture: the loss curve, what moved between memory and NVMe, and the memory that it took."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from infinity.commands.demo.footprint import Sample
from infinity.commands.demo.summary import Summary
from infinity.commands.demo.training import StepRecord

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

SMOOTHED_SAMPLES = 4


def save_plot(path: Path, records: Sequence[StepRecord], timeline: Sequence[Sample], summary: Summary) -> None:
    figure, (loss, traffic, memory) = pyplot.subplots(3, 1, figsize=(9, 10), layout="constrained")
    loss.plot([record.index + 1 for record in records], [record.loss for record in records], color="tab:blue")
    loss.axhline(summary.unigram_entropy, color="tab:red", linestyle="--", label="unigram entropy of the text")
    loss.set(xlabel="step", ylabel="loss, nats a byte", title=f"{summary.num_parameters:,} parameters from NVMe")
    loss.legend()

    spans = [(a, b) for a, b in itertools.pairwise(timeline[::SMOOTHED_SAMPLES]) if b.seconds > a.seconds]
    seconds = [b.seconds for _, b in spans]
    for name, colour in (("read", "tab:green"), ("written", "tab:orange")):
        rates = [(getattr(b.device, name) - getattr(a.device, name)) / (b.seconds - a.seconds) / 1e9 for a, b in spans]
        traffic.plot(seconds, rates, label=name, color=colour, linewidth=0.9)
    traffic.set(xlabel="seconds", ylabel="NVMe, GB/s", ylim=(0, None))
    traffic.legend()

    memory.plot([s.seconds for s in timeline], [s.pss / 1e6 for s in timeline], label="all processes (PSS)")
    memory.axhline(summary.state_bytes / 1e6, color="tab:red", linestyle="--", label="model state")
    memory.axhline(summary.host_budget_bytes / 1e6, color="tab:gray", linestyle=":", label="host budget")
    memory.set(xlabel="seconds", ylabel="memory, MB", ylim=(0, None))
    memory.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
