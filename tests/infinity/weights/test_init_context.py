"""The ways in which the dialect calls ``Init``: without a configuration, around a module that is there, in a dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, WeightsError
from infinity.tiers.collectives import Collectives
from infinity.weights.access import ShardedParameter
from infinity.weights.staging import StagingArea, staged_param
from tests.support.ranks import run_script

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _build() -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(16, 32), nn.Linear(32, 16)
    last.register_parameter("tied", first.get_parameter("weight"))
    return nn.Sequential(first, nn.Tanh(), last)


def _trained(model: nn.Module, **keys: Any) -> dict[str, torch.Tensor]:
    engine, *_ = infinity.initialize(model=model, config={**CONFIG, **keys})
    dtype = next(model.parameters()).dtype
    for step in range(3):
        batch = torch.randn(2, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    weights: dict[str, torch.Tensor] = engine.full_state_dict()
    engine.destroy()
    return weights


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_without_a_configuration() -> None:
    with infinity.Init():
        model = _build()
    assert all(isinstance(param, ShardedParameter) for param in model.parameters())
    assert _same(_trained(model), _trained(_build()))


def test_what_gets_its_memory_after_it_was_made_is_staged() -> None:
    """By ``skip_init`` as soon as it belongs to another module, else when the context ends."""
    with infinity.Init(CONFIG):
        layer: nn.Linear = nn.utils.skip_init(nn.Linear, 16, 32)  # type: ignore[no-untyped-call]
        model = nn.Sequential(layer, nn.Tanh(), nn.Linear(32, 16))
        assert all(staged_param(param) is not None for param in layer.parameters())
        alone = nn.Linear(8, 8, device="meta").to_empty(device="cpu")
        without = nn.Linear(8, 8, device="meta")
        for param in (layer.weight, alone.weight):
            nn.init.ones_(param)
    assert all(isinstance(param, ShardedParameter) for param in (*model.parameters(), *alone.parameters()))
    assert without.weight.is_meta
    assert (layer.weight.sum().item(), alone.weight.sum().item()) == (16 * 32.0, 64.0)


def test_a_process_group_has_two_names() -> None:
    group: Any = object()
    for given in (
        {"process_group": group},
        {"data_parallel_group": group},
        {"process_group": group, "data_parallel_group": group},
    ):
        assert infinity.Init(**given)._process_group is group
    assert infinity.Init()._process_group is None


BEHIND_IT = """
import sys
import torch.distributed as dist
import infinity
from tests.infinity.weights.test_init_context import CONFIG, _build, _same, _trained

def begin():
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)

begins_first, expected = sys.argv[2] == "True", _trained(_build())
if begins_first:
    begin()
with infinity.Init(CONFIG):
    model = _build()
dist.destroy_process_group() if begins_first else begin()
assert _same(_trained(model), expected)
"""


@pytest.mark.parametrize("begins_first", [False, True])
def test_a_process_group_of_one_rank_may_begin_or_end_behind_it(begins_first: bool, tmp_path: Path) -> None:
    """As ``deepspeed.initialize`` begins one, of scripts that begin none. In a process that has none yet."""
    ended = run_script(BEHIND_IT, tmp_path, str(tmp_path), str(begins_first))
    assert ended.code == 0, ended.errors


def test_what_is_used_after_it_goes_back_at_once() -> None:
    """Nothing is under construction any more: no memory waits for the constructor's next look."""
    with infinity.Init(config_dict_or_path=CONFIG):
        model = _build()
        assert not isinstance(next(model.parameters()), ShardedParameter), "as many stay as fit"
    assert float(next(model.parameters()).detach().abs().sum()) > 0
    assert float((next(model.parameters()) * 2).detach().sum()) != 0
    assert all(isinstance(param, ShardedParameter) for param in model.parameters())


def test_where_it_cannot_begin_the_ranks_part_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    parted: list[Collectives] = []
    part = Collectives.close

    def close(collectives: Collectives) -> None:
        parted.append(collectives)
        part(collectives)

    monkeypatch.setattr(Collectives, "close", close)
    with pytest.raises(ConfigError, match="stage"), infinity.Init({"zero_optimization": {"stage": 7}}):
        raise AssertionError("it has begun")
    assert len(parted) == 1
    assert not isinstance(nn.Linear(2, 2).weight, ShardedParameter)
    with infinity.Init():
        model = _build()
    assert _same(_trained(model), _trained(_build()))


def test_by_its_old_name() -> None:
    with infinity.Init(config=CONFIG):
        model = _build()
    assert _same(_trained(model), _trained(_build()))
    with pytest.raises(ConfigError, match="is an old name of config_dict_or_path"):
        infinity.Init(CONFIG, config=CONFIG)


def test_a_module_that_is_built_already_is_staged_at_once(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {**CONFIG["zero_optimization"], "offload_param": offload}
    model = _build()
    params = list(model.parameters())
    infinity.Init(module=model, config_dict_or_path={**CONFIG, "zero_optimization": zero})
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]
    assert all(isinstance(param, ShardedParameter) for param in params)
    assert _same(_trained(model, zero_optimization=zero), _trained(_build()))


