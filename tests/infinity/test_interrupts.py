"""Ctrl-C anywhere in the engine's own code, and a script that catches it, calls ``zero_grad()`` and goes on."""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Callable
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import EngineStateError, WeightsError

WIDTH: Final = 24
NUM_STEPS: Final = 3
AT_STEP: Final = 1
NUM_POINTS: Final = 12
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0},
}


@cache
def _handlers(code: CodeType) -> tuple[tuple[int, int, int], ...]:
    """Of parts of the code, which end before the second number, where an error within them goes on."""
    return tuple((entry.start, entry.end, entry.target) for entry in dis._parse_exception_table(code))  # type: ignore[attr-defined]


def _handler_of(frame: FrameType) -> int | None:
    """Where an error would go on in the frame's own code; None: it would leave."""
    at = frame.f_lasti
    return next((target for start, end, target in _handlers(frame.f_code) if start <= at < end), None)


class Interrupting:
    """Raises KeyboardInterrupt at the n-th line of infinity's code that runs inside ``run``; None: it only counts.
    Of ``functions`` alone where they are given, by their qualified names."""

    def __init__(self, at: int | None, *, functions: tuple[str, ...] = ()) -> None:
        self.at, self.num_lines, self.functions = at, 0, functions

    def run(self, work: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return work()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        del event
        code = frame.f_code
        is_met = code.co_qualname in self.functions if self.functions else "/infinity/" in code.co_filename
        return partial(self._line, _handler_of(frame)) if is_met else None

    def _line(self, before: int | None, frame: FrameType, event: str, _arg: Any) -> Any:
        """Behind the last line of ``try`` or ``with`` nothing is raised before what comes next has called something:
        ``finally`` or ``__exit__`` may be that, and signals are heard of behind calls alone."""
        handler = _handler_of(frame)
        is_behind = before is not None and handler != before
        if event == "line" and not is_behind:
            self.num_lines += 1
            if self.num_lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return partial(self._line, handler)


def _engine(layout: str) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": LAYOUTS[layout],
    }
    return infinity.initialize(model=model, config=config)[0]


def _trained(layout: str, where: str, interrupting: Interrupting) -> dict[str, Tensor]:
    """The weights after steps of which one is interrupted in ``where``, and repeated."""
    with _engine(layout) as engine:

        def loss_of(step: int) -> Tensor:
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            loss: Tensor = engine(x).square().mean()
            return loss

        def call(here: str, step: int, work: Callable[[], Any]) -> Any:
            return interrupting.run(work) if (here, step) == (where, AT_STEP) else work()

        step = 0
        while step < NUM_STEPS:
            try:
                loss = call("forward", step, lambda: loss_of(step))  # noqa: B023 (called at once)
                call("backward", step, lambda: engine.backward(loss))  # noqa: B023
            except KeyboardInterrupt:
                where = ""
                engine.zero_grad()
                continue
            engine.step()
            step += 1
        return engine.full_state_dict()


@pytest.mark.parametrize(
    ("layout", "where"), [("stage 2", "forward"), ("stage 2", "backward"), ("stage 3", "backward")]
)
def test_a_step_that_was_interrupted_may_be_repeated(layout: str, where: str) -> None:
    """Where it hung in its phase for good, or a gradient of the interrupted backward went into the next."""
    counting = Interrupting(None)
    expected = _trained(layout, where, counting)
    wrong = []
    for at in sorted(random.Random(0).sample(range(1, counting.num_lines + 1), NUM_POINTS)):
        found = _trained(layout, where, Interrupting(at))
        wrong += [at] if any(not torch.equal(found[name], expected[name]) for name in expected) else []
    assert wrong == []


