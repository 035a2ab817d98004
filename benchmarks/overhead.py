"""What the engine costs in CPU time where nothing is large: many small modules and parameters, beside plain torch.

    python -m benchmarks.overhead [--json] [--swap-dir DIR]

Each model takes steps (forward, backward, fused AdamW, batch of 8) in one process and one thread, alternating between
plain torch, the engine in memory and the engine on NVMe, with default thresholds. The CPU time of this process counts,
so that a busy machine changes little; the daemon's own is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

import infinity
from benchmarks.place import add_directory
from io_daemon.command.scratch import scratch_directory

WIDTH: Final = 64
TURNS: Final = 7
WARM_UP: Final = 3
LIMITS: Final = {"memory": 2.0, "nvme": 2.5}


class ManyParameters(nn.Module):
    """10,000 parameters of 64 elements, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(10_000)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "300 Linear(64)": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(300))),
    "10,000 parameters of 64": ManyParameters,
    "2,000 LayerNorm(64)": lambda: nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(2000))),
}


def plain_step(build: Callable[[], nn.Module]) -> Callable[[torch.Tensor], None]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(build: Callable[[], nn.Module], swap_dir: str | None) -> tuple[Callable[[torch.Tensor], None], Any]:
    offload = {"device": "nvme", "nvme_path": swap_dir} if swap_dir else {"device": "none"}
    engine, *_ = infinity.initialize(
        model=build(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
            "io_daemon": {"host_budget_bytes": 1 << 28},
        },
    )

    def step(x: torch.Tensor) -> None:
        engine.backward(engine(x.to(engine.device)).square().mean())
        engine.step()

    return step, engine


def measure(build: Callable[[], nn.Module], swap_dir: str) -> dict[str, Any]:
    """Median CPU seconds of a step of each, and the ratios to plain torch, turn by turn."""
    x = torch.randn(8, WIDTH)
    steps = {"plain": plain_step(build)}
    engines = []
    for name, where in (("memory", None), ("nvme", swap_dir)):
        steps[name], engine = engine_step(build, where)
        engines.append(engine)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + TURNS):
        for name, step in steps.items():
            start = time.process_time()
            step(x)
            if turn >= WARM_UP:
                seconds[name].append(time.process_time() - start)
    for engine in engines:
        engine.destroy()
    ratios = {
        name: statistics.median(ours / plain for ours, plain in zip(seconds[name], seconds["plain"], strict=True))
        for name in LIMITS
    }
    return {"seconds": {name: statistics.median(values) for name, values in seconds.items()}, "ratio": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_directory(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with scratch_directory("infinity-bench-", arguments.swap_dir) as swap_dir:
        for name, build in MODELS.items():
            found[name] = measure(build, str(swap_dir))
            if not arguments.json:
                shown = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in found[name]["ratio"].items())
                print(f"{name}: plain {found[name]['seconds']['plain']:.4f} s; {shown}", flush=True)
    if arguments.json:
        print(json.dumps(found, indent=2))
    over = [name for name, entry in found.items() if any(entry["ratio"][kind] > LIMITS[kind] for kind in LIMITS)]
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
