"""Every architecture of Transformers: the class that trains it, a small model, inputs for its forward, and a loss."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import warnings
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.zoo.shrunk import SIDE, VARIANTS, WORDS, small

NUMEL_MAX: Final = 12_000_000
LENGTH: Final = 8
TASKS: Final = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "TEXT_TO_WAVEFORM",
    "TIME_SERIES_PREDICTION",
)
"""In the order in which an architecture's class is looked for; one in none of them is trained without a head."""


@dataclass(frozen=True)
class Architecture:
    name: str
    """Its ``model_type``."""
    model: str
    config: str

    def model_class(self) -> Any:
        return getattr(importlib.import_module("transformers"), self.model)

    def config_class(self) -> Any:
        return getattr(importlib.import_module("transformers"), self.config)


@functools.cache
def architectures() -> dict[str, Architecture]:
    """By name."""
    importlib.import_module("transformers.models.llama.modeling_llama")  # what all need, once for all that are forked
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    configs = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    tables = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS] + [auto.MODEL_MAPPING_NAMES]
    found = {}
    for name, config in configs.items():
        model = next((table[name] for table in tables if name in table), None)
        if model is not None:
            found[name] = Architecture(name, model if isinstance(model, str) else model[0], config)
    return found


class NotBuiltError(Exception):
    """Plain torch has no small model of it that runs."""


@dataclass(frozen=True)
class Variant:
    """A small model that plain torch trains, and what it is given."""

    config: Any
    with_pictures: bool


@functools.cache
def variant_of(name: str) -> Variant:
    """The first small configuration whose model plain torch trains."""
    wrong = []
    for rules, with_pictures in itertools.product(VARIANTS, (False, True)):
        try:
            variant = Variant(small(architectures()[name].config_class(), rules), with_pictures)
            model = build(name, variant.config)
            torch.autograd.backward(loss_of(model, model(**inputs(model, 0, with_pictures=with_pictures))))
        except Exception as error:  # noqa: BLE001 (whatever does not run)
            wrong.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
            continue
        return variant
    raise NotBuiltError(f"{architectures()[name].model}: {' / '.join(dict.fromkeys(wrong))}")


def build(name: str, config: Any) -> nn.Module:
    """A model with random weights, always the same."""
    kind = architectures()[name].model_class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            numel = sum(p.numel() for p in kind(_copied(config)).parameters())
        if numel > NUMEL_MAX:
            raise NotBuiltError(f"{numel:,} parameters")
        torch.manual_seed(1)
        np.random.seed(1)
        built: nn.Module = kind(_copied(config)).train()
    return built


def _copied(config: Any) -> Any:
    return type(config).from_dict(config.to_dict())


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the names that the configuration or one of its parts has."""
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", {}))]
    for part in parts:
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return default


def _tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, WORDS - 45, shape, generator=torch.Generator().manual_seed(seed))


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(model: Any, seed: int, dtype: torch.dtype = torch.float32, *, with_pictures: bool = False) -> dict[str, Any]:
    """Arguments for the model's forward. ``with_pictures``: besides its text."""
    config, taken = model.config, inspect.signature(model.forward).parameters
    main, kind = getattr(model, "main_input_name", "input_ids"), type(model).__name__
    made: dict[str, Tensor] = {}
    if main == "input_values":
        made[main] = _noise(seed, 2, 1, 4096) if "padding_mask" in taken else _noise(seed, 2, 4096)
    elif main == "input_features":
        made[main] = _features(config, kind, seed)
    else:
        if "input_ids" in taken and (main == "input_ids" or with_pictures):
            made["input_ids"] = _tokens(seed, 2, LENGTH)
        if main.startswith("pixel_values") or (with_pictures and "pixel_values" in taken):
            made[main if main.startswith("pixel_values") else "pixel_values"] = _pictures(config, kind, main, seed)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        made["decoder_input_ids"] = _tokens(seed + 50, 2, LENGTH)
    if "bbox" in taken:
        made["bbox"] = torch.zeros(2, LENGTH, 4, dtype=torch.long)
    text = made.get("decoder_input_ids", made.get("input_ids"))
    if "labels" in taken and text is not None and any(part in kind for part in ("LM", "ForConditionalGeneration")):
        made["labels"] = text
    if "labels" in taken and "ImageClassification" in kind:
        made["labels"] = torch.tensor([0, 1])
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


def _pictures(config: Any, kind: str, main: str, seed: int) -> Tensor:
    channels = find(config, "num_channels", "in_chans", "in_channels", default=3)
    side = find(config, "image_size", "img_size", default=SIDE)
    side = side if isinstance(side, int) else side[0]
    if main == "pixel_values_videos" or "Video" in kind or getattr(config, "num_frames", None):
        return _noise(seed, 2, find(config, "num_frames", default=2), channels, side, side)
    return _noise(seed, 2, channels, side, side)


def _features(config: Any, kind: str, seed: int) -> Tensor:
    """Of sounds."""
    mels = find(config, "num_mel_bins", "input_feat_per_channel", default=16)
    length = 2 * find(config, "max_source_positions", default=16)
    by_time = "Speech2Text" in kind or not hasattr(config, "max_source_positions")
    return _noise(seed, 2, length, mels) if by_time else _noise(seed, 2, mels, length)


def loss_of(model: nn.Module, outputs: Any) -> Tensor:
    """The outputs' loss, or the sum of what the model gives, each as its square's mean."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    parts = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    leaves = [x for x in tree_leaves(parts) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
    if not leaves:
        raise NotBuiltError(f"{type(model).__name__} has no output to train")
    total: Tensor = sum((x.float().square().mean() for x in leaves), start=torch.zeros(()))
    return total
