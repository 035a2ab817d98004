"""The search finds a setting as good as the grid's best, in a fraction of its measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from io_daemon.bench.steps.step_race import TURNS_MAX, order_of_turn
from io_daemon.bench.sweep_plan import (
    BLOCK_SIZES,
    DEPTHS,
    FINAL_ROUNDS,
    FINALISTS_MAX,
    GRID_ROUNDS,
    Cell,
    SweepPlan,
    is_beaten,
)

SHARPNESS = 4
"""Of the knee where one limit takes over from another."""
ENGINES = ("io_uring", "libaio", "posix")
DEFAULT = Cell("io_uring", 512 << 10, 32)


class Drive:
    """A drive in a formula: a rate limit, a latency per I/O, a cost per I/O, and engines that differ; with noise."""

    def __init__(self, *, peak: float, latency_s: float, io_cost_s: float, noise: float, seed: int = 0) -> None:
        self.peak, self.latency_s, self.io_cost_s, self.noise = peak, latency_s, io_cost_s, noise
        self.random = np.random.default_rng(seed)
        self.factors = {"io_uring": 1.0, "libaio": 0.98, "posix": 0.8}

    def true_rate(self, cell: Cell) -> float:
        by_depth = cell.bs * cell.iodepth / (self.latency_s + cell.bs / self.peak)
        by_cost = cell.bs / self.io_cost_s
        slowest = float(np.linalg.norm([1 / self.peak, 1 / by_depth, 1 / by_cost], SHARPNESS))
        return self.factors[cell.engine] / slowest

    def measure(self, cell: Cell) -> float:
        return self.true_rate(cell) * (1 + self.noise * float(self.random.standard_normal()))


def search(drive: Drive) -> tuple[SweepPlan, int]:
    plan = SweepPlan(ENGINES, BLOCK_SIZES, DEPTHS)
    for num_rounds in itertools.count():
        cell = plan.next_cell()
        if cell is None:
            return plan, num_rounds
        plan.record(cell, drive.measure(cell))
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(
    peak=st.floats(1e8, 1e11),
    latency_s=st.floats(1e-5, 5e-3),
    io_cost_s=st.floats(1e-7, 1e-4),
    seed=st.integers(0, 1000),
)
def test_the_chosen_one_is_near_the_best_of_the_grid(
    peak: float, latency_s: float, io_cost_s: float, seed: int
) -> None:
    drive = Drive(peak=peak, latency_s=latency_s, io_cost_s=io_cost_s, noise=0.01, seed=seed)
    plan, num_rounds = search(drive)
    best = max(drive.true_rate(Cell(*cell)) for cell in itertools.product(ENGINES, BLOCK_SIZES, DEPTHS))
    assert drive.true_rate(plan.chosen({})) >= 0.88 * best
    assert num_rounds * 4 < plan.num_grid_cells * GRID_ROUNDS


def test_on_a_plateau_the_default_wins() -> None:
    plan, _ = search(Drive(peak=1e9, latency_s=1e-5, io_cost_s=1e-9, noise=0.01))
    assert plan.chosen({}) == DEFAULT


class Training:
    """Steps in a formula: seconds of some settings, a drift that all of a turn meet alike, and noise of their own."""

    def __init__(self, seconds: dict[Cell, float], *, noise: float, seed: int) -> None:
        self.seconds, self.noise = seconds, noise
        self.random = np.random.default_rng(seed)

    def race(self, cells: Sequence[Cell]) -> dict[Cell, list[float]]:
        """As ``step_race`` takes turns."""
        steps_s: dict[Cell, list[float]] = {cell: [] for cell in cells}
        for turn in range(TURNS_MAX):
            pace = float(self.random.choice([1.0, 1.6, 4.0], p=[0.6, 0.3, 0.1]))  # the disk's regimes
            for index in order_of_turn(turn, len(cells)):
                own = 1 + self.noise * float(self.random.standard_normal())
                steps_s[cells[index]].append(self.seconds[cells[index]] * pace * own)
        return steps_s


@pytest.mark.parametrize("seed", range(20))
def test_a_step_tells_apart_what_bandwidth_does_not(seed: int) -> None:
    plan, _ = search(Drive(peak=1e9, latency_s=1e-5, io_cost_s=1e-9, noise=0.01, seed=seed))
    finalists = plan.finalists()
    assert 2 <= len(finalists) <= FINALISTS_MAX
    shortest = finalists[seed % len(finalists)]
    training = Training({cell: 1.0 if cell == shortest else 1.2 for cell in finalists}, noise=0.03, seed=seed)
    assert plan.chosen(training.race(finalists)) == shortest


@pytest.mark.parametrize("seed", range(20))
def test_where_steps_overlap_the_default_stays(seed: int) -> None:
    plan, _ = search(Drive(peak=1e9, latency_s=1e-5, io_cost_s=1e-9, noise=0.01, seed=seed))
    finalists = plan.finalists()
    training = Training({cell: 1.0 if cell == DEFAULT else 0.99 for cell in finalists}, noise=0.01, seed=seed)
    assert plan.chosen(training.race(finalists)) == DEFAULT


def test_a_fast_step_does_not_help_a_setting_that_moves_less() -> None:
    """Which moves less is told from noise: it never gets to take a step."""
    drive = Drive(peak=1e9, latency_s=1e-5, io_cost_s=1e-9, noise=0.001)
    drive.factors["io_uring"] = 0.93
    plan, _ = search(drive)
    assert all(drive.true_rate(cell) > 0.97e9 for cell in plan.finalists())


@pytest.mark.parametrize(
    ("own", "other", "beaten"),
    [
        ([1.2] * 7, [1.0] * 7, True),
        ([1.2] * 6 + [0.9], [1.0] * 7, True),  # one turn may fall otherwise
        ([1.2] * 5 + [0.9] * 2, [1.0] * 7, False),
        ([1.02] * 7, [1.0] * 7, False),  # too little to leave the default for
        ([1.2, 2.4, 1.2], [1.0, 2.0, 1.0], True),  # a slow spell meets both
        ([1.2, 1.2, 0.9], [1.0] * 3, False),
        ([1.0] * 7, [1.0] * 7, False),
    ],
)
def test_beaten_is_beaten_turn_by_turn(own: list[float], other: list[float], beaten: bool) -> None:
    assert is_beaten(own, other) == beaten


@given(turns=st.integers(0, 50), num_runners=st.integers(1, 8))
def test_a_turn_is_one_step_of_each(turns: int, num_runners: int) -> None:
    assert sorted(order_of_turn(turns, num_runners)) == list(range(num_runners))


@pytest.mark.parametrize("num_runners", [2, 3, 4])
def test_everybody_comes_first_once(num_runners: int) -> None:
    firsts = [order_of_turn(turn, num_runners)[0] for turn in range(2 * num_runners)]
    assert set(firsts) == set(range(num_runners))


def test_the_same_rounds_lead_to_the_same_choice() -> None:
    first, _ = search(Drive(peak=3e9, latency_s=2e-4, io_cost_s=1e-6, noise=0.05, seed=4))
    second, _ = search(Drive(peak=3e9, latency_s=2e-4, io_cost_s=1e-6, noise=0.05, seed=4))
    assert first.chosen({}) == second.chosen({})
    assert first.cells() == second.cells()


def test_finalists_are_measured_in_turns() -> None:
    plan = SweepPlan(("io_uring",), (1 << 17, 1 << 19), (4, 32))
    asked = []
    while (cell := plan.next_cell()) is not None:
        asked.append(cell)
        plan.record(cell, 1e9)
    assert len(set(asked[:4])) == 4
    finals = asked[4:]
    num_finalists = len(set(finals))
    assert len(finals) == num_finalists * (FINAL_ROUNDS - 1)
    for begin in range(0, len(finals), num_finalists):
        assert len(set(finals[begin : begin + num_finalists])) == num_finalists


@pytest.mark.parametrize("engines", [("posix",), ENGINES])
def test_the_whole_grid_is_there_when_asked_for(engines: tuple[str, ...]) -> None:
    plan = SweepPlan(engines, BLOCK_SIZES, DEPTHS)
    assert len(list(plan.every_cell())) == GRID_ROUNDS * plan.num_grid_cells
    assert len(set(plan.every_cell())) == plan.num_grid_cells
