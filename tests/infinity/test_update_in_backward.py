"""Chunks updated inside backward: the bits of an update after it, fewer bytes, and refusals of what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import Engine
from infinity.errors import ConfigError, EngineStateError, WeightsError
from infinity.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.support.ranks import call_on_ranks
from tests.support.reference import differing_bits

WIDTH = 128
NUM_STEPS = 4


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """The head is the first layer's weights; the spare layer is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, use_spare: bool = True, reentrant: bool = False) -> torch.Tensor:
        inputs = inputs.to(self.spare.weight.dtype)
        for layer in self.layers:
            inputs = torch.tanh(checkpoint(layer, inputs, use_reentrant=True) if reentrant else layer(inputs))
        if use_spare:
            inputs = self.spare(inputs)
        return nn.functional.linear(inputs, self.get_parameter("layers.0.weight")).square().mean()


def batch(step: int) -> tuple[torch.Tensor, bool]:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)), step % 2 == 0


def config_of(directory: Path, tier: str, *, early: bool, **changes: Any) -> dict[str, Any]:
    offload = {"device": tier} | ({"nvme_path": str(directory)} if tier == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": WIDTH,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"update_in_backward": early, "host_budget_bytes": 1 << 21},
        **changes,
    }


@contextmanager
def engine_of(directory: Path, tier: str = "none", *, early: bool = True, **changes: Any) -> Iterator[Engine]:
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Net(), config=config_of(directory, tier, early=early, **changes))
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Engine, num_steps: int = NUM_STEPS, *, accumulation: int = 1) -> list[torch.Tensor]:
    losses = []
    for step in range(num_steps * accumulation):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(differing_bits(found[name], value) == 0 for name, value in expected.items())


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_bits_are_those_of_an_update_after_backward(
    tier: str, precision: str, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_DEBUG", "poison")
    changes: dict[str, Any] = {"bf16": {"enabled": precision == "bf16"}, "gradient_accumulation_steps": accumulation}
    runs = []
    for early in (True, False):
        with engine_of(tmp_path, tier, early=early, **changes) as engine:
            losses = train(engine, accumulation=accumulation)
            runs.append((losses, engine.full_state_dict()))
    (losses, weights), (expected, reference) = runs
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert same(weights, reference)


def test_all_but_what_stays_is_updated_before_backward_returns(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        engine.backward(engine(*batch(0)))
        update = engine._loop.update
        assert update is not None
        streamed = [g for g in engine._loop.runtime.sharded.groups if not g.persistent]
        assert update.num_updated == sum(len(group.chunks) for group in streamed) > 4
        engine.step()


def test_gradients_do_not_travel_to_the_store(tmp_path: Path) -> None:
    written = {}
    for early in (True, False):
        with engine_of(tmp_path, "nvme", early=early, bf16={"enabled": True}) as engine:
            train(engine, 6)
            nvme = engine.io_report().as_dict()["nvme"]
            written[early] = sum(sum(nvme[way].values()) for way in ("bytes_read", "bytes_written"))
    assert written[True] <= written[False]


def step_without_update(engine: Engine) -> None:
    engine.set_gradient_accumulation_boundary(False)
    engine.step()


REFUSED: dict[str, Callable[[Engine], object]] = {
    "forward": lambda engine: engine(*batch(1)),
    "backward": lambda engine: engine.backward(torch.ones((), requires_grad=True)),
    "zero_grad": lambda engine: engine.zero_grad(),
    "read a weight": lambda engine: safe_get_full_fp32_param(engine.module.get_parameter("layers.1.weight")),
    "read a gradient": lambda engine: safe_get_full_grad(engine.module.get_parameter("layers.1.weight")),
    "export": lambda engine: engine.full_state_dict(),
    "not a boundary": lambda engine: step_without_update(engine),
}


@pytest.mark.parametrize("call", REFUSED)
def test_between_backward_and_step_nothing_is_looked_at(call: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, early=False) as engine:
        train(engine, 2)
        expected = engine.full_state_dict()
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        engine.backward(engine(*batch(1)))
        with pytest.raises(EngineStateError, match=r"update_in_backward"):
            REFUSED[call](engine)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()  # the step goes on where it stood
        assert same(engine.full_state_dict(), expected)


def _raise_in_backward(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
    def stop(_: torch.Tensor) -> None:
        raise InterruptedError("the user's")

    output.register_hook(stop)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("call", [*REFUSED, "step", "use a weight", "save"])
def test_an_error_in_backward_ends_the_engine_in_the_same_words_whoever_asks(call: str, tmp_path: Path) -> None:
    asks = REFUSED | {
        "step": lambda engine: engine.step(),
        "use a weight": lambda engine: engine.module.get_parameter("layers.1.weight").sum(),
        "save": lambda engine: engine.save_checkpoint(tmp_path / "checkpoints"),
    }
    with engine_of(tmp_path) as engine:
        engine.module.get_submodule("layers.0").register_forward_hook(_raise_in_backward)
        loss = engine(*batch(0))
        with pytest.raises(InterruptedError):
            engine.backward(loss)
        with pytest.raises(EngineStateError, match=r"has failed.*call destroy\(\).*from a checkpoint"):
            asks[call](engine)


def test_a_kept_view_does_not_miss_an_update(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        kept: list[torch.Tensor] = []
        layer = engine.module.get_submodule("layers.2")
        layer.register_forward_hook(lambda layer, *_: kept.append(layer.get_parameter("weight").detach()[0]))
        loss = engine(*batch(0))
        with pytest.raises(WeightsError, match=r"layers\.2\.weight .*view"):
            engine.backward(loss)
        assert kept[0].any()


def write_to_what_stays(engine: Engine) -> None:
    """To a bias of the group that backward comes to last, and that is on the device between steps."""
    with torch.no_grad():
        engine.module.get_parameter("layers.0.bias").add_(1.0)


def test_a_write_that_is_not_kept_is_refused_before_anything_is_updated(tmp_path: Path) -> None:
    with engine_of(tmp_path, early=False) as engine:
        train(engine, 2)
        expected = engine.full_state_dict()
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        loss = engine(*batch(1))
        write_to_what_stays(engine)
        with pytest.raises(WeightsError, match=r"layers\.0\.bias .*changed in place"):
            engine.backward(loss)
        engine.backward(engine(*batch(1)))
        engine.step()
        assert same(engine.full_state_dict(), expected)


def set_a_master(engine: Engine, _: Path) -> None:
    weight = engine.module.get_parameter("layers.0.weight")
    infinity.utils.safe_set_full_fp32_param(weight, torch.ones_like(weight, dtype=torch.float32))


def write_gathered(engine: Engine, _: Path) -> None:
    weight = engine.module.get_parameter("layers.0.weight")
    with infinity.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(1.0)


def load_saved(engine: Engine, directory: Path) -> None:
    engine.save_checkpoint(directory / "saved")
    engine.load_checkpoint(directory / "saved")


@pytest.mark.parametrize("write", [set_a_master, write_gathered, load_saved])
def test_a_write_between_forward_and_backward_is_refused_before_anything_is_updated(
    write: Callable[[Engine, Path], None], tmp_path: Path
) -> None:
    with engine_of(tmp_path, early=False) as engine:
        train(engine, 1)
        write(engine, tmp_path)
        engine.backward(engine(*batch(1)))
        engine.step()
        expected = engine.full_state_dict()
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        loss = engine(*batch(1))
        write(engine, tmp_path)
        with pytest.raises(WeightsError, match=r"layers\.\d\.weight is needed .* forward again"):
            engine.backward(loss)
        engine.backward(engine(*batch(1)))
        engine.step()
        assert same(engine.full_state_dict(), expected)


def change_the_rate(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] = 0.5


def give_the_rate_back(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] = 0.01


@pytest.mark.parametrize(
    ("change", "words", "remedy"),
    [
        pytest.param(write_to_what_stays, r"layers\.0\.bias .*changed in place", lambda _: None, id="a write"),
        pytest.param(change_the_rate, "after step", give_the_rate_back, id="an option"),
    ],
)
def test_a_step_that_is_refused_may_be_called_again(
    change: Callable[[Engine], None], words: str, remedy: Callable[[Engine], None], tmp_path: Path
) -> None:
    with engine_of(tmp_path, early=False) as engine:
        train(engine, 3)
        expected = engine.full_state_dict()
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        engine.backward(engine(*batch(1)))
        change(engine)
        with pytest.raises((WeightsError, EngineStateError), match=words):
            engine.step()
        remedy(engine)
        engine.step()
        engine.backward(engine(*batch(2)))
        engine.step()
        assert same(engine.full_state_dict(), expected)


def test_a_gradient_after_the_update_is_refused(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        inputs = batch(0)[0].requires_grad_()
        with pytest.raises(EngineStateError, match="re-entrant"):
            engine.backward(engine(inputs, True, True))


def test_a_backward_that_keeps_its_graph_is_updated_after_it(tmp_path: Path) -> None:
    weights = []
    for early in (True, False):
        with engine_of(tmp_path, early=early) as engine:
            loss = engine(*batch(0))
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
            weights.append(engine.full_state_dict())
    assert same(*weights)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "check_grad_overflow"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast"),
        ({"zero_optimization": {"stage": 2}}, "stages below 3"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}, "whole"),
    ],
)
def test_what_needs_all_gradients_first_is_refused(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word) as caught, engine_of(tmp_path, **changes):
        pass
    assert (caught.value.key, caught.value.value) == ("io_daemon.update_in_backward", True)


@pytest.mark.parametrize("call", ["clip_grad_norm_", "get_global_grad_norm"])
def test_a_norm_is_refused(call: str, tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine, pytest.raises(ConfigError, match="norm") as caught:
        getattr(engine, call)(*([1.0] if call == "clip_grad_norm_" else []))
    assert caught.value.key == "io_daemon.update_in_backward"


class Own(torch.optim.SGD):
    """Somebody's own, by its class."""


def test_somebodys_own_optimizer_is_refused(tmp_path: Path) -> None:
    model = Net()
    config = {name: value for name, value in config_of(tmp_path, "none", early=True).items() if name != "optimizer"}
    with pytest.raises(ConfigError, match="look at what is changed after backward: write false") as caught:
        infinity.initialize(model=model, optimizer=Own(model.parameters(), lr=0.1), config=config)
    assert caught.value.key == "io_daemon.update_in_backward"


def rank_main(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    try:
        runs = []
        for early in (True, False):
            with engine_of(Path(directory), early=early) as engine:
                losses = []
                for step in range(NUM_STEPS):
                    inputs, _ = batch(2 * step + rank)
                    loss = engine(inputs)
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.detach())
                runs.append((torch.stack(losses), engine.full_state_dict()))
        assert torch.equal(runs[0][0], runs[1][0])
        assert same(runs[0][1], runs[1][1])
    finally:
        dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    call_on_ranks(rank_main, tmp_path, num_ranks=2)


def test_an_order_that_foresees_a_second_backward_asks_for_nothing_that_is_updated() -> None:
    """The pass before had two backwards through one graph; the next one has one, which updates."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    layers[1].requires_grad_(False)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 72}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {**zero, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 200},
        "io_daemon": {"update_in_backward": True},
    }
    with infinity.initialize(model=layers, config=config)[0] as engine:
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
        assert engine.global_steps == 3