def test_in_a_dtype() -> None:
    with infinity.Init(dtype=torch.bfloat16):
        model = _build()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    torch.manual_seed(0)
    layer = nn.Linear(16, 32).to(torch.bfloat16)
    infinity.Init(module=layer, dtype=torch.float32)
    assert layer.weight.dtype is torch.float32
    bf16 = {"bf16": {"enabled": True}}
    assert _same(_trained(model, **bf16), _trained(_in_bfloat16(), **bf16))
    with pytest.raises(ConfigError, match="must be a floating-point dtype"):
        infinity.Init(dtype=torch.int8)


def _in_bfloat16() -> nn.Module:
    """As constructors fill parameters that are in bf16 from the beginning."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return _build()
    finally:
        torch.set_default_dtype(torch.float32)


def test_disabled_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collectives, "join", None)
    with infinity.Init(enabled=False) as context:
        model = _build()
    assert isinstance(context, infinity.Init)
    infinity.Init(module=model, enabled=False)
    assert not any(isinstance(param, ShardedParameter) for param in model.parameters())


def test_a_module_that_was_built_before_has_its_parameters_named_where_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    adopt = StagingArea.adopt

    def noting(area: StagingArea, param: nn.Parameter, name: str) -> None:
        names.append(name)
        adopt(area, param, name)

    monkeypatch.setattr(StagingArea, "adopt", noting)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False)))
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    infinity.Init(module=model)
    assert names == ["Sequential.scale", "Linear.0.0.weight"]


def test_the_dialects_other_arguments_say_what_the_configuration_says(tmp_path: Path) -> None:
    nvme = {"stage": 3, "offload_param": {"nvme_path": str(tmp_path)}}
    with infinity.Init({"zero_optimization": nvme}, remote_device="nvme", mem_efficient_linear=False, mpu=None) as init:
        model = _build()
    assert init.config.zero_optimization.offload_param.device == "nvme"
    assert _same(_trained(model), _trained(_build()))
    with infinity.Init(remote_device="cpu", data_parallel_group=None) as init:
        _build()
    assert init.config.zero_optimization.offload_param.device == "cpu"


@pytest.mark.parametrize(
    ("arguments", "key", "remedy"),
    [
        ({"remote_device": "cuda"}, "remote_device", "one of none, cpu, nvme"),
        ({"remote_device": "cpu", "config": {"zero_optimization": {"offload_param": {"device": "nvme"}}}},
         "remote_device", "contradicts zero_optimization.offload_param.device = 'nvme'"),
        ({"pin_memory": True}, "pin_memory", "nothing is offloaded"),
        ({"remote_device": "cpu", "config": {"zero_optimization": 3}}, "remote_device", "as an object"),
        ({"remote_device": "cpu", "config": {"zero_optimization": {"offload_param": 1}}}, "remote_device", "an object"),
        ({"config": {}, "config_dict_or_path": {}}, "config", "old name"),
        ({"dtype": torch.int32}, "dtype", "floating-point"),
        ({"process_group": object(), "data_parallel_group": object()}, "data_parallel_group", "another group"),
        ({"mpu": object()}, "mpu", "process_group"),
        ({"zero_param_parallel_group": object()}, "zero_param_parallel_group", "ZeRO\\+\\+ is not built"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights", "communication is exact"),
        ({"zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights", "is exact"),
        ({"sequence_data_parallel_group": object()}, "sequence_data_parallel_group", "no sequence parallelism"),
        ({"param_swapper": object()}, "param_swapper", "offload_param.device"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_honoured_are_refused_by_name(
    arguments: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as refusal:
        infinity.Init(**arguments)
    assert refusal.value.key == key


@pytest.mark.parametrize("name", ["config", "config_dict_or_path"])
def test_the_configuration_is_taken_by_either_name(name: str, tmp_path: Path) -> None:
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    arguments: dict[str, Any] = {name: {"zero_optimization": nvme}}
    with infinity.Init(**arguments) as init:
        _build()
    assert init.config.zero_optimization.offload_param.device == "nvme"


def test_an_argument_that_nobody_knows_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no_such"):
        infinity.Init(no_such=True)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_what_an_initialize_that_was_refused_gave_up_is_refused_by_name(device: str, tmp_path: Path) -> None:
    """It was a KeyError of 0, or a connection that is closed."""
    offload = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    zero = {**CONFIG["zero_optimization"], "offload_param": offload}
    with infinity.Init(config={**CONFIG, "zero_optimization": zero}):
        model = _build()
        model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int16), requires_grad=False)
    with pytest.raises(ConfigError, match=r"model\.codes"):
        infinity.initialize(model=model, config={**CONFIG, "zero_optimization": zero})
    del model.codes
    for again in (lambda: _trained(model, zero_optimization=zero), lambda: model[0].weight.sum()):  # type: ignore[index]
        with pytest.raises(WeightsError, match=r"Linear\.weight .* that failed.* build the model anew"):
            again()
