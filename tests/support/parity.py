"""Judge cells of the parity matrix: run the engine, the in-memory oracle and the plain loop, and count differing bits.

``launch`` starts the ranks as processes of their own, ``python -m tests.support.parity``, one launch for many cells;
each rank prints one verdict a cell. Nothing here relies on ``assert``, so it works under ``python -O``.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed

import infinity
from tests.support.budgets import smallest_budget_bytes
from tests.support.daemon import ServedDaemon
from tests.support.device import CPU, USED, be_deterministic
from tests.support.matrix import Cell
from tests.support.models import ROWS, batches, decay_groups, everything, loss_of, seeded
from tests.support.optimizers import CHOICES
from tests.support.reference import SCALE_POWER, SCALE_WINDOW, Recipe, Run, differing_bits, train_reference

REPOSITORY = Path(__file__).resolve().parents[2]
CLIP_NORM = 0.5
CELL_TIMEOUT_S = 120
DAEMON_OPTIONS = ("--block-size", "65536", "--queue-depth", "8")
"""One daemon serves all cells of a launch: to start one takes longer than to train most cells."""
THRESHOLDS: dict[str, dict[str, int]] = {
    "grouped": {
        "stage3_prefetch_bucket_size": 70_000,
        "stage3_param_persistence_threshold": 300,
        "stage3_max_live_parameters": 150_000,
        "stage3_max_reuse_distance": 100_000,
    },
    "each": {
        "stage3_prefetch_bucket_size": 4096,
        "stage3_param_persistence_threshold": 300,  # what one rank calls alone must stay
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
    "default": {},
}
STAGE_OF_ORACLE = {"every": 3, "once": 0, "no_sync": 0}
"""By how gradients add up: a stage that has nothing else in common with most of the cells that are held against it."""


@dataclass(kw_only=True)
class Verdict:
    """One cell as one rank saw it, or as all ranks together did (``merged``)."""

    cell: Cell
    num_steps: int = 0
    oracle_loss_bits: int = 0
    oracle_weight_bits: int = 0
    plain_loss_bits: int = 0
    plain_weight_bits: int = 0
    files_left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""
    """Traceback, if the cell raised."""

    @property
    def passed(self) -> bool:
        if self.failure or self.files_left or self.oracle_loss_bits or self.oracle_weight_bits:
            return False
        return not self.plain_loss_bits and not self.plain_weight_bits

    def merged(self, other: Verdict) -> Verdict:
        """Both ranks' findings in one: bits and failures add up."""

        return Verdict(
            cell=self.cell,
            num_steps=min(self.num_steps, other.num_steps),
            oracle_loss_bits=self.oracle_loss_bits + other.oracle_loss_bits,
            oracle_weight_bits=self.oracle_weight_bits + other.oracle_weight_bits,
            plain_loss_bits=self.plain_loss_bits + other.plain_loss_bits,
            plain_weight_bits=self.plain_weight_bits + other.plain_weight_bits,
            files_left=self.files_left + other.files_left,
            seconds=max(self.seconds, other.seconds),
            failure="\n".join(filter(None, (self.failure, other.failure))),
        )


def recipe_of(cell: Cell, num_steps: int) -> Recipe:
    return Recipe(
        num_steps=num_steps,
        accumulation=cell.accumulation,
        clip_norm=CLIP_NORM if cell.clipping else None,
        bf16=cell.dtype == "bf16",
        fp16=cell.dtype == "fp16",
        optimizer=cell.optimizer,
        sums=cell.sums,
        offloaded=USED != CPU and cell.optimizer_tier != "none",
    )


def engine_config(
    recipe: Recipe,
    *,
    param_tier: str,
    optimizer_tier: str,
    swap_dir: str,
    host_budget_bytes: int | None = None,
    thresholds: str = "grouped",
    stage: int = 3,
) -> dict[str, Any]:
    """A configuration under which even a tiny model streams: many param groups, unless ``thresholds`` is "default", and
    the smallest chunks."""

    def offload(tier: str) -> dict[str, Any]:
        return {"device": tier, **({"nvme_path": swap_dir} if tier == "nvme" else {})}

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1 if recipe.sums == "no_sync" else recipe.accumulation,
        "gradient_clipping": recipe.clip_norm or 0.0,
        "bf16": {"enabled": recipe.bf16},
        "fp16": {
            "enabled": recipe.fp16,
            "initial_scale_power": SCALE_POWER,
            "loss_scale_window": SCALE_WINDOW,
            "hysteresis": 1,
        },
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": 16384,
            "reduce_bucket_size": 100_000,
            **THRESHOLDS[thresholds],
            "offload_param": offload(param_tier),
            "offload_optimizer": offload(optimizer_tier),
        },
        "io_daemon": {"block_size": 65536, "queue_depth": 8},
    }
    if (section := CHOICES[recipe.optimizer].section) is not None:
        config["optimizer"] = section
    if host_budget_bytes is not None:
        config["io_daemon"]["host_budget_bytes"] = host_budget_bytes
    return config


