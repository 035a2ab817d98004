"""What a walk begins from: a recipe, which both sides have, and an engine's settings, of which plain torch has few."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import torch

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_POWER: Final = 12
SCALE_WINDOW: Final = 2
CLIPPING: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train, whoever trains."""

    optimizer: str = "AdamW"
    """One of ``tests.support.optimizers``."""
    schedule: str = ""
    """One of ``tests.walks.shadow``; "" for none."""
    clipping: float = 0.0
    width: int = 12
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One engine. ``dtype`` and ``accumulation`` are plain torch's as well."""

    dtype: str = "fp32"
    accumulation: int = 1
    stage: int = 3
    params: str = "none"
    """The tier of parameters: none, cpu, nvme."""
    states: str = "none"
    """The tier of the optimizer's states."""
    thresholds: str = "each"
    budget_times: float = 0.0
    """The host budget, times the smallest that works; 0: 64 MiB."""
    update: str = "on_use"
    """Or in_step, in_backward."""
    split: bool = False
    under_init: bool = False
    deepspeed: bool = False


def drawn_recipe(draw: random.Random) -> Recipe:
    return Recipe(
        optimizer=draw.choice(("AdamW", "AdamW", "AdamW", "amsgrad", "SGD", "Lion", "RMSprop")),
        schedule=draw.choice(("", "", "step", "cosine", "lambda")),
        clipping=draw.choice((0.0, 0.0, CLIPPING)),
        width=draw.choice((12, 12, 96)),
        tied=draw.random() < 0.3,
    )


def drawn_setting(draw: random.Random, recipe: Recipe, *, deepspeed: bool, tier_share: float = 0.25) -> Setting:
    stage = draw.choice((0, 1, 2, 3, 3, 3, 3, 3))
    dtype = draw.choice(("fp32", "fp32", "bf16", "bf16", "fp16"))
    tiers = ("none", "cpu", "nvme") if draw.random() < tier_share else ("none",)
    update = draw.choice(("on_use", "on_use", "on_use", "in_step", "in_backward"))
    if update == "in_backward" and (recipe.clipping or dtype == "fp16" or stage < 3):
        update = "in_step"
    has_sign = recipe.optimizer in ("AdamW", "amsgrad", "RMSprop")
    return Setting(
        dtype=dtype,
        accumulation=draw.choice((1, 1, 2, 3)),
        stage=stage,
        params=draw.choice(tiers) if stage == 3 else "none",
        states=draw.choice(tiers) if stage else "none",
        thresholds=draw.choice(("each", "grouped", "default", "0,100,0,0", "4000,500,200,400", "100000,4096,100000,0")),
        budget_times=draw.choice((0.0, 0.0, 1.0, 1.0, 1.05, 1.5, 3.0)),
        update=update,
        split=dtype == "bf16" and has_sign and stage == 3 and draw.random() < 0.3,
        under_init=stage == 3 and draw.random() < 0.15,
        deepspeed=deepspeed,
    )
