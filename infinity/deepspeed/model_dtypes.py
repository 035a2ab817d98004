"""A model whose weights have another dtype than the configuration names, or have one where it names none.

DeepSpeed casts weights to a dtype that is named. Where none is, ZeRO asks the weights: those in 16 bits train as they
are over masters in fp32, and their gradients are reduced and added up in fp32. The engine's own answers are those of
the configuration all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from infinity.config import Config
from infinity.deepspeed.raw_config import section_of, stage_of
from infinity.plan.precision import dtype_beside
from infinity.plan.registered import parameters
from infinity.weights.owners import owner_of

_log = logging.getLogger(__name__)
_SECTIONS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_CAST: Final = (torch.bfloat16, torch.float16, torch.float64)


def cast(model: nn.Module, raw: Mapping[str, Any]) -> None:
    """Cast weights to the dtype that ``raw`` names. Those in fp32 are the engine's to cast, which keeps them as
    masters; those made under ``zero.Init`` have the dtype that it gave them."""
    for dtype, name in _SECTIONS.items():
        if section_of(raw, name).get("enabled"):
            for param in parameters(model):
                if param.dtype in _CAST and param.dtype is not dtype and owner_of(param) is None:
                    param.data = param.data.to(dtype)


def sections_for(model: nn.Module, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What has to stand in the configuration for the model to train in the dtype that its weights have; empty where
    ``raw`` names a dtype, where those that learn are in fp32 or in several, where others would be cast, and at stage 0,
    which has no masters."""
    enabled = any(section_of(raw, name).get("enabled") for name in (*_SECTIONS.values(), "torch_autocast"))
    weights = {(param.dtype, param.requires_grad) for param in parameters(model)}
    trained = {dtype for dtype, trains in weights if trains} or {dtype for dtype, _ in weights}
    if enabled or len(trained) != 1 or not stage_of(raw):
        return {}
    dtype = trained.pop()
    name = _SECTIONS.get(dtype)
    if name is None or any(dtype_beside(dtype, own, trainable=trains) is not own for own, trains in weights):
        return {}
    _log.info("weights are %s and the configuration names no dtype: they train so, over fp32 masters", dtype)
    return {
        name: {**section_of(raw, name), "enabled": True},
        "data_types": {"grad_accum_dtype": "fp32", **section_of(raw, "data_types")},
        "communication_data_type": raw.get("communication_data_type") or "fp32",
    }


def as_given(config: Config, raw: Mapping[str, Any], added: Mapping[str, Any]) -> Config:
    """``config`` without what ``sections_for`` has added to ``raw``."""
    if not added:
        return config
    off = {name: getattr(config, name).model_copy(update={"enabled": False}) for name in _SECTIONS.values()}
    asked = section_of(raw, "data_types").get("grad_accum_dtype")
    data_types = config.data_types.model_copy(update={"grad_accum_dtype": asked})
    return config.model_copy(
        update={**off, "data_types": data_types, "communication_data_type": raw.get("communication_data_type")}
    )
