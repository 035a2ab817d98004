"""A checkpoint of another training than the engine's: what is alike goes on, what is not is told before it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

import infinity
from infinity.checkpoint import plain
from infinity.errors import CheckpointError, ConfigError
from infinity.loader import make_loader
from tests.support.resumed import config_of, differing, everything_of, train


class Net(nn.Module):
    def __init__(self, constant: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 96), nn.Linear(96, 16)
        self.constant: torch.Tensor
        self.register_buffer("constant", torch.tensor(constant), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x)) * self.constant
        return out


@contextmanager
def engine_of(model: nn.Module, made: Optimizer | None = None, **changes: Any) -> Iterator[Any]:
    config = config_of(**changes)
    del config["scheduler"]
    if made is not None:
        del config["optimizer"]
    engine = infinity.initialize(model=model, config=config, optimizer=made)[0]
    yield engine
    engine.destroy()


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, **params}}}


Make = Callable[[list[nn.Parameter]], Optimizer]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (lambda p: AdamW(p, 1e-2), lambda p: Adam(p, 1e-2), "weight decay was decoupled"),
        (lambda p: Adam(p, 1e-2), lambda p: AdamW(p, 1e-2), "weight decay was added"),
        (lambda p: AdamW(p, 1e-2), lambda p: RAdam(p, 1e-2), "was AdamW, it is RAdam"),
        (lambda p: NAdam(p, 1e-2), lambda p: AdamW(p, 1e-2), "was NAdam, it is AdamW"),
    ],
)
def test_an_optimizer_of_the_same_states_and_other_arithmetic_is_told(
    before: Make, after: Make, words: str, tmp_path: Path
) -> None:
    model = Net()
    with engine_of(model, before(list(model.parameters()))) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        weights = engine.full_master_state_dict()
    model = Net()
    with engine_of(model, after(list(model.parameters()))) as engine:
        train(engine, 1)
        state, groups = everything_of(engine), str(engine.optimizer.param_groups)
        with pytest.raises(CheckpointError, match=f"(?s){words}.*load_optimizer_states=False"):
            engine.load_checkpoint(tmp_path)
        assert not differing(everything_of(engine), state)
        assert str(engine.optimizer.param_groups) == groups
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert not differing(engine.full_master_state_dict(), weights)


def test_one_arithmetic_by_another_name_goes_on(tmp_path: Path) -> None:
    model = Net()
    # fused, as the configuration's is: torch's other steps round otherwise, which one model in five shows
    with engine_of(model, AdamW(model.parameters(), 1e-2, weight_decay=0.0, fused=True)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 2)
    with engine_of(Net(), **adam()) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, 2) == losses


def _grouped(model: nn.Module, order: Sequence[int], *, decays: Sequence[float] = (0.5, 0.0)) -> Optimizer:
    halves = [[p for p in model.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    return AdamW([{"params": halves[i], "weight_decay": decays[i]} for i in order], lr=1e-2)


def test_param_groups_in_another_order_do_not_take_each_others_options(tmp_path: Path) -> None:
    model = Net()
    with engine_of(model, _grouped(model, (0, 1))) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 2)
    model = Net()
    with (
        engine_of(model, _grouped(model, (1, 0))) as engine,
        pytest.raises(CheckpointError, match=r"first.bias, second.bias.* options of another param group"),
    ):
        engine.load_checkpoint(tmp_path)
    model = Net()
    with engine_of(model, _grouped(model, (0, 1), decays=(0.1, 0.2))) as engine:
        engine.load_checkpoint(tmp_path)  # as torch, it goes on with what was saved
        assert train(engine, 2) == losses


def test_names_of_parameters_are_no_options_of_their_group(tmp_path: Path) -> None:
    """Torch keeps them in the group where an optimizer is given names."""

    def halves(model: Net, *, swapped: bool) -> Optimizer:
        found = [{"params": [(name, p) for name, p in model.named_parameters() if name.startswith(half)]}
                 for half in ("first", "second")]  # fmt: skip
        return AdamW(found[::-1] if swapped else found, lr=1e-2)

    model = Net()
    with engine_of(model, halves(model, swapped=False)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 2)
    model = Net()
    with engine_of(model, halves(model, swapped=True)) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, 2) == losses
        assert engine.optimizer.param_groups[0]["param_names"] == ["second.weight", "second.bias"]


def test_a_load_in_inference_mode_leaves_rates_that_can_be_written(tmp_path: Path) -> None:
    def start() -> Any:
        model = Net()
        made = AdamW(model.parameters(), lr=torch.tensor(1e-2))
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        config = config_of()
        del config["scheduler"], config["optimizer"]
        return infinity.initialize(model=model, config=config, optimizer=made, lr_scheduler=schedule)[0]

    engine = start()
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, 2)
    engine.destroy()
    engine = start()
    with torch.inference_mode():
        engine.load_checkpoint(tmp_path)
    assert train(engine, 2) == losses
    engine.destroy()


SCALES: list[dict[str, Any]] = [
    {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    {"fp16": {"enabled": True, "initial_scale_power": 9}},
    {"fp16": {"enabled": True, "loss_scale": 64}},
    {"bf16": {"enabled": True}},
]


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("after", range(4))
def test_a_loss_scale_of_another_kind_goes_on_from_its_configuration(before: int, after: int, tmp_path: Path) -> None:
    with engine_of(Net(), **SCALES[before]) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
    with engine_of(Net(), **SCALES[after]) as engine:
        scale = engine.cur_scale if hasattr(engine, "cur_scale") else engine.optimizer.loss_scale
        engine.load_checkpoint(tmp_path)
        assert engine.optimizer.loss_scale == scale
        train(engine, 1)


class Schedule:
    """A user's own."""

    def __init__(self, _optimizer: object, *, fails: bool = False) -> None:
        self._fails = fails

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._fails:
            raise KeyError("gamma")


