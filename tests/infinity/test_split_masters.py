"""Master weights that the store has as weight and rest: the bits of whole ones, fewer bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Engine
from infinity.errors import ConfigError, EngineStateError
from infinity.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from infinity.zero import GatheredParameters
from io_daemon.rank.client import Client
from io_daemon.shared.protocol import ChunkSpec, ObjectKind
from tests.support.reference import differing_bits

WIDTH = 128
MOMENTS = ("exp_avg", "exp_avg_sq")


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A layer whose weights do not change, since its learning rate is 0, and others whose do."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = torch.tanh(self.still(inputs.to(self.still.weight.dtype)))
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs.float().square().mean()


def ties(shape: torch.Size, seed: int) -> torch.Tensor:
    """fp32 values halfway between two of bf16, some of them beside it, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    upper = (torch.randn(shape, generator=generator) * 0.1).view(torch.int32) & ~0xFFFF
    beside = torch.randint(-1, 2, shape, generator=generator, dtype=torch.int32)
    return (upper + 0x8000 + torch.where(torch.rand(shape, generator=generator) < 0.2, beside, 0)).view(torch.float32)


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))


@contextmanager
def engine_of(
    directory: Path,
    masters: str,
    tier: str = "nvme",
    *,
    optimizer: Any = "AdamW",
    zero: Any = MappingProxyType({}),
    **changes: Any,
) -> Iterator[Engine]:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(ties(param.shape, seed))
    offload = {"device": tier} | ({"nvme_path": str(directory)} if tier == "nvme" else {})
    still, moving = list(model.still.parameters()), list(model.layers.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}} if isinstance(optimizer, str) else None,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 16384,
            "stage3_param_persistence_threshold": WIDTH,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "offload_param": offload,
            "offload_optimizer": offload,
            **zero,
        },
        **changes,
    }
    config["io_daemon"] = {
        "master_weights": masters,
        "host_budget_bytes": (1 << 20) if tier == "nvme" else (8 << 20),
    } | changes.get("io_daemon", {})
    groups = [{"params": still, "lr": 0.0}, {"params": moving}]
    given = {"model_parameters": groups} if isinstance(optimizer, str) else {"optimizer": optimizer(groups)}
    if not isinstance(optimizer, str):
        del config["optimizer"]
    engine, *_ = infinity.initialize(model=model, config=config, **given)
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Engine, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights, masters and moments by name."""
    found = {f"weight {name}": value for name, value in engine.full_state_dict().items()}
    for name, param in engine.module.named_parameters():
        found[f"master {name}"] = safe_get_full_fp32_param(param)
        found |= {f"{label} {name}": safe_get_full_optimizer_state(param, label) for label in MOMENTS}
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and not any(differing_bits(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize(
    ("tier", "when"), [("none", "on_use"), ("cpu", "in_step"), ("nvme", "on_use"), ("nvme", "in_backward")]
)
def test_the_bits_are_those_of_whole_masters(
    tier: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_DEBUG", "poison")
    section = {"update_in_backward": True} if when == "in_backward" else {"update": when}
    runs = []
    for masters in ("split", "fp32"):
        with engine_of(tmp_path, masters, tier, io_daemon=section) as engine:
            losses = train(engine, range(5))
            runs.append({"losses": torch.stack(losses), **everything(engine)})
    assert same(*runs)
    still = runs[0]["master still.weight"]
    assert same({"still": still}, {"still": ties(still.shape, 0)}), "and the ties are still ties"


def test_two_hundred_steps_with_ties_written_in_between(tmp_path: Path) -> None:
    runs = []
    for masters in ("split", "fp32"):
        with engine_of(tmp_path, masters) as engine:
            losses = []
            for step in range(0, 200, 20):
                losses += train(engine, range(step, step + 20))
                for number, (name, param) in enumerate(engine.module.named_parameters()):
                    if name.startswith("layers.0"):
                        safe_set_full_fp32_param(param, ties(param.shape, step + number))
            runs.append({"losses": torch.stack(losses), **everything(engine)})
    assert same(*runs)


def rewrite(engine: Engine) -> None:
    """Everything that a user may write, of some parameters."""
    params = dict(engine.module.named_parameters())
    first, second = params["layers.0.weight"], params["layers.1.weight"]
    safe_set_full_fp32_param(first, ties(first.shape, 5))
    safe_set_full_optimizer_state(first, torch.full(first.shape, 0.5), "exp_avg_sq")
    safe_set_full_optimizer_state(second, torch.full(second.shape, -0.5), "exp_avg")
    with GatheredParameters(second, modifier_rank=0):
        second.data.mul_(2)
    last = params["layers.2.weight"]
    with GatheredParameters(last, modifier_rank=0):
        engine.module.load_state_dict({"layers.2.weight": ties(last.shape, 6)}, strict=False)


def test_what_the_user_writes_is_what_is_read_and_trained(tmp_path: Path) -> None:
    runs = []
    for masters in ("split", "fp32"):
        with engine_of(tmp_path, masters) as engine:
            train(engine, range(2))
            rewrite(engine)
            written = everything(engine)
            params = dict(engine.module.named_parameters())
            assert torch.equal(written["master layers.0.weight"], ties(params["layers.0.weight"].shape, 5))
            assert bool((written["exp_avg_sq layers.0.weight"] == 0.5).all())
            losses = train(engine, range(2, 4))
            runs.append({"losses": torch.stack(losses), **everything(engine)})
            runs[-1] |= {f"written {name}": value for name, value in written.items()}
    assert same(*runs)


def test_a_negative_second_moment_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with engine_of(tmp_path, "split", "none") as engine:
        train(engine, range(1))
        param = engine.module.get_parameter("layers.0.weight")
        before = everything(engine)
        with pytest.raises(ValueError, match="master_weights"):
            safe_set_full_optimizer_state(param, torch.full(param.shape, -1.0), "exp_avg_sq")
        assert same(everything(engine), before)


@pytest.mark.parametrize(("source", "target"), [("split", "fp32"), ("fp32", "split")])
def test_checkpoints_know_nothing_of_it(source: str, target: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, source) as engine:
        train(engine, range(2))
        saved = everything(engine)
        engine.save_checkpoint(str(tmp_path / "checkpoint"), asynchronous=source == "split")
        losses = train(engine, range(2, 4))
        engine.wait_for_checkpoint()
        expected = everything(engine)
    with engine_of(tmp_path, target) as engine:
        train(engine, range(7, 8))
        engine.load_checkpoint(str(tmp_path / "checkpoint"))
        assert same(everything(engine), saved)
        assert torch.equal(torch.stack(train(engine, range(2, 4))), torch.stack(losses))
        assert same(everything(engine), expected)


def test_fewer_bytes_are_kept_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, kept, of_masters = {}, {}, {"split": 0, "fp32": 0}
    register = Client.register

    def counted(client: Client, specs: Sequence[ChunkSpec], **words: Any) -> range:
        of_masters[masters] += sum(spec.object_bytes[ObjectKind.MASTER] for spec in specs)
        return register(client, specs, **words)

    monkeypatch.setattr(Client, "register", counted)
    for masters in ("split", "fp32"):
        with engine_of(tmp_path, masters) as engine:
            train(engine, range(4))
            before = engine.io_report().nvme_total
            train(engine, range(4, 12))
            report = engine.io_report()
            assert before is not None
            assert report.nvme_total is not None
            moved[masters], kept[masters] = report.nvme_total.since(before), report.swap_bytes
    assert kept["fp32"] / kept["split"] == pytest.approx(16 / 14, rel=0.02)
    assert moved["split"].total_bytes < 0.97 * moved["fp32"].total_bytes
    assert of_masters["split"] == pytest.approx(of_masters["fp32"] / 2, rel=0.02)


def test_masters_without_ties_leave_the_moments_unwritten_at_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    written = {}
    for masters in ("split", "fp32"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).bfloat16().float() for _ in range(32)))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
                "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
            },
            "io_daemon": {"master_weights": masters, "host_budget_bytes": 1 << 20},
        }
        engine, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=config)
        try:
            engine(torch.zeros(1, WIDTH).bfloat16())
            total = engine.io_report().nvme_total
            assert total is not None
            written[masters] = total.bytes_written
        finally:
            engine.destroy()
    assert written["split"]["exp_avg_sq"] == written["fp32"]["exp_avg_sq"] == 0
    assert written["split"]["master"] > 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
        ({"zero_optimization": {"stage": 2}}, "stages below 3"),
        ({"optimizer": "Lion"}, "Lion"),
        ({"optimizer": "SGD"}, "SGD"),
        ({"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)}, "SGD"),
    ],
)
def test_what_has_no_halves_is_refused(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word) as caught, engine_of(tmp_path, "split", **changes):
        pass
    assert (caught.value.key, caught.value.value) == ("io_daemon.master_weights", "split")
    assert '"fp32"' in caught.value.remedy


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-3, initial_accumulator_value=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_with_a_state_that_is_never_negative(name: str, tmp_path: Path) -> None:
    runs = []
    for masters in ("split", "fp32"):
        with engine_of(tmp_path, masters, "none", optimizer=OPTIMIZERS[name]) as engine:
            losses = train(engine, range(3))
            engine.offload_states()
            engine.reload_states()
            runs.append({"losses": torch.stack(losses), **engine.full_master_state_dict()})
    assert same(*runs)


def test_an_engine_that_only_evaluates_has_masters_as_they_are(tmp_path: Path) -> None:
    weights = []
    for masters in ("split", "fp32"):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "io_daemon": {"master_weights": masters},
        }
        engine, *_ = infinity.initialize(model=Net().requires_grad_(False), config=config)
        weights.append({"loss": engine(batch(0)), **engine.full_state_dict()})
        engine.destroy()
    assert same(*weights)


def test_nothing_is_leased_once_a_sign_that_is_needed_is_lost(tmp_path: Path) -> None:
    class Negative(torch.optim.AdamW):
        """Its second moment changes its sign after the steps that are watched."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for state in self.state.values():
                if state["step"] > 8:
                    state["exp_avg_sq"].neg_()

    with engine_of(tmp_path, "split", "none", optimizer=lambda groups: Negative(groups, lr=0.0)) as engine:
        with pytest.raises(ConfigError, match="negative"):
            train(engine, range(12))
        with pytest.raises(EngineStateError, match="has failed"):
            engine(batch(0))