@pytest.mark.parametrize("mode", ["evaluates", "trains"])
def test_a_call_of_the_model_itself_that_was_interrupted_is_over(mode: str) -> None:
    """No hook of a module hears of Ctrl-C: its groups were in use for good, and torch kept the engine's hooks."""

    def trained(interrupting: Interrupting) -> dict[str, Tensor]:
        with _engine("stage 3") as engine:
            for step in range(NUM_STEPS):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
                with torch.set_grad_enabled(mode == "trains"):
                    try:
                        interrupting.run(lambda: engine.module(x)) if step == AT_STEP else engine.module(x)  # noqa: B023
                    except KeyboardInterrupt:
                        engine.module(x)
                engine.backward(engine(x).square().mean())
                engine.step()
            return engine.full_state_dict()

    counting = Interrupting(None)
    expected = trained(counting)
    wrong, num_equal = [], 0
    for at in sorted(random.Random(0).sample(range(1, counting.num_lines + 1), NUM_POINTS)):
        try:
            found = trained(Interrupting(at))
        except (EngineStateError, WeightsError):  # the update before it was due there, and is torn; or they half came
            continue
        finally:
            torch.set_grad_enabled(True)  # torch's own no_grad() leaves it so where its end is interrupted
        num_equal += 1
        wrong += [at] if any(not torch.equal(found[name], expected[name]) for name in expected) else []
    assert wrong == []
    assert num_equal > 0


def test_a_late_update_that_was_interrupted_is_not_done_twice() -> None:
    """Between its end and the note of it; at the other points it is repeated, or known to be torn."""
    functions = ("DueLease._do", "DueStore.note_done", "Update._step")
    counting = Interrupting(None, functions=functions)
    expected = _trained("stage 3", "forward", counting)
    num_equal = num_refused = 0
    for at in range(1, counting.num_lines + 1):
        try:
            found = _trained("stage 3", "forward", Interrupting(at, functions=functions))
        except EngineStateError:
            num_refused += 1
            continue
        num_equal += all(torch.equal(found[name], expected[name]) for name in expected)
    assert num_equal + num_refused == counting.num_lines > 0
    assert num_equal > 0
    assert num_refused > 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_phase_that_is_interrupted_as_it_begins_or_ends_is_over(where: str) -> None:
    """Between its beginning and what watches over its end, the engine was in it for good."""
    functions = ("TrainingLoop._phase_of", "Phases.go")
    counting = Interrupting(None, functions=functions)
    expected = _trained("stage 2", where, counting)
    for at in range(1, counting.num_lines + 1):
        found = _trained("stage 2", where, Interrupting(at, functions=functions))
        assert all(torch.equal(found[name], expected[name]) for name in expected), at
    assert counting.num_lines > 0


def test_an_interrupt_while_an_interrupted_phase_is_ended_does_not_keep_it() -> None:
    functions = ("TrainingLoop._abort", "TrainingLoop._fail_backward")

    def fails(_gradient: Tensor) -> None:
        raise ArithmeticError

    def trained(interrupting: Interrupting) -> dict[str, Tensor]:
        with _engine("stage 2") as engine:
            for step in range(NUM_STEPS):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
                if step == AT_STEP:
                    out = engine(x)
                    out.register_hook(fails)
                    with pytest.raises((ArithmeticError, KeyboardInterrupt)):
                        interrupting.run(lambda: engine.backward(out.square().mean()))  # noqa: B023
                    engine.zero_grad()
                engine.backward(engine(x).square().mean())
                engine.step()
            return engine.full_state_dict()

    counting = Interrupting(None, functions=functions)
    expected = trained(counting)
    for at in range(1, counting.num_lines + 1):
        found = trained(Interrupting(at, functions=functions))
        assert all(torch.equal(found[name], expected[name]) for name in expected), at
    assert counting.num_lines > 0


class Switching(nn.Linear):
    """The interrupt comes before graphs are switched on again."""

    def forward(self, inputs: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt


def test_an_interrupt_while_graphs_are_switched_off_does_not_keep_them_off() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": LAYOUTS["stage 3"],
    }
    with infinity.initialize(model=Switching(WIDTH, WIDTH), config=config)[0] as engine:
        try:
            with pytest.raises(KeyboardInterrupt):
                engine(torch.ones(1, WIDTH))
            assert torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)
