"""An update done when its weights are next used: the bits of one done in ``step``, whoever looks first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Engine
from infinity.errors import EngineStateError
from infinity.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.support.reference import differing_bits

NUM_STEPS = 4


class Net(nn.Module):
    """Its spare layer is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        self.spare = nn.Linear(96, 96)

    def forward(self, inputs: torch.Tensor, use_spare: bool) -> torch.Tensor:
        inputs = inputs.to(self.spare.weight.dtype)
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return (self.spare(inputs) if use_spare else inputs).square().mean()


def batch(step: int) -> tuple[torch.Tensor, bool]:
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(step)), step % 2 == 0


@contextmanager
def engine_of(tmp_path: Path, tier: str, update: str, **changes: Any) -> Iterator[Engine]:
    offload = {"device": tier} | ({"nvme_path": str(tmp_path)} if tier == "nvme" else {})
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"update": update, "host_budget_bytes": 1 << 21},
        **changes,
    }
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Net(), config=config)
    with engine:
        yield engine


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    return engine.full_master_state_dict()


def moments(engine: Engine) -> Any:
    return [safe_get_full_optimizer_state(param, "exp_avg") for param in engine.module.parameters()]


def lengthen(engine: Engine) -> None:
    for param in engine.module.parameters():
        value = safe_get_full_fp32_param(param)
        assert value is not None
        safe_set_full_fp32_param(param, value * 1.5)


def evaluate(engine: Engine) -> Any:
    engine.eval()
    with torch.no_grad():
        found = engine(*batch(77))
    engine.train()
    return found


