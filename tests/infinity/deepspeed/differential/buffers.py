"""Which dtype buffers have in 16-bit training: without a word, as ``data_types`` says it, and made under Init."""

# mypy: ignore-errors
from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn

from tests.infinity.deepspeed.differential.case import cases_over
from tests.infinity.deepspeed.differential.nets import WIDTH, batches, config, start, train_on

SECTION = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Buffered(nn.Module):
    """Buffers of every kind, all of which forward reads and casts to what it computes in."""

    _keep_in_fp32_modules = ("half_kept",)
    _keep_in_fp32_modules_strict = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("value", torch.full((WIDTH,), 1.01))
        self.register_buffer("constant", torch.arange(WIDTH) / 7, persistent=False)
        self.register_buffer("kept_bias", torch.full((WIDTH,), 1.01).float())
        self.register_buffer("half_kept", torch.full((WIDTH,), 1.01).float())
        self.register_buffer("wide", torch.full((WIDTH,), 1.01).double())
        self.register_buffer("narrow", torch.full((WIDTH,), 1.01).bfloat16())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = self.value * self.constant.cos() * self.kept_bias * self.half_kept
        x = torch.tanh(self.body(x * (scale * self.wide * self.narrow).to(x.dtype)))
        return nn.functional.cross_entropy(self.head(x).float(), y)


def _dtypes(model: nn.Module) -> dict[str, str]:
    return {name: str(each.dtype) for name, each in sorted([*model.named_buffers(), *model.named_parameters()])}


def _trained(dtype: torch.dtype, stage: int, model: nn.Module, **sections: Any) -> Any:
    given = config(stage, **_precision(dtype), **sections)
    engine = start(model, given)
    return _dtypes(engine.module), train_on(engine, batches(3, dtype=dtype)), _dtypes(engine.module)


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    section = {"enabled": True} | ({"loss_scale": 8.0} if dtype is torch.float16 else {})
    return {SECTION[dtype]: section} if dtype in SECTION else {}


def _model(seed: int = 5) -> Buffered:
    torch.manual_seed(seed)
    return Buffered()


MODES = {f"{SECTION[dtype]}-{stage}": (dtype, stage) for dtype in SECTION for stage in (0, 1, 3)}


@cases_over({name: mode for name, mode in MODES.items() if name != "bf16-0"})
def of_a_model_in_fp32(_directory: Path, mode: Any) -> Any:
    return _trained(*mode, _model())


@cases_over({"bf16": torch.bfloat16, "fp16": torch.float16})
def of_a_model_in_16_bits(_directory: Path, dtype: torch.dtype) -> Any:
    return [_trained(dtype, stage, _model().to(dtype)) for stage in (1, 3)]


SAID = {
    "fp32": {"buffer_dtype": "fp32"},
    "bf16": {"buffer_dtype": "bf16"},
    "fp16": {"buffer_dtype": "fp16"},
    "none": {"buffer_dtype": None},
    "kept-auto": {"buffer_dtype": "bf16", "keep_in_fp32_modules": "auto"},
    "kept-none": {"buffer_dtype": "bf16", "keep_in_fp32_modules": []},
    "kept-value": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["val*e", "narrow", "count"]},
    "kept-alone": {"keep_in_fp32_modules": ["narrow"]},
}


@cases_over(SAID)
def as_data_types_says(_directory: Path, said: dict[str, Any]) -> Any:
    return [_trained(torch.bfloat16, stage, _model(), data_types=said) for stage in (1, 3)]


@cases_over({"fp32": "fp32", "bf16": "bf16"})
def asked_for_in_fp32_training(_directory: Path, dtype: str) -> Any:
    return _trained(torch.float32, 3, _model(), data_types={"buffer_dtype": dtype})


MADE = {
    "config-bf16": (torch.bfloat16, {"config_dict_or_path": config(3, bf16={"enabled": True})}),
    "config-fp16": (torch.float16, {"config_dict_or_path": config(3, fp16={"enabled": True})}),
    "config-fp32": (torch.float32, {"config_dict_or_path": config(3)}),
    "dtype-bf16": (torch.bfloat16, {"dtype": torch.bfloat16}),
    "config-and-dtype": (
        torch.bfloat16, {"dtype": torch.bfloat16, "config_dict_or_path": config(3, bf16={"enabled": True})}
    ),
}  # fmt: skip


@cases_over(MADE)
def made_under_init(_directory: Path, made: Any) -> Any:
    dtype, options = made
    with deepspeed.zero.Init(**options):
        model = _model()
    before = _dtypes(model)
    engine = start(model, config(3, **_precision(dtype)))
    return {name: kind for name, kind in before.items() if "." not in name}, _dtypes(engine.module)


class Shifted(nn.Module):
    """Its buffer is made by a constructor of torch's and added to what comes in, with no cast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x + self.shift).float(), y)


@cases_over({"init": True, "plain": False})
def added_to_inputs_in_bf16(_directory: Path, under_init: bool) -> Any:
    given = config(3, bf16={"enabled": True})
    with deepspeed.zero.Init(config_dict_or_path=given) if under_init else nullcontext():
        torch.manual_seed(5)
        model = Shifted()
    engine = start(model, given)
    try:
        return train_on(engine, batches(2, dtype=torch.bfloat16))
    except RuntimeError:
        return "refused"