def test_a_schedule_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    config = config_of()
    del config["scheduler"]
    takes: Any = Schedule
    engine: Any = infinity.initialize(model=Net(), config=config, lr_scheduler=takes)[0]
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    fails: Any = partial(Schedule, fails=True)
    engine = infinity.initialize(model=Net(), config=config, lr_scheduler=fails)[0]
    with pytest.raises(CheckpointError, match=r"schedule's load_state_dict.*gamma.*load_lr_scheduler_states=False"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


def test_names_of_which_none_is_the_models_are_refused_and_others_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(Net()) as engine:
        engine.save_checkpoint(tmp_path)
        weights = engine.full_state_dict()
    alone = nn.Sequential(nn.Linear(16, 96))
    with engine_of(alone) as engine, pytest.raises(CheckpointError, match="no parameter of the model"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)
    larger = Net()
    larger.third = nn.Linear(3, 3)
    with engine_of(larger) as engine:
        with pytest.raises(CheckpointError, match="load_module_strict=False"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        found = engine.full_state_dict()
    assert all(torch.equal(value, found[name]) for name, value in weights.items())
    assert "third.bias, third.weight: not in the checkpoint" in caplog.text


def test_constants_of_the_constructor_are_the_trainings_not_the_modules(tmp_path: Path) -> None:
    with engine_of(Net(1.0)) as engine:
        engine.save_checkpoint(tmp_path)
    with engine_of(Net(2.0)) as engine:
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert engine.module.constant == 2.0, "torch's load_state_dict leaves it alone, too"
        engine.load_checkpoint(tmp_path)
        assert engine.module.constant == 1.0


class Tied(nn.Module):
    """One weight for both ends, or one for each; the end may be the first that the module has."""

    def __init__(self, *, tied: bool, end_first: bool = False) -> None:
        super().__init__()
        for name in ("end", "begin") if end_first else ("begin", "end"):
            setattr(self, name, nn.Linear(16, 16, bias=False))
        self.between = nn.Linear(16, 16)
        if tied:
            self.end.weight = self.begin.weight
        self.begin: nn.Linear
        self.end: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.end(self.between(self.begin(x)))
        return out


PLAIN_SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}


@pytest.mark.parametrize("end_first", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_that_was_shared_is_loaded_under_each_of_its_names(
    stage: int, precision: str, end_first: bool, tmp_path: Path
) -> None:
    with engine_of(Tied(tied=True), stage=stage, precision=precision) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        weights, masters = engine.full_state_dict(), engine.full_master_state_dict()
    plain = Tied(tied=False, end_first=end_first)
    plain.load_state_dict(weights, strict=True)  # as torch does
    with engine_of(Tied(tied=False, end_first=end_first), stage=stage, precision=precision) as engine:
        state = everything_of(engine)
        for strict in (True, False):
            words = (
                r"end.weight: was begin.weight when it was saved.*states are of both\n?.*load_optimizer_states=False"
            )
            with pytest.raises(CheckpointError, match=f"(?s)1 difference:.*{words}"):
                engine.load_checkpoint(tmp_path, load_module_strict=strict)
        assert not differing(everything_of(engine), state)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        found, loaded = engine.full_state_dict(), engine.full_master_state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(value, found[name]) for name, value in weights.items())
        assert torch.equal(loaded["end.weight"], masters["begin.weight"])
        train(engine, 1)


def test_a_weight_that_was_shared_and_has_no_states_goes_on_as_two(tmp_path: Path) -> None:
    with engine_of(Tied(tied=True), **PLAIN_SGD) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        weights = engine.full_state_dict()
    with engine_of(Tied(tied=False), **PLAIN_SGD) as engine:
        engine.load_checkpoint(tmp_path)
        found = engine.full_state_dict()
        assert all(torch.equal(value, found[name]) for name, value in weights.items())
        train(engine, 1)


def test_a_shared_weight_that_stands_under_another_of_its_names_goes_on(tmp_path: Path) -> None:
    with engine_of(Tied(tied=True)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 2)
    with engine_of(Tied(tied=True, end_first=True)) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, 2) == losses
    # weights of two matrices, whose order is another one, take no other group's options
    for first, second in ((0, 1), (1, 0)):
        model = Tied(tied=True, end_first=bool(second))
        with engine_of(model, _grouped(model, (0, 1))) as engine:
            engine.save_checkpoint(tmp_path, tag="grouped")
        model = Tied(tied=True, end_first=bool(first))
        with (
            engine_of(model, _grouped(model, (1, 0))) as engine,
            pytest.raises(CheckpointError, match=r"(begin|end).weight.* options of another param group"),
        ):
            engine.load_checkpoint(tmp_path, tag="grouped")


