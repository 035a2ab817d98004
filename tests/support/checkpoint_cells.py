"""Cells of the checkpoint matrix: what one engine has saved, another one goes on with.

Ranks are forks of a process that has imported all. What so many of them save is saved by one start, and so is what
they load.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import infinity
from tests.support.forked import Child, Say, warm_up
from tests.support.resumed import differing, everything_of

WORLD_SIZES: Final = (1, 2, 4)
TIERS: Final = ("none", "cpu", "nvme")
STAGES: Final = (0, 1, 2, 3)
PRECISIONS: Final = ("fp32", "bf16", "fp16")
NUM_STEPS, STEPS_AFTER, ROWS = 6, 10, 8
CELL_TIMEOUT_S: Final = 180
"""A lease that does not come ends after two minutes, and says what it waited for."""
ERRORS_MAX: Final = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Largest relative difference of a loss at another world size, where gradients are summed in another order."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine."""

    num_ranks: int
    tier: str
    stage: int
    precision: str
    budget_bytes: int = 1 << 24

    def config(self, swap_dir: Path) -> dict[str, Any]:
        device = {"device": self.tier, **({"nvme_path": str(swap_dir)} if self.tier == "nvme" else {})}
        return {
            "train_micro_batch_size_per_gpu": ROWS // self.num_ranks,
            "steps_per_print": 0,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}},
            "zero_optimization": {
                "stage": self.stage,
                "sub_group_size": 16384 if self.num_ranks == 2 else 65536,
                "stage3_param_persistence_threshold": 200,
                "offload_optimizer": device,
                **({"offload_param": device} if self.stage == 3 else {}),
            },
            "bf16": {"enabled": self.precision == "bf16"},
            # nothing overflows at this scale: dealt out to two ranks, a batch may skip a step that it does not on one
            "fp16": {"enabled": self.precision == "fp16", "initial_scale_power": 10},
            "io_daemon": {"host_budget_bytes": self.budget_bytes, "block_size": 65536},
        }


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Who saves, and who goes on with it."""

    before: Side
    after: tuple[Side, ...]


@dataclass(kw_only=True)
class Verdict:
    before: Side
    after: Side
    state_bits: list[str]
    """Names of what differs right after loading."""
    losses_equal: bool
    error: float
    """Largest relative difference of a loss in the steps after."""
    seconds: float

    @property
    def passed(self) -> bool:
        if self.state_bits:
            return False
        if self.before.num_ranks == self.after.num_ranks:
            return self.losses_equal
        return self.error <= ERRORS_MAX[self.before.precision]


def full_matrix() -> list[Cell]:
    """Each way to save, gone on with at every world size, elsewhere in all other respects."""
    cells = []
    sides = itertools.product(PRECISIONS, WORLD_SIZES, TIERS, STAGES)
    for number, (precision, num_ranks, tier, stage) in enumerate(sides):
        before = Side(num_ranks=num_ranks, tier=tier, stage=stage, precision=precision)
        after = tuple(
            Side(
                num_ranks=other,
                tier=TIERS[(TIERS.index(tier) + 1 + (number + i) % 2) % 3],
                stage=STAGES[(STAGES.index(stage) + 1 + (number // 2 + i) % 3) % 4],
                precision=precision,
                budget_bytes=(1 << 23) if (number + i) % 2 else (1 << 25),
            )
            for i, other in enumerate(WORLD_SIZES)
        )
        cells.append(Cell(before=before, after=after))
    return cells


SELECTED: Final = ((11, (1,)), (22, (0, 2)), (38, (0, 1)), (52, (1, 2)), (76, (0,)), (87, (1, 2)))
"""Cells of the matrix by number, and who of theirs goes on: every value is there on either side, and no start of four
ranks to save."""


def selection() -> list[Cell]:
    matrix = full_matrix()
    return [replace(matrix[n], after=tuple(matrix[n].after[i] for i in after)) for n, after in SELECTED]


def judge_all(cells: Sequence[Cell], directory: Path) -> Iterator[Verdict]:
    """The verdicts on all cells. Raises AssertionError with what the ranks said if one ended."""
    warm_up()
    for part in ("save", "load"):
        for num_ranks in WORLD_SIZES:
            orders = [order for order in _orders(cells) if order[part]["num_ranks"] == num_ranks]
            orders = orders if part == "load" else list({order["saved"]: order for order in orders}.values())
            if orders:
                yield from _judged(part, orders, num_ranks, directory)


def _judged(part: str, orders: Sequence[Any], num_ranks: int, directory: Path) -> Iterator[Verdict]:
    store = directory / f"store-{part}-{num_ranks}"

    def work(rank: int) -> Child:
        return Child(lambda say: _work(part, orders, rank, num_ranks, store, directory, say))

    ranks = [work(rank) for rank in range(num_ranks)]
    try:
        for _ in orders:
            lines = [rank.read_line(CELL_TIMEOUT_S) for rank in ranks]
            if None in lines:
                raise AssertionError("\n".join(rank.end() for rank in ranks))
            if part == "load":
                found = json.loads(lines[0] or "")
                yield Verdict(**{**found, "before": Side(**found["before"]), "after": Side(**found["after"])})
    except BaseException:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        raise
    for rank in ranks:
        rank.end()
    if left := sorted(path.name for path in (directory / "swap").iterdir()):
        raise AssertionError(f"left behind: {left}")


def _orders(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    for number, cell in enumerate(cells):
        for after in cell.after:
            yield {"saved": f"saved{number}", "save": asdict(cell.before), "load": asdict(after)}


class Model(nn.Module):
    """Nothing in it depends on how a batch is dealt out to ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(203, 203) for _ in range(3)])
        self.frozen = nn.Linear(203, 203).requires_grad_(False)
        self.norm = nn.LayerNorm(203)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: torch.Tensor = self.norm(self.frozen(x))
        return out