def initialized(model: Any, config: dict[str, Any], optimizer: str = "AdamW") -> Any:
    """An engine with the parameter groups of the reference, for the optimizer of the configuration or an object."""
    if (client := CHOICES[optimizer].client) is not None:
        return infinity.initialize(model=model, optimizer=client(decay_groups(model)), config=config)[0]
    return infinity.initialize(model=model, model_parameters=decay_groups(model), config=config)[0]


def least_budget_bytes(build: Any, config: dict[str, Any], optimizer: str = "AdamW") -> int:
    """The smallest host budget that works, which is more than a page."""

    def with_budget(budget_bytes: int) -> Any:
        section = {**config["io_daemon"], "host_budget_bytes": budget_bytes}
        return initialized(seeded(build), {**config, "io_daemon": section}, optimizer)

    least = smallest_budget_bytes(with_budget)
    if least is None:
        raise RuntimeError("a host budget of one page was accepted")
    return least


def train_engine(build: Any, recipe: Recipe, config: dict[str, Any], *, rank: int = 0) -> Run:
    """The engine's counterpart of ``train_reference``, on the same batches."""
    model = seeded(build)
    engine = initialized(model, config, recipe.optimizer)
    run = Run()
    try:
        for number, batch in enumerate(batches(recipe.num_batches, rank=rank), start=1):
            puts_off = recipe.sums == "no_sync" and number % recipe.accumulation
            with engine.no_sync() if puts_off else contextlib.nullcontext():
                loss = loss_of(engine(batch))
                engine.backward(loss)
            if not puts_off:
                engine.step()
            run.losses.append(loss.detach().clone().cpu())
        run.weights = {name: value.cpu() for name, value in engine.full_state_dict().items()}
        run.masters = engine.full_master_state_dict()
    finally:
        engine.destroy()
    return run


_least_budgets: dict[Cell, int] = {}
"""What this process's ranks have asked for already, by what it depends on."""


@lru_cache(maxsize=2)  # cells come in the order of their recipes
def _oracle(recipe: Recipe, rank: int) -> Run:
    stage = STAGE_OF_ORACLE[recipe.sums]
    tier = "cpu" if recipe.offloaded else "none"
    config = engine_config(recipe, param_tier="none", optimizer_tier=tier, swap_dir="", stage=stage)
    del config["io_daemon"]  # the daemon of the launch has its own, see DAEMON_OPTIONS
    return train_engine(everything, recipe, config, rank=rank)


@lru_cache(maxsize=2)
def _plain(recipe: Recipe, rank: int, num_ranks: int) -> Run:
    rank_batches = batches(recipe.num_batches, rank=rank)
    return train_reference(seeded(everything), rank_batches, recipe, ddp=num_ranks > 1)


def _loss_bits(left: Run, right: Run) -> int:
    return sum(differing_bits(a, b) for a, b in zip(left.losses, right.losses, strict=True))


def _weight_bits(left: Run, right: Run) -> int:
    """Over weights, buffers and fp32 masters; a name that only one side has is an error."""
    total = 0
    for ours, theirs in ((left.weights, right.weights), (left.masters, right.masters)):
        if ours.keys() != theirs.keys():
            raise RuntimeError(f"the two runs hold different names: {sorted(ours.keys() ^ theirs.keys())}")
        total += sum(differing_bits(ours[name], theirs[name]) for name in ours)
    return total


def judge(cell: Cell, num_steps: int, *, rank: int, swap_dir: Path) -> Verdict:
    """Train the cell and compare. ``swap_dir`` is shared by the ranks and must be empty afterwards."""
    started = time.perf_counter()
    recipe = recipe_of(cell, num_steps)
    config = engine_config(
        recipe,
        param_tier=cell.param_tier,
        optimizer_tier=cell.optimizer_tier,
        swap_dir=str(swap_dir),
        thresholds=cell.thresholds,
        stage=cell.stage,
    )
    config["io_daemon"] = {"master_weights": cell.masters}  # the daemon of the launch has its own, see DAEMON_OPTIONS
    if not cell.in_memory:
        shape = replace(cell, budget="", clipping=False, update="")
        if shape not in _least_budgets:
            _least_budgets[shape] = least_budget_bytes(everything, config, cell.optimizer)
        config["io_daemon"]["host_budget_bytes"] = _least_budgets[shape] * (1 if cell.budget == "least" else 3)
    config["io_daemon"] |= {"update_in_backward": True} if cell.update == "in_backward" else {"update": cell.update}
    run = train_engine(everything, recipe, config, rank=rank)
    if all(torch.equal(run.masters[name], param) for name, param in seeded(everything).named_parameters()):
        raise RuntimeError("no step was applied: there is nothing to compare")
    oracle, plain = _oracle(recipe, rank), _plain(recipe, rank, cell.num_ranks)
    verdict = Verdict(
        cell=cell,
        num_steps=num_steps,
        oracle_loss_bits=_loss_bits(run, oracle),
        oracle_weight_bits=_weight_bits(run, oracle),
        plain_loss_bits=_loss_bits(run, plain),
        plain_weight_bits=_weight_bits(run, plain),
    )
    if cell.num_ranks > 1:
        distributed.barrier()
    if rank == 0:
        verdict.files_left = sorted(str(path.relative_to(swap_dir)) for path in swap_dir.rglob("*"))
    verdict.seconds = time.perf_counter() - started
    return verdict


