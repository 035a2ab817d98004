"""fp16's loss scale: its sequence, the skipped steps and the norms are those of a plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import infinity
from infinity.config import parse_config
from infinity.errors import LossScaleError
from infinity.tiers.due import DUE_TRACES
from infinity.update.loss_scale import DynamicLossScale, FixedLossScale, LossScale, TorchLossScale, loss_scale_of
from tests.support.plain_scale import PlainScale
from tests.support.reference import differing_bits

NUM_STEPS = 300


@given(
    overflows=st.lists(st.booleans(), max_size=60) | st.lists(st.sampled_from([True, *[False] * 9]), max_size=200),
    power=st.integers(0, 40),
    window=st.integers(1, 12),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
)
def test_the_dynamic_scale_is_deepspeeds(
    overflows: list[bool], power: int, window: int, hysteresis: int, consecutive: bool
) -> None:
    ours = DynamicLossScale(
        initial=2.0**power, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, least=1.0
    )
    plain = PlainScale(power=power, window=window, hysteresis=hysteresis, consecutive=consecutive)
    for overflow in overflows:
        try:
            plain.update(overflow=overflow)
        except OverflowError:
            with pytest.raises(LossScaleError, match="least loss scale"):
                ours.update(overflow=overflow)
            return
        ours.update(overflow=overflow)
        assert (ours.value, ours.last_overflow_iter) == (plain.scale, plain.last_overflow)


def test_the_scale_goes_as_torchs_for_thousands_of_steps() -> None:
    scaler, scale = torch.amp.GradScaler("cpu"), TorchLossScale()
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for step in range(4500):
        overflow = step in (3, 4, 2300)
        param.grad = torch.full((1,), float("inf") if overflow else 1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        scale.update(overflow=overflow)
        if step % 50 == 0 or overflow:
            assert scale.value == scaler.get_scale()
    again = TorchLossScale()
    again.load_state_dict(scale.state_dict())
    assert (again.value, again.state_dict()) == (scale.value, scale.state_dict())


def test_torchs_scale_falls_to_the_least_and_no_further() -> None:
    scale = TorchLossScale(4 * TorchLossScale.LEAST)
    for _ in range(2):
        scale.update(overflow=True)
    assert scale.value == TorchLossScale.LEAST
    scale.update(overflow=False)
    with pytest.raises(LossScaleError):
        scale.update(overflow=True)
    assert scale.value == TorchLossScale.LEAST


def test_torchs_scale_takes_no_other_ones_state() -> None:
    scale = TorchLossScale(8.0)
    for other in ({}, {"value": 2.0, "good_steps": 1, "patience": 1}):
        scale.load_state_dict(other)
        assert (scale.value, scale.state_dict()["good_steps"]) == (8.0, 0)


def scale_of(**sections: Any) -> LossScale:
    raw = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, **sections}
    return loss_scale_of(parse_config(raw))


def test_the_configuration_chooses_the_scale() -> None:
    assert scale_of().value == 1.0
    assert not scale_of(bf16={"enabled": True}).checks_overflow
    assert scale_of(bf16={"enabled": True, "check_grad_overflow": True}).checks_overflow
    fixed = scale_of(fp16={"enabled": True, "loss_scale": 128})
    assert isinstance(fixed, FixedLossScale)
    assert fixed.state_dict() == {}, "nothing of it is kept"
    assert (fixed.value, fixed.checks_overflow) == (128, True)
    assert scale_of(fp16={"enabled": True, "initial_scale_power": 32}).value == 2.0**32
    assert scale_of(fp16={"enabled": False, "loss_scale": 128}).value == 1.0


# End to end


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(48, 96)
        self.narrow = nn.Linear(96, 8)

    def forward(self, x: Tensor, blow_up: float) -> Tensor:
        output: Tensor = self.narrow(torch.tanh(self.wide(x))) * blow_up
        return output.square().mean()


def model() -> Half:
    torch.manual_seed(1)
    return Half()


def batch(step: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(step)).to(dtype)


FORCED = frozenset({3, 4, 5, 40, 41, 90, 150, 151, 152, 153, 233})
"""Steps whose loss is infinite; others overflow by themselves when the scale has grown."""


def blow_up(step: int) -> float:
    return math.inf if step in FORCED else 1.0


Row = tuple[float, bool, float]
"""Scale of the step, whether it was applied, its norm."""


def plain_run(scale: PlainScale, clipping: float) -> tuple[list[Row], dict[str, Tensor]]:
    half = model().half()
    params = list(half.parameters())
    masters = [param.detach().float().clone() for param in model().parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.0, fused=True)
    rows = []
    for step in range(NUM_STEPS):
        (half(batch(step), blow_up(step)).float() * scale.scale).backward()
        for master, param in zip(masters, params, strict=True):
            master.grad = None if param.grad is None else param.grad.float() / scale.scale
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        applied = bool(norm.isfinite())
        rows.append((scale.scale, applied, float(norm)))
        if applied:
            if clipping:
                torch.nn.utils.clip_grads_with_norm_(masters, clipping, norm)
            optimizer.step()
            with torch.no_grad():
                for master, param in zip(masters, params, strict=True):
                    param.copy_(master)
        scale.update(overflow=not applied)
        half.zero_grad(set_to_none=True)
    return rows, {name: value.detach() for name, value in half.state_dict().items()}


def engine_run(fp16: dict[str, Any], clipping: float) -> tuple[list[Row], dict[str, Tensor]]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clipping,
        "fp16": {"enabled": True, **fp16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "steps_per_print": 0,
    }
    rows = []
    engine, optimizer, *_ = infinity.initialize(model=model(), config=config)
    with engine:
        for step in range(NUM_STEPS):
            scale = engine.cur_scale
            engine.backward(engine(batch(step), blow_up(step)))
            engine.step()
            rows.append((scale, engine.was_step_applied(), engine.get_global_grad_norm() or 0.0))
            assert optimizer is not None
            assert optimizer.overflow is not engine.was_step_applied()
        assert engine.skipped_steps == sum(not applied for _, applied, _ in rows)
        assert engine.global_steps == NUM_STEPS
        weights: dict[str, Tensor] = engine.full_state_dict()
        return rows, weights


@pytest.mark.parametrize(("hysteresis", "clipping", "consecutive"), [(1, 0.0, False), (2, 0.1, True), (3, 0.0, False)])
def test_scales_skips_and_norms_are_those_of_a_plain_loop(hysteresis: int, clipping: float, consecutive: bool) -> None:
    plain = PlainScale(power=14, window=7, hysteresis=hysteresis, consecutive=consecutive)
    expected, expected_weights = plain_run(plain, clipping)
    fp16 = {
        "initial_scale_power": 14,
        "loss_scale_window": 7,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
    }
    found, weights = engine_run(fp16, clipping)
    skipped = {step for step, (_, applied, _) in enumerate(expected) if not applied}
    assert skipped > FORCED, "no step overflows by itself: the scale never grew far enough"
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    for (_, applied, norm), (_, _, expected_norm) in zip(found, expected, strict=True):
        assert norm == expected_norm if applied else not math.isfinite(norm)
    assert {name: differing_bits(weights[name], value) for name, value in expected_weights.items()} == dict.fromkeys(
        expected_weights, 0
    )


STREAMED = {"stage": 3, "stage3_param_persistence_threshold": 0}


def engine_of(**sections: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 0,
        **sections,
    }
    return infinity.initialize(model=model(), config=config)


def test_a_skipped_step_leaves_weights_schedule_and_moments_alone() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
    engine, _, _, scheduler = engine_of(fp16={"enabled": True, "loss_scale": 8}, scheduler=schedule)
    with engine:
        rates = []
        for step in range(6):
            before = engine.full_master_state_dict()
            engine.backward(engine(batch(step), math.inf if step in (0, 3) else 1.0))
            engine.step()
            after = engine.full_master_state_dict()
            changed = any(differing_bits(before[name], after[name]) for name in before)
            assert changed is (step in (4, 5)), "the first two updates that are applied run at rate 0"
            rates.append(scheduler.last_epoch)
        assert rates == [0, 1, 2, 2, 3, 4]
        assert (engine.skipped_steps, engine.global_steps, engine.cur_scale) == (2, 6, 8)


@pytest.mark.parametrize(("update", "traces"), [("in_step", [0]), ("on_use", [0, DUE_TRACES])])
def test_a_pass_without_an_update_is_no_trace(update: str, traces: list[int]) -> None:
    """The next passes will have one: what is read ahead would be wrong for all of them."""
    engine, *_ = engine_of(
        fp16={"enabled": True, "loss_scale": 8}, zero_optimization=STREAMED, io_daemon={"update": update}
    )
    told: list[int] = []
    with engine:
        store: Any = engine._runtime.store
        store._inner._inner.set_trace = lambda trace_id, accesses: told.append(trace_id)
        for step in range(3):
            engine.backward(engine(batch(step), math.inf if step == 0 else 1.0))
            engine.step()
            assert told == traces[:step]


def test_an_overflow_at_the_least_scale_is_an_error_and_changes_nothing() -> None:
    engine, *_ = engine_of(fp16={"enabled": True, "initial_scale_power": 1, "min_loss_scale": 1, "hysteresis": 1})
    with engine:
        before = engine.full_state_dict()
        engine.backward(engine(batch(0), math.inf))
        engine.step()
        assert engine.cur_scale == 1
        engine.backward(engine(batch(1), math.inf))
        for _ in range(2):  # again: the gradients of the step are still those
            with pytest.raises(LossScaleError):
                engine.step()
        engine.zero_grad()
        after = engine.full_state_dict()
        assert not any(differing_bits(before[name], after[name]) for name in before)
        engine.backward(engine(batch(2), 1.0))
        engine.step()
        assert engine.was_step_applied()


def test_an_overflow_in_one_micro_batch_skips_the_step_and_the_next_starts_anew() -> None:
    engine, *_ = engine_of(fp16={"enabled": True, "loss_scale": 8}, gradient_accumulation_steps=3)
    with engine:
        for micro_batch in range(6):
            engine.backward(engine(batch(micro_batch), math.inf if micro_batch == 1 else 1.0))
            engine.step()
            if micro_batch == 2:
                assert not engine.was_step_applied()
        assert engine.was_step_applied()


@pytest.mark.parametrize("checked", [False, True])
def test_bf16_checks_its_gradients_where_it_is_told_to(checked: bool) -> None:
    engine, *_ = engine_of(bf16={"enabled": True, "check_grad_overflow": checked})
    with engine:
        engine.backward(engine(batch(0, torch.bfloat16), math.inf))
        engine.step()
        finite = all(bool(weight.isfinite().all()) for weight in engine.full_state_dict().values())
        assert (engine.was_step_applied(), finite) == ((False, True) if checked else (True, False))


def test_auto_cast_casts_floating_inputs_and_nothing_else() -> None:
    seen: list[torch.dtype] = []

    class Watching(nn.Linear):
        def forward(self, x: dict[str, Any], mask: Tensor) -> Tensor:  # type: ignore[override]
            seen.extend([x["x"][0].dtype, mask.dtype])
            return super().forward(x["x"][0])

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "auto_cast": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
    }
    with infinity.initialize(model=Watching(8, 8), config=config)[0] as engine:
        engine({"x": [torch.randn(2, 8)]}, mask=torch.ones(2, dtype=torch.int64))
    assert seen == [torch.float16, torch.int64]
