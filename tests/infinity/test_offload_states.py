"""States that were moved out of device memory come back with their bits; meanwhile what needs them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, EngineStateError, WeightsError
from infinity.tiers.base import ChunkLayout
from infinity.tiers.memory import MemoryStore
from infinity.zero import OffloadStateTypeEnum
from io_daemon.shared.protocol import PAGE_BYTES, ObjectKind

WIDTH = 96
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "persistent": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "masters alone": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
    },
    "stage 2": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "states on disk": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "bf16": {"enabled": True},
    },
}


def engine_of(layout: str, directory: Path | str = ".", width: int = WIDTH) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    sections = LAYOUTS[layout]
    zero = dict(sections["zero_optimization"])
    if "offload_optimizer" in zero:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(directory)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **sections,
        "zero_optimization": zero,
    }
    return infinity.initialize(model=model, config=config)[0]


def loss_of(engine: Engine, step: int, width: int = WIDTH) -> Tensor:
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: Tensor = engine(x).float().square().mean()
    return loss


def train(engine: Engine, *steps: int) -> None:
    for step in steps:
        engine.backward(loss_of(engine, step))
        engine.step()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("include", [None, ["hp_params", "lp_params"]], ids=str)
def test_after_reload_training_goes_on_with_the_same_bits(layout: str, include: Any, tmp_path: Path) -> None:
    with engine_of(layout, tmp_path) as engine, engine_of(layout, tmp_path) as undisturbed:
        train(engine, 0, 1)
        engine.offload_states(include=include, pin_memory=False)
        engine.offload_states(include=include, non_blocking=True)  # what is away stays so
        with pytest.raises(EngineStateError, match="reload_states"):
            engine.backward(torch.zeros((), requires_grad=True))
        with pytest.raises(EngineStateError, match="reload_states"):
            engine.step()
        engine.reload_states()
        train(engine, 2, 3)
        train(undisturbed, 0, 1, 2, 3)
        ours, theirs = engine.full_state_dict(), undisturbed.full_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        ours, theirs = engine.full_master_state_dict(), undisturbed.full_master_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("layout", ["stage 3", "persistent", "masters alone", "stage 2"])
def test_while_only_the_optimizers_states_are_away_the_model_can_be_used(layout: str) -> None:
    with engine_of(layout) as engine, torch.no_grad():
        expected = loss_of(engine, 5)
        engine.offload_states([OffloadStateTypeEnum.optim_states])
        assert torch.equal(loss_of(engine, 5), expected)
        with pytest.raises(EngineStateError, match="reload_states"):
            infinity.utils.safe_get_full_optimizer_state(engine.module.get_parameter("0.weight"), "exp_avg")
        engine.reload_states()
        assert (
            infinity.utils.safe_get_full_optimizer_state(engine.module.get_parameter("0.weight"), "exp_avg") is not None
        )


@pytest.mark.parametrize("layout", ["persistent", "masters alone", "stage 2"])
def test_while_masters_are_away_the_model_can_be_used(layout: str) -> None:
    """In whatever memory its weights are."""
    with engine_of(layout) as engine, engine_of(layout) as undisturbed, torch.no_grad():
        with torch.enable_grad():
            train(engine, 0, 1)
            train(undisturbed, 0, 1)
        expected = loss_of(undisturbed, 5)
        engine.offload_states([OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states])
        assert torch.equal(loss_of(engine, 5), expected)
        engine.reload_states()
        with torch.enable_grad():
            train(engine, 2)
            train(undisturbed, 2)
        ours, theirs = engine.full_master_state_dict(), undisturbed.full_master_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("layout", ["stage 3", "persistent", "masters alone", "stage 2"])
def test_without_weights_the_model_cannot_be_used(layout: str) -> None:
    with engine_of(layout) as engine:
        before = engine.full_state_dict()
        engine.offload_states()
        with pytest.raises(EngineStateError, match="reload_states"), torch.no_grad():
            loss_of(engine, 0)
        with pytest.raises(EngineStateError, match="reload_states"):
            engine.full_state_dict()
        engine.reload_states()
        after = engine.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        train(engine, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("include", [None, ["optim_states"]], ids=str)
def test_loading_what_is_away_is_refused_before_anything_is_loaded(layout: str, include: Any, tmp_path: Path) -> None:
    with engine_of(layout, tmp_path) as engine, engine_of(layout, tmp_path) as undisturbed:
        train(engine, 0)
        engine.save_checkpoint(tmp_path / "saved")
        train(engine, 1)
        engine.offload_states(include)
        if "states on disk" not in layout or include is None:
            with pytest.raises(EngineStateError, match="reload_states"):
                engine.load_checkpoint(tmp_path / "saved")
        if include is not None:  # weights are here
            engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
        engine.reload_states()
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, 2)
        train(undisturbed, 0, 2)
        ours, theirs = engine.full_master_state_dict(), undisturbed.full_master_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_that_were_gathered_with_others_that_are_away_are_not_in_use_from_then_on() -> None:
    """What was written to them later was refused, and stayed."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
    }
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with infinity.initialize(model=model, config=config)[0] as engine:
        with torch.no_grad():
            expected = loss_of(engine, 5)
        engine.offload_states([OffloadStateTypeEnum.hp_params])
        bias, weight = (engine.module.get_parameter(f"0.{name}") for name in ("bias", "weight"))
        with (
            pytest.raises(EngineStateError, match="reload_states"),
            infinity.zero.GatheredParameters([bias, weight]),
        ):
            raise AssertionError("weights are away")
        engine.reload_states()
        assert [group.name for group in engine._runtime.sharded.groups if group.in_use] == []
        with torch.no_grad():
            bias.add_(1.0)
        with pytest.raises(WeightsError, match=r"0\.bias .*changed in place"):
            train(engine, 0)
        engine.zero_grad()
        with torch.no_grad():
            assert torch.equal(loss_of(engine, 5), expected)


