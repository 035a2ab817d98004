"""Models in another dtype than the configuration names, and steps that leave bad gradients out in every dtype."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.errors import ConfigError
from tests.support.ranks import call_on_ranks

Config = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BAD = 1
"""The batch of ``_train`` that is not finite."""


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(dtype)


def _config(stage: int, **others: Any) -> Config:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **others,
    }


def _start(model: nn.Module, config: Config) -> Any:
    return deepspeed.initialize(model=model, config=config)[0]


def _train(engine: Any, steps: int = 3, *, bad: bool = False) -> list[Tensor]:
    """The weights after each step."""
    generator = torch.Generator().manual_seed(1)
    dtype, after = next(engine.module.parameters()).dtype, []
    for number in range(steps):
        batch = torch.randn(4, 16, generator=generator)
        batch = torch.full_like(batch, torch.inf) if bad and number == BAD else batch
        engine.backward(engine(batch.to(dtype)).float().pow(2).mean())
        engine.step()
        after.append(torch.cat([each.flatten() for each in engine.full_state_dict().values()]))
    return after


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("section", DTYPES)
def test_a_model_in_16_bits_trains_as_if_the_configuration_named_them(section: str, stage: int) -> None:
    named = _config(stage, **{section: {"enabled": True}}, data_types={"grad_accum_dtype": "fp32"})
    expected = _train(_start(_net(DTYPES[section]), named | {"communication_data_type": "fp32"}))
    engine = _start(_net(DTYPES[section]), _config(stage))
    assert _equal(_train(engine), expected)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (False, False)
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert engine.communication_data_type is torch.float32


def test_it_does_under_the_sections_old_form() -> None:
    engine = _start(_net(torch.bfloat16), _config(1) | {"zero_optimization": True})
    assert _equal(_train(engine), _train(_start(_net(torch.bfloat16), _config(1))))
    assert engine.zero_optimization_partition_gradients() is False
    assert engine.zero_optimization_stage() == 1


def test_it_does_on_nvme_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    (tmp_path / "swap").mkdir()
    offloaded = _config(3)
    offloaded["zero_optimization"] |= {"offload_param": place, "offload_optimizer": place}
    offloaded["io_daemon"] = {"host_budget_bytes": 64 << 20}
    engine = _start(_net(torch.bfloat16), offloaded)
    first = _train(engine, 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    expected = _train(engine, 2)
    engine.destroy()
    assert _equal(first, _train(_start(_net(torch.bfloat16), _config(3)), 2))
    engine = _start(_net(torch.bfloat16), offloaded)
    engine.load_checkpoint(str(tmp_path / "saved"))
    assert _equal(_train(engine, 2), expected)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("end", ["taken over", "destroyed", "let go of"])
def test_it_goes_from_engine_to_engine(stage: int, end: str) -> None:
    model = _net(torch.bfloat16)
    engine = _start(model, _config(stage))
    rounded = _train(engine, 1)[0].bfloat16()
    if end == "destroyed":
        engine.destroy()
    elif end == "let go of":
        del engine
        gc.collect()
    assert next(model.parameters()).dtype is torch.bfloat16
    engine = _start(model, _config(stage))
    found = torch.cat([each.flatten() for each in engine.full_state_dict().values()])
    assert torch.equal(found.bfloat16(), rounded)
    assert (next(model.parameters()).dtype, engine.bfloat16_enabled()) == (torch.bfloat16, False)


def test_without_masters_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight.*bfloat16.*change the config"):
        _start(_net(torch.bfloat16), _config(0))
    with pytest.raises(ConfigError, match=r"0\.weight.*bfloat16.*change the config"):
        infinity.initialize(model=_net(torch.bfloat16), config=_config(2))


def test_weights_in_two_dtypes_are_refused_by_name() -> None:
    model = _net()
    list(model.children())[2].to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"2\.weight"):
        _start(model, _config(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_are_cast_to_the_dtype_that_is_named(dtype: torch.dtype) -> None:
    named = _config(3, bf16={"enabled": True})
    expected = _train(_start(_net(dtype).to(torch.bfloat16), named))
    assert _equal(_train(_start(_net(dtype), named)), expected)


@pytest.mark.parametrize(("section", "expected"), [({}, torch.float32), ({"bf16": {"enabled": True}}, torch.bfloat16)])
def test_under_init_16_bits_give_way_to_the_configuration(section: Config, expected: torch.dtype) -> None:
    config = _config(3, **section)
    torch.set_default_dtype(torch.float16)  # as Transformers does while it reads a file in it
    try:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    finally:
        torch.set_default_dtype(torch.float32)
    assert next(model.parameters()).dtype is expected
    engine = _start(model, config)
    assert next(model.parameters()).dtype is expected
    assert bool(torch.isfinite(_train(engine, 1)[0]).all())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bad_batch_costs_a_step_and_not_the_model(stage: int, dtype: str) -> None:
    section = {dtype: {"enabled": True}} if dtype != "fp32" else {}
    engine = _start(_net(), _config(stage, **section))
    after = _train(engine, bad=True)
    is_skipped = stage > 0 or dtype == "bf16"  # stage 0 in fp32 is plain torch, there and here
    assert (engine.skipped_steps, engine.global_steps) == (is_skipped, len(after))
    assert torch.equal(after[BAD - 1], after[BAD]) is is_skipped
    assert bool(torch.isfinite(after[-1]).all()) is is_skipped


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_unless_the_configuration_wants_it(stage: int) -> None:
    engine = _start(_net(), _config(stage, bf16={"enabled": True, "check_grad_overflow": False}))
    assert not torch.isfinite(_train(engine, bad=True)[BAD]).any()
    assert engine.skipped_steps == 0


@pytest.mark.parametrize(("stage", "skipped"), [(1, 0), (2, 0), (3, 1)])
def test_where_the_model_alone_says_bf16_stage_3_looks_for_it(stage: int, skipped: int) -> None:
    engine = _start(_net(torch.bfloat16), _config(stage))
    _train(engine, bad=True)
    assert engine.skipped_steps == skipped


def test_an_update_inside_backward_has_begun_before_anybody_could_look() -> None:
    early = {"gradient_clipping": 0.0, "io_daemon": {"update_in_backward": True}}
    engine = _start(_net(), _config(3, **early))
    assert not torch.isfinite(_train(engine, bad=True)[BAD]).any()
    assert engine.skipped_steps == 0


def test_infinity_itself_trains_on_as_plain_torch() -> None:
    engine = infinity.initialize(model=_net(), config=_config(3))[0]
    assert not torch.isfinite(_train(engine, bad=True)[BAD]).any()


def test_all_ranks_leave_out_what_is_bad_on_one(tmp_path: Path) -> None:
    call_on_ranks(_bad_on_one, tmp_path, num_ranks=2)


def _bad_on_one(rank: int, _directory: str) -> None:
    for stage in (1, 2, 3):
        engine = _start(_net(), _config(stage))
        after = _train(engine, bad=rank == 1)
        assert engine.skipped_steps == 1
        assert torch.equal(after[BAD - 1], after[BAD])
        assert bool(torch.isfinite(after[-1]).all())
