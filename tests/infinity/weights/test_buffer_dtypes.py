"""Which dtype buffers have beside weights in 16 bits: as the model came, what the configuration says, and under which
name it was said."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import infinity.deepspeed
from infinity.errors import WeightsError
from infinity.weights.buffers import move_buffers


class Kept(nn.Module):
    """As a model of transformers' that names parts to be left in fp32."""

    _keep_in_fp32_modules = ("scale",)
    _keep_in_fp32_modules_strict = ("norm*mean",)

    def __init__(self) -> None:
        super().__init__()
        for name in ("scale", "norm_running_mean", "plain"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))


def dtypes_after(weight_dtype: torch.dtype, kept: Any = "auto", **asked: Any) -> dict[str, str]:
    model = nn.Sequential(Kept(), nn.Module())
    model[1].register_buffer("scale", torch.zeros(2))
    places = {name: id(buffer) for name, buffer in model.named_buffers()}
    move_buffers(model, torch.device("cpu"), weight_dtype, kept=kept, **asked)
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == places
    return {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in model.named_buffers()}


OTHERS = {"0.count": "int64", "0.wide": "float64"}


def test_buffers_in_fp32_take_the_weights_dtype_but_those_that_a_module_keeps() -> None:
    assert dtypes_after(torch.bfloat16) == {
        "0.scale": "bfloat16", "0.norm_running_mean": "float32", "0.plain": "bfloat16", "1.scale": "bfloat16", **OTHERS,
    }  # fmt: skip
    assert dtypes_after(torch.float16) == {
        "0.scale": "float32", "0.norm_running_mean": "float32", "0.plain": "float16", "1.scale": "float16", **OTHERS,
    }  # fmt: skip


def test_a_buffer_that_two_modules_share_is_kept_under_either_name_and_with_all_its_bits() -> None:
    model = nn.Sequential(nn.Module(), nn.Module())
    shared = torch.full((2,), 0.1)
    for number, module in enumerate(model):
        module.register_buffer(f"scale_{number}", shared)
    for kept in (["0.scale"], ["1.scale"]):
        move_buffers(model, torch.device("cpu"), torch.bfloat16, kept=kept)
        assert model[0].scale_0 is shared is model[1].scale_1
        assert (shared.dtype, shared.tolist()) == (torch.float32, torch.full((2,), 0.1).tolist())
    move_buffers(model, torch.device("cpu"), torch.bfloat16, kept=[])
    assert shared.dtype is torch.bfloat16


def test_the_user_may_name_what_stays_instead() -> None:
    assert dtypes_after(torch.float16, ["plain", "1*ale"]) == {
        "0.scale": "float16", "0.norm_running_mean": "float16", "0.plain": "float32", "1.scale": "float32", **OTHERS,
    }  # fmt: skip
    assert set(dtypes_after(torch.bfloat16, []).values()) == {"bfloat16", "int64", "float64"}


def test_a_dtype_that_is_asked_for_is_that_of_all_floating_buffers_but_those_kept() -> None:
    assert dtypes_after(torch.bfloat16, ["plain"], dtype=torch.float16) == {
        "0.scale": "float16", "0.norm_running_mean": "float16", "0.plain": "float32", "1.scale": "float16",
        "0.count": "int64", "0.wide": "float16",
    }  # fmt: skip


def test_what_is_kept_in_fp32_becomes_it() -> None:
    model = Kept()
    model.plain, model.wide = model.plain.bfloat16(), model.wide
    move_buffers(model, torch.device("cpu"), torch.bfloat16, follow=False, kept=["plain", "wide", "count"])
    assert (model.plain.dtype, model.wide.dtype, model.count.dtype) == (torch.float32, torch.float64, torch.int64)