def test_a_write_that_is_refused_while_states_are_offloaded_is_undone() -> None:
    """The host has the weights, so that they can be gathered, and the device does not keep them."""
    torch.manual_seed(0)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    engine = infinity.initialize(model=nn.Sequential(nn.Linear(WIDTH, WIDTH)), config=config)[0]
    with engine:
        weight = engine.module.get_parameter("0.weight")
        expected = engine.full_state_dict()["0.weight"]
        engine.offload_states()
        with (
            pytest.raises(WeightsError, match=r"0\.weight .*changed in place"),
            infinity.zero.GatheredParameters(weight),
            torch.no_grad(),
        ):
            weight.fill_(7.0)
        with infinity.zero.GatheredParameters(weight):
            assert torch.equal(weight, expected)
        engine.reload_states()
        assert torch.equal(weight, expected)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def test_memory_of_whole_weights_is_given_back() -> None:
    width = 3072
    with engine_of("stage 2", width=width) as engine:
        weight_bytes = sum(param.numel() * param.element_size() for param in engine.parameters())
        before = _resident_bytes()
        engine.offload_states()
        assert before - _resident_bytes() > 0.8 * weight_bytes
        engine.reload_states()
        assert before - _resident_bytes() < 0.5 * weight_bytes


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="the device's memory is the host's")
def test_device_memory_is_given_back() -> None:
    with engine_of("stage 2", width=2048) as engine:
        train_at = torch.accelerator.current_accelerator()
        before = torch.accelerator.memory_allocated(train_at)
        engine.offload_states()
        assert torch.accelerator.memory_allocated(train_at) < 0.1 * before
        engine.reload_states()
        assert torch.accelerator.memory_allocated(train_at) > 0.9 * before


@pytest.mark.parametrize("layout", ["stage 3", "states on disk", "stage 2"])
def test_where_states_are_is_told(layout: str, tmp_path: Path) -> None:
    """Where the host's memory is the device's, the one is told from the other by the kinds that are on the device."""
    with engine_of(layout, tmp_path) as engine:
        train(engine, 0)
        offloaded, sharded = engine._offloaded, engine._runtime.sharded
        precision = sharded.precision
        states = sum(kind.mask for kind in precision.state_kinds.values())
        of_device = ObjectKind.WEIGHT.mask | (0 if layout == "states on disk" else precision.stepped.mask | states)
        every = ObjectKind.WEIGHT.mask | precision.stepped.mask | states
        assert sharded.on_device(every) == of_device
        engine.offload_states([OffloadStateTypeEnum.optim_states])
        assert sharded.on_device(every) == of_device & ~states
        assert all(offloaded.devices_of(state) == {torch.device("cpu")} for state in OffloadStateTypeEnum)
        engine.reload_states()
        assert sharded.on_device(every) == of_device


def test_the_store_refuses_kinds_that_are_away() -> None:
    store = MemoryStore(torch.device("cpu"))
    (chunk,) = store.register([ChunkLayout(numel=4, dtypes={0: torch.float32, 1: torch.float32})])
    store.open(chunk, 0, read=True)[0].fill_(7)
    store.move_out(1, pin_memory=False, non_blocking=False)
    store.acquire(chunk, read=2).release()
    with pytest.raises(EngineStateError, match="reload_states"):
        store.acquire(chunk, read=1)
    store.bring_back(non_blocking=False)
    assert store.open(chunk, ObjectKind.WEIGHT, read=True)[0].tolist() == [7.0] * 4


def test_what_cannot_be_done_is_refused_by_name() -> None:
    with engine_of("persistent") as engine:
        with pytest.raises(ConfigError, match=r"offload_optimizer\.device") as refusal:
            engine.offload_states(device="nvme")
        assert refusal.value.key == "device"
        with pytest.raises(ConfigError, match="optim_states, hp_params, lp_params") as refusal:
            engine.offload_states(include=["weights"])  # type: ignore[list-item]
        assert refusal.value.key == "include"
        data = engine.module.get_parameter("0.weight").data
        engine.offload_states()
        data[0] = 0.0
        engine.reload_states()
        with pytest.raises(WeightsError, match=r"0\.weight .* has a view that is kept"):
            engine.offload_states()
        del data
        engine.backward(loss_of(engine, 0))
        with pytest.raises(EngineStateError, match="between steps"):
            engine.offload_states()
        engine.step()
    with pytest.raises(EngineStateError, match="destroyed"):
        engine.offload_states()


