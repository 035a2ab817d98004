"""Engines as DeepSpeed's users make and ask them: one after the other, without an optimizer, by others' boundaries."""

from __future__ import annotations

import argparse
import base64
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.deepspeed import utils
from infinity.deepspeed.questions import ABSENT, OF_CONFIG, OF_ZERO
from infinity.errors import ConfigError, EngineStateError, WeightsError
from tests.support.ranks import run_ranks

Config = dict[str, Any]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64))


def _batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, generator=generator) for _ in range(count)]


def _config(stage: int = 3, **others: Any) -> Config:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 200},
        **others,
    }


def _on_nvme(directory: Path) -> Config:
    place = {"device": "nvme", "nvme_path": str(directory)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 200, "offload_param": place, "offload_optimizer": place}
    return {"zero_optimization": zero, "io_daemon": {"host_budget_bytes": 64 << 20}}


def _start(model: nn.Module, config: Config) -> Any:
    return deepspeed.initialize(model=model, config=config)[0]


def _train(engine: Any, batches: list[Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = engine(batch.to(next(engine.module.parameters()).dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_goes_from_engine_to_engine_with_what_it_has_learnt(stage: int, bf16: bool) -> None:
    _go_over(_config(stage, bf16={"enabled": bf16}))


def test_it_does_from_nvme_to_nvme(tmp_path: Path) -> None:
    _go_over(_config(bf16={"enabled": True}) | _on_nvme(tmp_path))
    assert not list(tmp_path.iterdir())


def test_weights_on_nvme_go_with_the_last_who_refers_to_the_model(tmp_path: Path) -> None:
    engine = _start(_net(), _config() | _on_nvme(tmp_path))
    engine.destroy()
    assert list(tmp_path.glob("*-init-*"))
    del engine
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_keeps_its_weights_when_its_engine_was_let_go_of(stage: int) -> None:
    """As Lightning's strategies do between ``fit`` and ``test``; it could be used no more."""
    batches = _batches(4)
    whole = _start(_net(), _config(stage))
    expected = _train(whole, batches)
    model: Any = _net()
    engine = _start(model, _config(stage))
    state = engine.optimizer.state
    losses = _train(engine, batches[:2])
    assert all(param.partition_numel() == param.numel() for param in model.parameters() if stage == 3)
    del engine
    gc.collect()
    assert (len(state), list(state.items()), model[0].weight in state) == (0, [], False)
    with torch.no_grad():
        output = model(batches[0])
    assert torch.equal(model(batches[0]), output)
    assert losses + _train(_start(model, _config(stage)), batches[2:]) == expected


class _Hiding(nn.Module):
    """Shows an optimizer nothing that is frozen, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return iter([("only", self)])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter([(f"only.{name}", param) for name, param in self.head.named_parameters()])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.base(x)
        return self.head.forward(hidden)


def test_what_a_model_hides_is_found_where_it_is_registered() -> None:
    model = _Hiding()
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == [model.base, model.head]
    assert utils.z3_leaf_module(model.head)
    assert utils.unset_z3_leaf_modules(model, [nn.Linear]) == [model.base, model.head]
    first = _start(model, _config(0))
    assert set(first.module_state_dict(exclude_frozen_parameters=True)) == {"head.weight", "head.bias"}
    model.named_parameters = lambda *args, **kwargs: iter([])  # type: ignore[method-assign]
    assert first.holds(model)
    del model.named_parameters
    first.destroy()


def _go_over(config: Config) -> None:
    """The same losses as in one engine: evaluated before, given to a second engine while the first one lives, to a
    third after the second one's end."""
    batches = _batches(6)
    whole = _start(_net(), config)
    expected = _train(whole, batches)
    whole.destroy(keep_weights=False)
    model = _net()
    evaluating = _start(model, {key: value for key, value in config.items() if key != "optimizer"}).eval()
    with torch.no_grad():
        evaluating(batches[0].to(next(model.parameters()).dtype))
    model.train()
    first = _start(model, config)
    losses = _train(first, batches[:2])
    second = _start(model, config)
    losses += _train(second, batches[2:4])
    second.destroy()
    third = _start(model, config)
    losses += _train(third, batches[4:])
    assert losses == expected
    third.destroy(keep_weights=False)
    with pytest.raises(WeightsError, match="after its engine ended"):
        model(batches[0])


RANKS = """
import json, os, torch
import infinity.deepspeed as deepspeed
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
batches = [torch.randn(4, 64, generator=generator) for _ in range(4)]

def train(engine, batches):
    losses = []
    for batch in batches:
        loss = engine(batch).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses

expected = train(deepspeed.initialize(model=net(), config=config)[0], batches)
model = net()
first = deepspeed.initialize(model=model, config=config)[0]
losses = train(first, batches[:2])
first.destroy()
losses += train(deepspeed.initialize(model=model, config=config)[0], batches[2:])
print(json.dumps([expected, losses, deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()]))
"""


def test_two_ranks_hand_a_model_over_together(tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks(RANKS, tmp_path, num_ranks=2)):
        expected, losses, found_rank, world_size = ended.answer
        assert losses == expected
        assert (found_rank, world_size) == (rank, 2)


def test_ranks_hand_over_together_what_a_library_still_holds_on_one_of_them(tmp_path: Path) -> None:
    """A thread of gloo's lets go of what it has gathered when it gets to it: what is staged must not depend on that."""
    holding = """
from infinity.tiers.collectives import Collectives
held, gather = [], Collectives.all_gather

def holding(collectives, output, shard):
    gather(collectives, output, shard)
    if os.environ["RANK"] == "1":
        held.append(output)

Collectives.all_gather = holding
first.destroy()
"""
    script = RANKS.replace("first.destroy()\n", holding).replace(
        '"stage3_param', '"stage3_prefetch_bucket_size": 64, "stage3_param'
    )
    for ended in run_ranks(script, tmp_path, num_ranks=2):
        expected, losses, *_ = ended.answer
        assert losses == expected


def test_ranks_hand_back_together_what_they_have_let_go_of(tmp_path: Path) -> None:
    """Several at once, of which one cannot be on one rank alone: a view of its weights is kept there."""
    letting_go = """
import gc
others = [net() for _ in range(3)]
engines = [deepspeed.initialize(model=other, config=config)[0] for other in others]
for engine in engines:
    train(engine, batches[:1])
kept = []
if os.environ["RANK"] == "1":
    others[1][0].register_forward_hook(lambda module, *_: kept.append(module.weight.view(-1)))
with torch.no_grad():
    engines[1](batches[0])
del engine, engines, first
gc.collect()
"""
    script = RANKS.replace("first.destroy()\n", letting_go)
    script = script.replace("print(json", "others[0](batches[0]), others[2](batches[0])\nprint(json")
    for ended in run_ranks(script, tmp_path, num_ranks=2):
        expected, losses, *_ = ended.answer
        assert losses == expected
        assert "handed back: " in ended.errors


def test_without_an_optimizer_it_evaluates_and_says_what_training_needs() -> None:
    batch = _batches(1)[0]
    expected = _net()(batch)
    engine = deepspeed.init_inference(_net(), zero={"stage": 3}, dtype=torch.float32)
    assert engine.optimizer is None
    assert not engine.training
    assert torch.equal(engine(batch), expected)
    with pytest.raises(EngineStateError, match=r"backward\(\) needs an optimizer, .* prepare\(model, optimizer\)"):
        engine.backward(engine(batch).sum())
    engine.destroy()
    for name, value in (("mp_size", 2), ("replace_with_kernel_inject", True), ("tensor_parallel", {"tp_size": 2})):
        with pytest.raises(ConfigError, match=name):
            deepspeed.init_inference(_net(), **{name: value})
    with pytest.raises(ConfigError, match="int8"):
        deepspeed.init_inference(_net(), dtype="int8")


def test_micro_batches_are_the_callers_where_it_sets_boundaries() -> None:
    """As Accelerate does: a boundary before every backward, steps on boundaries alone, an epoch's end in between."""
    config, batches = _config(gradient_accumulation_steps=4), _batches(7)
    model = _net()
    engine = _start(model, config)
    reference = _net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-1)
    for number, batch in enumerate(batches):
        is_boundary = number in (3, 6)
        engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        loss = engine(batch).pow(2).mean()
        engine.backward(loss / 4, scale_wrt_gas=False)
        (reference(batch).pow(2).mean() / 4).backward()
        if is_boundary:
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
    weights = engine.full_state_dict()
    assert {name for name, value in reference.state_dict().items() if not torch.equal(weights[name], value)} == set()
    assert engine.global_steps == 2
    engine.destroy()


def test_the_engine_answers_as_deepspeeds_does() -> None:
    config = _config(stage=3, gradient_clipping=0.5)
    engine = _start(_net(), config)
    for kind in (deepspeed.DeepSpeedEngine, infinity.Engine, nn.Module):
        assert isinstance(engine, kind), kind
    assert engine.config == config
    assert engine.config["zero_optimization"]["stage"] == engine.zero_optimization_stage() == 3
    assert engine.settings.gradient_clipping == engine.gradient_clipping() == 0.5
    assert engine._config.zero_config.stage == 3
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("SGD", None)
    assert engine.optimizer_params() == {"lr": 0.1}
    assert (engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert engine.communication_data_type is torch.float32
    assert engine.get_mom() == [0.0]
    assert not engine.zero_cpu_offload()
    assert engine.zero_optimization_partition_weights()
    for name in (*OF_ZERO, *OF_CONFIG):
        assert name in dir(engine)
        getattr(engine, name)()
    for name, why in ABSENT.items():
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match="infinity's engine has no") as caught:
            getattr(engine, name)
        assert why in str(caught.value)
    assert not hasattr(engine, "nothing_such")
    assert engine.append == engine.module.append  # what it lacks is the module's
    engine.destroy()


def test_configurations_come_from_arguments_files_and_old_names(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(_config()))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    encoded = base64.urlsafe_b64encode(path.read_bytes()).decode()
    ways: list[dict[str, Any]] = [{"args": args}, {"config": str(path)}, {"config": path, "args": args}]
    for given in (*ways, {"config_params": _config()}, {"config": encoded}):
        engine = deepspeed.initialize(model=_net(), **given)[0]
        assert engine.config == _config()
        engine.destroy()
    with pytest.raises(ConfigError, match="pass a dict or a path"):
        deepspeed.initialize(model=_net())
    for name in ("deep", "none.json"):  # the first is base64, too
        with pytest.raises(ConfigError, match=f"config = '{name}': cannot be read: No such file"):
            deepspeed.initialize(model=_net(), config=name)
    with pytest.raises(ConfigError, match="differ: pass one of them"):
        deepspeed.initialize(model=_net(), args=args, config=_config(stage=2))
    with pytest.raises(ConfigError, match="mpu = 'object': there is no model parallelism"):
        deepspeed.initialize(model=_net(), config=_config(), mpu=object())


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [
        ("tensor_model_parallel", 2, r"mpu\.get_tensor_model_parallel_world_size\(\) = 2: there is no model"),
        ("pipe_parallel", 2, r"mpu\.get_pipe_parallel_world_size\(\) = 2: there is no model parallelism"),
        ("sequence_parallel", 4, r"mpu\.get_sequence_parallel_world_size\(\) = 4: there is no model parallelism"),
        ("data_parallel", 3, r"mpu\.get_data_parallel_world_size\(\) = 3: all of the 1 ranks share the model"),
    ],
)
def test_an_object_for_model_parallelism_may_not_split_the_model(kind: str, size: int, told: str) -> None:
    """One by which every rank has the whole model changes nothing: differential/published.py."""
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
    setattr(mpu, f"get_{kind}_world_size", lambda: size)
    with pytest.raises(ConfigError, match=told):
        deepspeed.initialize(model=_net(), config=_config(), mpu=mpu)
    with pytest.raises(ConfigError, match=told), deepspeed.zero.Init(config_dict_or_path=_config(), mpu=mpu):
        _net()
    with pytest.raises(ConfigError, match=told):
        deepspeed.runtime.utils.clip_grad_norm_(_net().parameters(), 1.0, mpu=mpu)


def test_a_late_refusal_is_the_one_that_is_read() -> None:
    """The engine was made by then, and its end, before it knew its configuration, was an AttributeError instead."""
    model = _net()
    with pytest.raises(TypeError, match="has no len"):
        deepspeed.initialize(model=model, config=_config(), training_data=iter("ab"))
    engine = _start(model, _config())
    engine.destroy()


def test_what_is_passed_goes_before_the_configuration() -> None:
    scheduler = {"type": "WarmupLR", "params": {}}
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=_net(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5),
        config=_config(scheduler=scheduler),
    )
    assert optimizer is engine.optimizer
    assert engine.get_lr() == [0.25]
    assert isinstance(schedule, torch.optim.lr_scheduler.ConstantLR)
    assert isinstance(engine.basic_optimizer, torch.optim.AdamW)
    engine.destroy()
    with pytest.raises(ConfigError, match="is what the function returned"):
        deepspeed.initialize(model=_net(), optimizer=lambda params: None, config=_config())


def test_micro_steps_count_the_calls_of_this_engine(tmp_path: Path) -> None:
    config = _config(gradient_accumulation_steps=2)
    engine = _start(_net(), config)
    _train(engine, _batches(4))
    assert (engine.micro_steps, engine.global_steps) == (4, 2)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    resumed = _start(_net(), config)
    path, _ = resumed.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step2")
    assert (resumed.micro_steps, resumed.global_steps) == (0, 2)
    assert resumed.save_16bit_model(tmp_path / "out") is False
    resumed.destroy()


def test_a_load_rewinds_random_numbers_where_a_training_is_resumed_and_nowhere_else(tmp_path: Path) -> None:
    first = _start(_net(), _config())
    _train(first, _batches(1))
    first.save_checkpoint(tmp_path)
    state = torch.get_rng_state()
    torch.rand(1)
    drawn = torch.get_rng_state()
    first.load_checkpoint(tmp_path)  # as the Trainer loads the best model
    assert torch.equal(torch.get_rng_state(), drawn)
    first.destroy(keep_weights=False)
    for words, expected in (({"load_optimizer_states": False}, drawn), ({}, state)):
        resumed = _start(_net(), _config())
        torch.set_rng_state(drawn)
        resumed.load_checkpoint(tmp_path, **words)
        assert torch.equal(torch.get_rng_state(), expected)
        resumed.destroy(keep_weights=False)


def test_an_engine_that_was_destroyed_names_the_line_that_the_trainer_needs() -> None:
    """Accelerate destroys it, and Transformers' Trainer goes on with it in its next ``train()``."""
    model = _net()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.destroy()
    with pytest.raises(EngineStateError, match=r"trainer\.model_wrapped = trainer\.model before trainer\.train"):
        engine(torch.ones(1, 64))
    again = deepspeed.initialize(model=model, config=config)[0]
    assert again(torch.ones(1, 64)).shape == (1, 64)
    again.destroy(keep_weights=False)
    with pytest.raises(EngineStateError, match="build the model anew"):
        again(torch.ones(1, 64))


def test_steps_behind_a_coalesced_block_update(one_thread: None) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(8, 8), config=config)
    before = engine.full_state_dict()
    with engine.coalesce_grad_reduction():
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    assert engine.global_steps == 1
    assert not torch.equal(engine.full_state_dict()["weight"], before["weight"])
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    assert engine.global_steps == 2
    engine.destroy()


def test_a_loader_begins_anew_after_a_load_as_deepspeeds_does(tmp_path: Path) -> None:
    """Its documentation: ``dataloader_to_step(data_loader, step + 1)``."""

    def start() -> Any:
        data = torch.utils.data.TensorDataset(torch.cat(_batches(6)))
        return deepspeed.initialize(model=_net(), config=_config(2), training_data=data)[0]

    engine, batches = start(), []
    for step, (batch,) in enumerate(engine.training_dataloader):
        batches.append(batch)
        _train(engine, [batch])
        if step == 2:
            engine.save_checkpoint(tmp_path, client_state={"step": step})
    engine.destroy()
    engine = start()
    _, state = engine.load_checkpoint(tmp_path)
    loader = iter(engine.training_dataloader)
    for _ in range(state["step"] + 1):
        next(loader)
    assert all(torch.equal(batch, other) for (batch,), other in zip(loader, batches[3:], strict=True))
    engine.destroy()