class Frequencies(nn.Module):
    """Positions as rotary embeddings make them of a constant that no state dict holds, and a value that one does."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies: torch.Tensor
        self.shift: torch.Tensor
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16), persistent=False)
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.out = nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * self.frequencies
        y: torch.Tensor = self.out((x + angles.cos().to(x.dtype)) * self.shift.to(x.dtype))
        return y


def config_of(stage: int, **sections: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": optimizer, "zero_optimization": zero} | (
        sections
    )


def found_after(config: dict[str, Any], *, came_in: torch.dtype = torch.float32, **init: Any) -> tuple[str, str]:
    initialize = init.pop("initialize", infinity.initialize)
    with infinity.Init(config_dict_or_path=config, **init) if init else nullcontext():
        model = Frequencies()
        if came_in is not torch.float32:
            model.out.to(came_in)
    with initialize(model=model, config=config)[0] as engine:
        engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum().item()
        return str(model.frequencies.dtype), str(model.shift.dtype)


@pytest.mark.parametrize("stage", [0, 3])
def test_constants_stay_in_fp32_and_values_follow_fp32_weights_into_16_bits(stage: int) -> None:
    config = config_of(stage)
    assert found_after(config) == ("torch.float32", "torch.bfloat16")
    assert found_after(config, came_in=torch.bfloat16) == ("torch.float32", "torch.float32")
    asked = config_of(stage, data_types={"buffer_dtype": "bf16"})
    assert found_after(asked) == found_after(asked, came_in=torch.bfloat16) == ("torch.bfloat16", "torch.bfloat16")
    kept = config_of(stage, data_types={"buffer_dtype": "fp32"})
    assert found_after(kept) == ("torch.float32", "torch.float32")


def test_init_that_casts_weights_leaves_the_model_one_that_came_in_fp32() -> None:
    config = config_of(3)
    assert found_after(config, dtype=torch.bfloat16) == ("torch.float32", "torch.bfloat16")
    assert found_after(config, came_in=torch.bfloat16, dtype=None) == ("torch.float32", "torch.float32")


@pytest.mark.parametrize("stage", [0, 3])
def test_under_the_name_deepspeed_no_buffer_is_cast_unasked(stage: int) -> None:
    initialize = infinity.deepspeed.initialize
    try:
        assert found_after(config_of(stage), initialize=initialize) == ("torch.float32", "torch.float32")
        asked = config_of(stage, data_types={"buffer_dtype": "bf16"})
        assert found_after(asked, initialize=initialize) == ("torch.bfloat16", "torch.bfloat16")
    finally:  # it makes a group, as DeepSpeed's does; the next test of this process wants none
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("precision", "is_told"), [("fp16", True), ("bf16", False)])
def test_parameters_that_the_model_wants_in_fp32_are_told(
    precision: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As of T5: its lists are for fp16 alone, and the real DeepSpeed heeds them for buffers alone."""
    model = Frequencies()
    model._keep_in_fp32_modules = ["out"]  # type: ignore[assignment]
    config = config_of(3) | {"bf16": {"enabled": False}, precision: {"enabled": True}}
    with caplog.at_level(logging.WARNING, "infinity.engine.build"), infinity.initialize(model=model, config=config)[0]:
        told = [record.getMessage() for record in caplog.records if "in fp32" in record.getMessage()]
    assert bool(told) is is_told
    assert all("out.weight and 1 more" in words and "bf16" in words for words in told)


class Shifted(nn.Module):
    """A buffer in fp32 raises what follows it to fp32, which a layer in bf16 does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.full((8,), 0.1), persistent=False)
        self.out = nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(x + self.shift)
        return y


def test_a_buffer_in_fp32_that_meets_16_bit_weights_is_named_with_the_remedy() -> None:
    with infinity.initialize(model=Shifted(), config=config_of(3))[0] as engine:
        with pytest.raises(WeightsError, match=r'shift in fp32 met weights in bf16.*"buffer_dtype": "bf16"'):
            engine(torch.ones(2, 8, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="dtype") as raised:
            engine(torch.ones(2, 8))  # not the buffer's fault alone
        assert not isinstance(raised.value, WeightsError)
    remedied = config_of(3, data_types={"buffer_dtype": "bf16"})
    with infinity.initialize(model=Shifted(), config=remedied)[0] as engine:
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum())
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_is_called_without_its_engine_notes_the_buffer_on_torchs_error(stage: int) -> None:
    """Its call is not the engine's, to end with another error."""
    with infinity.initialize(model=Shifted(), config=config_of(stage))[0] as engine:
        with pytest.raises(RuntimeError, match="dtype") as raised:
            engine.module(x=torch.ones(2, 8, dtype=torch.bfloat16))
        (note,) = raised.value.__notes__
        assert "shift in fp32 met weights in bf16" in note
        assert '"buffer_dtype": "bf16"' in note
        with pytest.raises(RuntimeError, match="dtype") as raised:
            engine.module(x=torch.ones(2, 8))  # not the buffer's fault alone
        assert not hasattr(raised.value, "__notes__")
        with pytest.raises(WeightsError) as named:
            engine(torch.ones(2, 8, dtype=torch.bfloat16))
        assert not hasattr(named.value.__cause__, "__notes__"), "told once"