@pytest.mark.parametrize("layout", ["persistent", "stage 2"])
@pytest.mark.parametrize("include", [None, ["lp_params"]], ids=str)
def test_what_was_kept_of_weights_that_come_back_follows_them(layout: str, include: Any) -> None:
    """A view of whole weights stayed what they were, and every update of them was refused."""
    with engine_of(layout) as engine, engine_of(layout) as undisturbed:
        weight, expected = (each.module.get_parameter("0.weight") for each in (engine, undisturbed))
        view, array = weight.detach().view(-1), weight.detach().view(torch.int16).numpy()
        loss = loss_of(engine, 0)
        engine.offload_states(include)
        engine.reload_states()
        engine.backward(loss)
        engine.step()
        train(engine, 1)
        train(undisturbed, 0, 1)
        if layout == "stage 2":
            with torch.no_grad():
                view[0] = 7.0
                expected[0, :2] = 7.0
            array[0, 1] = array[0, 0]
        train(engine, 2)
        train(undisturbed, 2)
        assert torch.equal(weight, expected)
        assert torch.equal(view.view_as(weight), expected)
        assert (array == expected.detach().view(torch.int16).numpy()).all()


@pytest.mark.parametrize(
    ("layout", "kept"),
    [("persistent", "view"), ("persistent", "data"), ("stage 2", "view"), ("stage 2", "data"), ("stage 2", "array")],
)
def test_what_is_written_while_weights_are_away_is_refused(layout: str, kept: str) -> None:
    """And so is what is written to them afterwards, before it is: that could not be taken back."""
    with engine_of(layout) as engine:
        weight = engine.module.get_parameter("0.weight")
        expected = weight.detach().clone()
        holder: Any
        match kept:
            case "view":
                holder = weight.detach().view(-1)
            case "data":
                holder = weight.data
            case _:
                holder = weight.detach().view(torch.int16).numpy()
        engine.offload_states()
        holder[0] = 1
        engine.reload_states()
        assert torch.equal(weight, expected)
        refusal = r"0\.weight .* has a view that is kept"
        with (
            pytest.raises(WeightsError, match=refusal),
            infinity.zero.GatheredParameters(weight, modifier_rank=0),
            torch.no_grad(),
        ):
            weight.fill_(7.0)
        assert torch.equal(weight, expected)
        with pytest.raises(WeightsError, match=refusal):
            train(engine, 0)
        del holder
        engine.step()


class Scaled(nn.Module):
    """Its backward needs the parameter itself, not a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) * self.scale


@pytest.mark.parametrize("layout", ["stage 3", "persistent", "stage 2"])
@pytest.mark.parametrize("include", [None, ["lp_params"]], ids=str)
def test_a_forward_meanwhile_leaves_nothing_behind(layout: str, include: Any) -> None:
    """Whether it was refused, or weights were made anew of their masters: those that stay in memory did not come back
    as such, and backward refused."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **LAYOUTS[layout],
    }
    weights, refusals = [], 0
    for disturbed in (False, True):
        with infinity.initialize(model=Scaled(), config=config)[0] as engine:
            expected = loss_of(engine, 1)
            engine.offload_states(include)
            if disturbed:
                try:
                    assert torch.equal(loss_of(engine, 1), expected)
                except EngineStateError as error:
                    assert "reload_states" in str(error)
                    refusals += 1
            engine.reload_states()
            train(engine, 2, 3)
            weights.append(engine.full_state_dict()["scale"])
    assert torch.equal(weights[0], weights[1])
    assert refusals == (include is None or layout == "stage 3")  # where weights are the masters


def test_a_late_save_is_refused_at_once_while_states_are_away(tmp_path: Path) -> None:
    with engine_of("persistent") as engine:
        engine.offload_states([OffloadStateTypeEnum.hp_params])
        with pytest.raises(EngineStateError, match="reload_states"):
            engine.save_checkpoint(tmp_path, asynchronous=True)
        engine.reload_states()
        engine.save_checkpoint(tmp_path, "now", asynchronous=True)
        engine.wait_for_checkpoint()
        assert (tmp_path / "latest").read_text().strip() == "now"


def test_a_write_that_is_met_while_states_are_away_is_refused_when_they_are_back() -> None:
    """It cannot be undone before; the weights were made anew in silence."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    with infinity.initialize(model=model, config=config)[0] as engine:
        before = engine.full_state_dict()
        with torch.no_grad():
            cast(nn.Linear, model[0]).weight.add_(1.0)
        engine.offload_states(include=[OffloadStateTypeEnum.hp_params])
        with pytest.raises(EngineStateError, match=r"reload_states"):
            engine.full_master_state_dict()
        engine.reload_states()
        with pytest.raises(WeightsError, match=r"^0\.weight .* was changed in place, which"):
            engine.full_state_dict()
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
