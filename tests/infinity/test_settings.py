"""Settings of the configuration as a training feels them, on one rank in memory."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import infinity
from infinity import entry
from infinity.config import parse_config
from infinity.errors import ConfigError, WeightsError
from infinity.plan.leaves import get_leaf_modules
from infinity.plan.precision import Precision
from infinity.update.schedules import OneCycle, WarmupLR

NUM_STEPS = 6
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
WITHOUT_OPTIMIZER = {key: value for key, value in BASE.items() if key != "optimizer"}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def _loss(module: Any, step: int) -> torch.Tensor:
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return ((module(batch) - 1) ** 2).mean()  # type: ignore[no-any-return]


def _config(**keys: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BASE), **keys}


@contextmanager
def _engine(config: dict[str, Any], **objects: Any) -> Iterator[tuple[Any, Any]]:
    """(engine, its scheduler)."""
    engine, _, _, scheduler = infinity.initialize(
        model=objects.pop("model", None) or _model(), config=config, **objects
    )
    try:
        yield engine, scheduler
    finally:
        engine.destroy()


def _train(engine: Any, num_steps: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    for step in range(num_steps):
        engine.backward(_loss(engine, step))
        engine.step()
    weights: dict[str, torch.Tensor] = engine.full_state_dict()
    return weights


def _train_plainly(optimizer_of: Any, schedule_of: Any = None) -> dict[str, torch.Tensor]:
    module = _model()
    optimizer = optimizer_of(module.parameters())
    schedule = schedule_of(optimizer) if schedule_of is not None else None
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        _loss(module, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


def _same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- the optimizer's parameters


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("AdamW", {"lr": 3e-3}),
        ("AdamW", {"betas": [0.5, 0.9]}),
        ("AdamW", {"eps": 1e-2}),
        ("AdamW", {"weight_decay": 0.3}),
        ("Adam", {"weight_decay": 0.3}),
        ("Adam", {"weight_decay": 0.3, "adam_w_mode": False}),
    ],
    ids=str,
)
def test_the_optimizers_parameters_are_torchs(kind: str, params: dict[str, Any]) -> None:
    options = {
        "lr": 1e-2,
        "weight_decay": 0.0,
        **{name: value for name, value in params.items() if name != "adam_w_mode"},
    }
    torchs = torch.optim.Adam if params.get("adam_w_mode") is False else torch.optim.AdamW
    section = {"type": kind, "params": {"lr": 1e-2, **params}}
    with _engine(_config(optimizer=section)) as (engine, _):
        ours = _train(engine)
    assert _same_bits(ours, _train_plainly(lambda parameters: torchs(parameters, **options, fused=True)))
    assert not _same_bits(
        ours, _train_plainly(lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.0))
    )


# --- schedules


def test_a_schedule_of_the_configuration_sets_rates_and_momenta_of_the_update() -> None:
    params: dict[str, Any] = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
    with _engine(_config(scheduler={"type": "OneCycle", "params": params})) as (engine, scheduler):
        assert type(scheduler) is OneCycle
        ours = _train(engine)
    theirs = _train_plainly(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, fused=True),
        lambda optimizer: OneCycle(optimizer, **params),
    )
    assert _same_bits(ours, theirs)


class Halving:
    """A scheduler that is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def test_a_function_gets_the_engines_optimizer() -> None:
    with _engine(_config(), lr_scheduler=Halving) as (engine, scheduler):
        assert scheduler.optimizer is engine.optimizer
        _train(engine, 3)
        assert scheduler.num_steps == 3
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2 / 8