def test_weights_of_their_own_are_not_taken_for_a_shared_one_unless_that_is_asked_for(tmp_path: Path) -> None:
    with engine_of(Tied(tied=False)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        weights = engine.full_state_dict()
    with engine_of(Tied(tied=True)) as engine:
        state = everything_of(engine)
        words = r"end.weight: was a tensor of its own when it was saved, and is begin.weight in the model"
        with pytest.raises(CheckpointError, match=f"(?s){words}.*load_module_strict=False"):
            engine.load_checkpoint(tmp_path)
        assert not differing(everything_of(engine), state)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert torch.equal(engine.full_state_dict()["end.weight"], weights["begin.weight"])


class Spaced(Optimizer):
    """What it keeps has a space in its name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param]
                if not state:
                    state["running mean"] = torch.zeros_like(param)
                state["running mean"].mul_(0.5).add_(param.grad)
                param.add_(state["running mean"], alpha=-group["lr"])


def test_names_may_have_spaces(tmp_path: Path) -> None:
    model = Net()
    model.register_parameter("a scale", nn.Parameter(torch.ones(16)))
    with engine_of(model, Spaced(model.parameters())) as engine:
        train(engine, 2)
        state = everything_of(engine)
        engine.save_checkpoint(tmp_path)
        train(engine, 1)
        engine.load_checkpoint(tmp_path)
        assert not differing(everything_of(engine), state)


class Vouched:
    """A user's class that weights_only is told to take."""

    def __init__(self, value: int) -> None:
        self.value = value


class Broken:
    def __reduce__(self) -> Any:
        raise KeyError("no pickle")


def test_client_states_that_cannot_come_back_are_named(tmp_path: Path) -> None:
    with engine_of(Net()) as engine:
        for bad, words in (([1, 2], "list"), ("text", "str"), ({"a": {"b": Broken()}}, r"client_state\.a\.b")):
            with pytest.raises(ConfigError, match=words):
                engine.save_checkpoint(tmp_path, client_state=bad)
        around: dict[str, Any] = {"f": Broken()}
        around["me"] = around
        with pytest.raises(ConfigError, match=r"client_state\.f"):
            engine.save_checkpoint(tmp_path, client_state=around)
        with pytest.raises(ConfigError, match=r"client_state\.a\[1\]\.b = 'Broken'"):
            engine.save_checkpoint(tmp_path, client_state={"a": [1, {"b": Broken()}]})
        assert not list(tmp_path.iterdir())
        with torch.serialization.safe_globals([Vouched]):
            engine.save_checkpoint(tmp_path, client_state={"it": Vouched(3)})
            assert engine.load_checkpoint(tmp_path)[1]["it"].value == 3
        state = everything_of(engine)
        with pytest.raises(CheckpointError, match=r"state\.pt: cannot be read back here.*add_safe_globals"):
            engine.load_checkpoint(tmp_path)
        assert not differing(everything_of(engine), state)
        train(engine, 1)


def test_what_somebody_else_has_vouched_for_stays_vouched_for(tmp_path: Path) -> None:
    """Torch's own ``safe_globals`` takes away what was there before."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([np.ndarray, Vouched])
    try:
        with engine_of(Net()) as engine:
            engine.save_checkpoint(tmp_path, client_state={"array": np.zeros(2)})
            engine.load_checkpoint(tmp_path)
        assert {np.ndarray, Vouched} <= set(torch.serialization.get_safe_globals())
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_values_are_read_in_several_threads() -> None:
    data = plain.to_bytes({"array": np.arange(3)})
    with ThreadPoolExecutor(8) as threads:
        assert all(each["array"][2] == 2 for each in threads.map(plain.from_bytes, [data] * 200))
    assert np.ndarray not in torch.serialization.get_safe_globals()


def test_extra_state_is_compared_as_names_are(tmp_path: Path) -> None:
    class Extra(Net):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            if state != 1:
                raise AssertionError(state)

    for saved, model in ((Extra, Net), (Net, Extra)):
        with engine_of(saved()) as engine:
            engine.save_checkpoint(tmp_path)
        with engine_of(model()) as engine:
            with pytest.raises(CheckpointError, match=r"(?s)extra state: the .*load_module_strict=False"):
                engine.load_checkpoint(tmp_path)
            engine.load_checkpoint(tmp_path, load_module_strict=False)


def test_where_new_tensors_go_changes_nothing(tmp_path: Path) -> None:
    with engine_of(Net()) as engine:
        train(engine, 1)
        state = everything_of(engine)
        with torch.device("meta"):
            engine.save_checkpoint(tmp_path)
        losses = train(engine, 1)
        with torch.device("meta"):
            engine.load_checkpoint(tmp_path)
        assert not differing(everything_of(engine), state)
        assert train(engine, 1) == losses


def test_buffers_may_be_expanded(tmp_path: Path) -> None:
    model = Net()
    model.register_buffer("wide", torch.tensor([2.0]).expand(7))
    with engine_of(model) as engine:
        engine.save_checkpoint(tmp_path)
        engine.save_16bit_model(tmp_path / "weights")
        engine.module.wide = torch.zeros(7)
        engine.load_checkpoint(tmp_path)
        assert engine.module.wide.tolist() == [2.0] * 7


def test_another_generator_of_numpys_goes_on_or_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        with engine_of(Net()) as engine:
            np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
            engine.save_checkpoint(tmp_path)
            drawn = np.random.random()
            engine.load_checkpoint(tmp_path)
            assert np.random.random() == drawn
            np.random.set_bit_generator(own)  # type: ignore[attr-defined]
            engine.load_checkpoint(tmp_path)
            assert "NumPy draws as before" in caplog.text
    finally:
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]


def test_a_loader_of_other_batches_goes_on_at_its_sample_or_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    class Alone:
        world_size, rank = 1, 0

    def loader(num_samples: int, batch_size: int) -> Any:
        data: Any = list(range(num_samples))
        alone: Any = Alone()
        return make_loader(data, batch_size=batch_size, shuffle=False, drop_last=False, collectives=alone)

    running = loader(48, 4)
    batches = iter(running)
    for _ in range(4):
        next(batches)
    running.note_step()
    for num_samples, batch_size, first in ((48, 4, 16), (48, 8, 16), (48, 2, 16), (48, 5, 0), (40, 4, 0)):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            other = loader(num_samples, batch_size)
            other.load_state_dict(running.state_dict())
            assert next(iter(other)).tolist() == list(range(first, first + batch_size))
            assert ("begins anew" in caplog.text) == (first == 0)