class _Rank:
    def __init__(self, directory: Path) -> None:
        self._directory, self._swap = directory, directory / "swap"
        self._rank = dist.get_rank()
        self._swap.mkdir(exist_ok=True)

    def save(self, before: Side, saved: str) -> None:
        """Train, save, and note what the training goes on with."""
        engine = self._engine(before, seed=0)
        self._train(engine, before, range(NUM_STEPS))
        engine.save_checkpoint(self._directory / saved)
        reference = everything(engine), self._train(engine, before, range(NUM_STEPS, NUM_STEPS + STEPS_AFTER))
        engine.destroy()
        if self._rank == 0:
            torch.save(reference, self._directory / f"{saved}.reference")

    def load(self, before: Side, after: Side, saved: str) -> Verdict:
        """Go on with it, and compare."""
        started = time.perf_counter()
        engine = self._engine(after, seed=1)
        engine.load_checkpoint(self._directory / saved)
        state = everything(engine)
        losses = self._train(engine, after, range(NUM_STEPS, NUM_STEPS + STEPS_AFTER))
        engine.destroy()
        there, expected = torch.load(self._directory / f"{saved}.reference")
        errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
        return Verdict(
            before=before,
            after=after,
            state_bits=differing(there, state),
            losses_equal=losses == expected,
            error=max(errors),
            seconds=time.perf_counter() - started,
        )

    def _engine(self, side: Side, *, seed: int) -> Any:
        torch.manual_seed(seed)
        return infinity.initialize(model=Model(), config=side.config(self._swap))[0]

    def _train(self, engine: Any, side: Side, steps: range) -> list[float]:
        """Mean losses over the ranks."""
        dtype, own = next(engine.module.parameters()).dtype, ROWS // side.num_ranks
        losses = []
        for step in steps:
            batch = torch.randn(ROWS, 203, generator=torch.Generator().manual_seed(step))
            loss = (engine(batch[self._rank * own :][:own].to(dtype)).float() - 1).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().double())
        mean = torch.stack(losses)
        dist.all_reduce(mean)
        return [float(value) / side.num_ranks for value in mean]


def everything(engine: Any) -> dict[str, torch.Tensor]:
    return {**everything_of(engine), "steps": torch.tensor(engine.global_steps)}


def _work(part: str, orders: Sequence[Any], rank: int, num_ranks: int, store: Path, directory: Path, say: Say) -> None:
    """One rank: a line for each order."""
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    mine = _Rank(directory)
    for order in orders:
        before, after = Side(**order["save"]), Side(**order["load"])
        if part == "save":
            mine.save(before, order["saved"])
            say("saved")
        else:
            say(json.dumps(asdict(mine.load(before, after, order["saved"]))))
    dist.barrier()
    dist.destroy_process_group()