def test_a_client_scheduler_steps_once_each_update() -> None:
    config = {**WITHOUT_OPTIMIZER, "gradient_accumulation_steps": 2}
    module = _model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    with _engine(config, model=module, optimizer=optimizer, lr_scheduler=schedule) as (engine, scheduler):
        assert scheduler is schedule
        _train(engine, 4)
        assert schedule.get_last_lr() == [pytest.approx(0.01)]
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_schedulers_that_cannot_be_followed_are_refused_and_the_model_stays_as_it_was() -> None:
    module = _model()
    optimizer = torch.optim.AdamW(module.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    other = Halving(torch.optim.AdamW(_model().parameters()))
    section = {"type": "WarmupLR"}
    per_group = {"type": "WarmupLR", "params": {"warmup_min_lr": [1e-3, 1e-4]}}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (WITHOUT_OPTIMIZER, {"optimizer": optimizer, "lr_scheduler": plateau}, r"step\(\) needs metrics"),
        (WITHOUT_OPTIMIZER, {"optimizer": optimizer, "lr_scheduler": other}, "drives another optimizer"),
        (_config(), {"lr_scheduler": other}, "drives another optimizer"),
        (_config(), {"lr_scheduler": lambda _optimizer: other}, "must use the one that it gets"),
        (_config(), {"lr_scheduler": lambda _optimizer: None}, "must return a scheduler"),
        (_config(), {"lr_scheduler": "cosine"}, "must be a scheduler, or a function"),
        (_config(scheduler=section), {"lr_scheduler": Halving}, "a scheduler was passed too"),
        (_config(scheduler=per_group), {}, "one for each of 1 groups"),
    ]
    for config, objects, words in cases:
        with pytest.raises(ConfigError, match=words):
            infinity.initialize(model=module, config=config, **objects)
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(module.parameters(), _model().parameters(), strict=True)
    )


def test_a_schedule_without_anything_to_train_is_none() -> None:
    module = _model().requires_grad_(False)
    with _engine(_config(scheduler={"type": "WarmupLR"}), model=module) as (_, scheduler):
        assert scheduler is None


# --- what is printed


@pytest.mark.parametrize(("every", "lines"), [(2, 3), (4, 1), (0, 0), (float("inf"), 0)])
def test_progress_is_printed_every_so_many_steps(every: float, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="infinity.observe"),
        _engine(_config(steps_per_print=every)) as (e, _),
    ):
        _train(e)
    assert sum("lr [" in record.getMessage() for record in caplog.records) == lines


def test_an_old_name_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    config = _config()
    config["zero_optimization"]["max_live_parameters"] = 10**6
    config["bfloat16"] = {"enabled": False}
    with caplog.at_level(logging.WARNING):
        with infinity.Init(config_dict_or_path=config):
            module = _model()
        with _engine(config, model=module):
            pass
    told = [record.getMessage() for record in caplog.records if "old name" in record.getMessage()]
    assert sorted(told) == [
        "bfloat16 is an old name: write bf16",
        "zero_optimization.max_live_parameters is an old name: write zero_optimization.stage3_max_live_parameters",
    ]


def test_a_sub_group_smaller_than_what_works_is_that_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    zero = {**BASE["zero_optimization"], "sub_group_size": 100}
    with _engine(_config(zero_optimization=zero)) as (engine, _):
        small = _train(engine)
    assert "zero_optimization.sub_group_size = 100 is taken as 16384, the least that works" in caplog.text
    with _engine(_config()) as (engine, _):
        assert _same_bits(small, _train(engine))


# --- a trainer's files


def test_init_sees_autos_that_a_trainer_fills_in_before_initialize() -> None:
    raw = _config(
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    )
    with infinity.Init(config_dict_or_path=raw):
        module = _model()
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr = 'auto': only a trainer"):
        infinity.initialize(model=module, config=raw)
    filled = _config(
        gradient_clipping=0.0,
        bf16={"enabled": False},
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}},
    )
    with _engine(filled, model=module) as (engine, scheduler):
        assert isinstance(scheduler, WarmupLR)
        ours = _train(engine)
    with _engine(filled) as (engine, _):
        assert _same_bits(ours, _train(engine))


# --- whose accumulation


@pytest.mark.parametrize("clipping", [0.0, 0.1])
def test_whoever_manages_accumulation_updates_with_each_step(clipping: float) -> None:
    """One update of one backward, one of three."""
    module = _model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    config = _config(managed_gradient_accumulation=False, gradient_clipping=clipping)
    with _engine(config) as (engine, _):
        for batches in ([0], [1, 2, 3], [4, 5]):
            for batch in batches:
                engine.backward(_loss(engine, batch))
                _loss(module, batch).backward()  # type: ignore[no-untyped-call]
            engine.step()
            if clipping:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clipping)
            optimizer.step()
            optimizer.zero_grad()
        assert (engine.global_steps, engine.global_samples) == (3, 6 * 4)
        ours = engine.full_state_dict()
    if clipping:
        assert all(torch.allclose(ours[name], value, rtol=1e-5) for name, value in module.state_dict().items())
    else:
        assert _same_bits(ours, dict(module.state_dict()))