def average(engine: Engine) -> Any:
    """As a moving average of weights reads them, under the modes that people read them in."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        return [param * 1.0 for param in engine.module.parameters()]


def settle_twice(engine: Engine) -> Any:
    return [engine.full_state_dict(), engine.full_state_dict()]


LOOKS: dict[str, Callable[[Engine], Any]] = {
    "nothing": lambda _engine: None,
    "master weights": masters,
    "moments": moments,
    "a write": lengthen,
    "an evaluation": evaluate,
    "an average": average,
    "exports": settle_twice,
    "zero_grad": lambda engine: engine.zero_grad(),
}


def halve_rate(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def told(tmp_path: Path, tier: str, update: str, look: Callable[[Engine], Any], **changes: Any) -> list[Any]:
    """All that can be seen of a run, losses first."""
    seen: list[Any] = []
    with engine_of(tmp_path, tier, update, **changes) as engine:
        for step in range(NUM_STEPS):
            loss = engine(*batch(step))
            engine.backward(loss)
            engine.step()
            halve_rate(engine)  # is for the next step, whenever this one is applied
            seen += [loss.detach(), engine.get_global_grad_norm(), look(engine)]
        seen += [engine.full_state_dict(), engine.full_master_state_dict()]
    return seen


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return differing_bits(first, second) == 0
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
def test_whoever_looks_first_sees_what_an_update_in_step_leaves(
    look: Callable[[Engine], Any], bf16: bool, tmp_path: Path
) -> None:
    changes = {"bf16": {"enabled": bf16}}
    assert same(told(tmp_path, "none", "on_use", look, **changes), told(tmp_path, "none", "in_step", look, **changes))


@pytest.mark.parametrize("look", ["nothing", "an evaluation", "a write"])
def test_from_nvme_as_well(look: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_DEBUG", "poison")
    in_memory = told(tmp_path, "none", "in_step", LOOKS[look])
    assert same(told(tmp_path, "nvme", "on_use", LOOKS[look]), in_memory)


def test_what_is_due_is_done_by_the_use_and_not_by_step(tmp_path: Path) -> None:
    with engine_of(tmp_path, "none", "on_use") as engine:
        engine.backward(engine(*batch(0)))
        engine.step()
        store = engine._runtime.store
        assert all(store.is_due(chunk) for chunk in range(len(engine._runtime.sharded.chunks)))
        engine(*batch(1))  # leaves the spare layer out
        due = [
            group.name
            for group in engine._runtime.sharded.groups
            if any(store.is_due(chunk) for chunk, _ in group.chunks)
        ]
        assert due == ["spare"]


def test_a_read_that_fails_in_a_late_update_can_be_repeated(tmp_path: Path) -> None:
    """The step that asked for it is over, and stays so: what it left is done by the forward that is repeated."""
    look = LOOKS["nothing"]
    expected = told(tmp_path, "none", "in_step", look)
    seen: list[Any] = []
    with engine_of(tmp_path, "none", "on_use") as engine:
        for step in range(NUM_STEPS):
            if step:
                assert "last update is due" in _notes_without_reads(engine, step)
            loss = engine(*batch(step))
            engine.backward(loss)
            engine.step()
            halve_rate(engine)
            seen += [loss.detach(), engine.get_global_grad_norm(), None]
        seen += [engine.full_state_dict(), engine.full_master_state_dict()]
    assert same(seen, expected)


def _notes_without_reads(engine: Engine, step: int) -> str:
    with _no_reads(engine), pytest.raises(OSError, match="injected") as caught:
        engine(*batch(step))
    notes = "".join(caught.value.__notes__)
    del caught  # its frames hold the weights that were gathered, and each other
    gc.collect()
    return notes


@contextmanager
def _no_reads(engine: Engine) -> Iterator[None]:
    store: Any = engine._runtime.store
    acquire = store._inner.acquire

    def refuse(_self: Any = None) -> None:
        raise OSError("injected")

    def failing(chunk: int, **masks: int) -> Any:
        lease = acquire(chunk, **masks)
        lease.wait = refuse
        return lease

    store._inner.acquire = failing
    try:
        yield
    finally:
        store._inner.acquire = acquire


def test_a_late_update_that_breaks_off_in_the_middle_of_a_chunk_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path, "none", "on_use") as engine:
        engine.backward(engine(*batch(0)))
        engine.step()
        assert engine.optimizer is not None
        rule = type(engine.optimizer.rule)

        def fault(*_arguments: Any) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(rule, "run", fault)
        with pytest.raises(RuntimeError, match="injected"):
            engine(*batch(1))
        with pytest.raises(EngineStateError, match="has failed"):
            engine(*batch(1))


def test_what_a_report_calls_the_update_is_the_update(tmp_path: Path) -> None:
    with engine_of(tmp_path, "none", "on_use") as engine:
        for step in range(2):
            engine.backward(engine(*batch(step)))
            engine.step()
        report = engine.io_report()
        assert report.times.update_seconds > 0
        assert report.times.forward_seconds > 0


class Knobbed(torch.optim.Optimizer):
    """What it steps by stands outside its param groups, where nobody sees it change."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.knobs = {"scale": 1.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.knobs["scale"] * param.grad)


def with_a_list(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=0.01)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    return optimizer


def halve_the_knob(optimizer: Any) -> None:
    optimizer.knobs["scale"] *= 0.5


def lower_a_beta(optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"][0] *= 0.5


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Knobbed, halve_the_knob),
        (with_a_list, lower_a_beta),
    ],
    ids=["an attribute of somebody's own", "a list of options"],
)
def test_what_changes_behind_step_is_the_next_steps(make: Any, change: Callable[[Any], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    optimizer = make(plain.parameters())
    for step in range(NUM_STEPS):
        plain(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(optimizer)
    torch.manual_seed(0)
    model = Net()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    config = {"train_batch_size": 4, "zero_optimization": zero}
    passed = make(model.parameters())
    engine, *_ = infinity.initialize(model=model, optimizer=passed, config=config)
    with engine:
        for step in range(NUM_STEPS):
            engine.backward(engine(*batch(step)))
            engine.step()
            change(passed)
        assert same(engine.full_state_dict(), dict(plain.state_dict()))