def in_order(cells: Sequence[Cell], num_steps: int) -> list[Cell]:
    """Cells of one recipe one after the other: they are held against the same two runs."""
    return sorted(cells, key=lambda cell: (repr(recipe_of(cell, num_steps)), cell))


def launch(
    cells: Sequence[Cell], *, num_steps: int, num_ranks: int, directory: Path, python_flags: Sequence[str] = ()
) -> Iterator[Verdict]:
    """Judge cells of one world size in processes of their own, under INFINITY_DEBUG=poison; verdicts as they come.

    One launch serves all cells; after a failed one the others get fresh processes, since a rank may be left waiting in
    a collective that the failed one will never enter.
    """
    remaining = in_order(cells, num_steps)
    while remaining:
        with _Ranks(remaining, num_steps, num_ranks, directory, python_flags) as ranks:
            while remaining:
                verdict = ranks.verdict(remaining.pop(0))
                yield verdict
                if verdict.failure:
                    break


class _Ranks:
    """The processes of one launch."""

    def __init__(
        self, cells: Sequence[Cell], num_steps: int, num_ranks: int, directory: Path, python_flags: Sequence[str]
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix=f"ranks{num_ranks}-", dir=directory))
        orders, swap_dir = self._directory / "cells.json", self._directory / "swap"
        orders.write_text(json.dumps([asdict(cell) for cell in cells]))
        swap_dir.mkdir()
        self._command = [sys.executable, *python_flags, "-m", "tests.support.parity", "--orders", str(orders)]
        self._command += ["--num-steps", str(num_steps), "--swap-dir", str(swap_dir)]
        self._command += ["--store", str(self._directory / "store")]
        self._num_ranks = num_ranks
        self._processes: list[subprocess.Popen[str]] = []
        self._stack = contextlib.ExitStack()
        self._swap_dir = swap_dir

    def __enter__(self) -> Self:
        daemon = self._stack.enter_context(contextlib.closing(ServedDaemon([self._swap_dir], *DAEMON_OPTIONS)))
        self._socket = daemon.socket
        for rank in range(self._num_ranks):
            log = self._stack.enter_context(self._log(rank).open("w"))
            process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env={**os.environ, **self._environment(rank)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            self._processes.append(self._stack.enter_context(process))
            self._stack.callback(process.kill)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and all(process.poll() is None for process in self._processes):
            for process in self._processes:
                process.wait(timeout=CELL_TIMEOUT_S)
        self._stack.close()

    def verdict(self, cell: Cell) -> Verdict:
        """All ranks' findings about the cell, which must be the next one."""
        verdict = Verdict(cell=cell)
        for rank, process in enumerate(self._processes):
            line = process.stdout.readline() if process.stdout else ""
            if line:
                found = Verdict(**{**json.loads(line), "cell": cell})
            else:
                found = Verdict(cell=cell, failure=f"rank {rank} ended:\n{self._log(rank).read_text()[-4000:]}")
            verdict = found if rank == 0 else verdict.merged(found)
        return verdict

    def _environment(self, rank: int) -> dict[str, str]:
        size = str(self._num_ranks)
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return {"INFINITY_DEBUG": "poison", "INFINITY_IO_SOCKET": self._socket, **places}

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.log"


def main() -> None:
    """One rank of ``launch``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--swap-dir", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    arguments = parser.parse_args()
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    be_deterministic()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo" if USED == CPU else None,
        init_method=f"file://{arguments.store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=CELL_TIMEOUT_S),
    )
    with os.fdopen(answers_fd, "w", buffering=1) as answers:
        for values in json.loads(arguments.orders.read_text()):
            cell = Cell(**values)
            faulthandler.dump_traceback_later(CELL_TIMEOUT_S, exit=True)  # a hang becomes an end with a reason
            try:
                verdict = judge(cell, arguments.num_steps, rank=rank, swap_dir=arguments.swap_dir)
            except Exception:  # noqa: BLE001 - whatever a cell raises is its verdict
                verdict = Verdict(cell=cell, failure=traceback.format_exc())
            print(json.dumps(asdict(verdict)), file=answers)
            if verdict.failure:
                raise SystemExit(1)  # without clean-up, which would wait for the other rank
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