# --- which parameters


def test_unused_parameters_end_the_step_where_they_are_not_ignored() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.frozen.requires_grad_(False)
            self.takes_both = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(batch)
            return self.unused(out) if self.takes_both else out

    zero = {**BASE["zero_optimization"], "ignore_unused_parameters": False}
    module = Half()
    with _engine(_config(zero_optimization=zero), model=module) as (engine, _):
        before = engine.full_state_dict()
        engine.backward(_loss(engine, 0))
        with pytest.raises(WeightsError, match=r"^unused\.weight, unused\.bias had no gradient .* freeze what is not"):
            engine.step()
        assert _same_bits(engine.full_state_dict(), before)
        engine.zero_grad()
        module.takes_both = True
        engine.backward(_loss(engine, 0))
        engine.step()
        assert not _same_bits(engine.full_state_dict(), before)
    with _engine(_config(), model=Half()) as (engine, _):
        engine.backward(_loss(engine, 0))
        engine.step()


def _leaf_config(**words: Any) -> dict[str, Any]:
    return _config(zero_optimization={**BASE["zero_optimization"], "leaf_module": words})


@pytest.mark.parametrize(
    ("words", "leaves"),
    [
        ({"classes": ["Linear"]}, ["0", "2"]),
        ({"classes": "torch.nn.modules.activation.Tanh"}, ["1"]),
        ({"names": ["2"]}, ["2"]),
        ({"name_suffixes": ["0"], "names": "1", "classes": ["OfAnotherModel"]}, ["0", "1"]),
        ({}, []),
    ],
    ids=str,
)
def test_leaf_modules_of_the_configuration(
    words: dict[str, Any], leaves: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with _engine(_leaf_config(**words)) as (engine, _):
        marked = get_leaf_modules(engine.module)
        assert [name for name, module in engine.module.named_modules() if module in marked] == leaves
        _train(engine, 2)
    assert ("OfAnotherModel means nothing" in caplog.text) is ("OfAnotherModel" in str(words))


def test_leaf_modules_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="means nothing in Sequential") as caught:
        infinity.initialize(model=_model(), config=_leaf_config(classes=["MoE"], names=["experts"]))
    assert caught.value.value == ["MoE", "experts"]


# --- precision and data


@pytest.mark.parametrize(
    ("keys", "reduce", "gradient"),
    [
        ({}, torch.float32, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16, torch.bfloat16),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, torch.float32, torch.float32),
        ({"communication_data_type": "bf16"}, torch.bfloat16, torch.bfloat16),
        ({"communication_data_type": "bf16", "gradient_accumulation_steps": 2}, torch.bfloat16, torch.float32),
        ({"communication_data_type": "bf16", "managed_gradient_accumulation": False}, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_gradients_travel_and_wait_in_the_dtypes_that_were_asked_for(
    keys: dict[str, Any], reduce: torch.dtype, gradient: torch.dtype
) -> None:
    precision = Precision.of(parse_config(_config(**keys)))
    assert (precision.reduce, precision.gradient) == (reduce, gradient)


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_a_last_batch_that_is_not_full(drop_last: bool, sizes: list[int]) -> None:
    engine, _, loader, _ = infinity.initialize(
        model=_model(), config=_config(dataloader_drop_last=drop_last), training_data=TensorDataset(torch.zeros(10, 16))
    )
    assert loader is not None
    assert [len(batch) for (batch,) in loader] == sizes
    engine.destroy()


@pytest.mark.parametrize(
    ("threads", "ranks", "as_told", "is_said"),
    [(4, 1, True, True), (4, 1, False, False), (2, 2, False, True), (3, 1, False, False), (1, 3, False, False)],
)
def test_threads_that_leave_the_daemon_no_core_are_named(
    threads: int,
    ranks: int,
    as_told: bool,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)))
    with caplog.at_level(logging.INFO, logger="infinity.entry"):
        entry._note_threads(ranks, spins_as_told=as_told)
    assert ("torch.set_num_threads" in caplog.text) == is_said
