"""What people get wrong: each mistake is answered with key, value and what to write instead, all in one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infinity.config import parse_config
from infinity.errors import CombinedConfigError, ConfigError

NVME = {"device": "nvme", "nvme_path": "/no/such/directory"}


class Mistake(NamedTuple):
    keys: dict[str, Any]
    """Dotted paths of what is written beside a batch size and stage 3."""
    key: str
    value: Any
    words: str
    """Of the remedy."""
    world_size: int = 1


MISTAKES = {
    "5e8 in quotes": Mistake(
        {"zero_optimization.sub_group_size": "5e8"},
        "zero_optimization.sub_group_size",
        "5e8",
        "must be a valid integer: write 5e8 without quotes",
    ),
    "a learning rate in quotes": Mistake(
        {"optimizer.params.lr": "1e-4"}, "optimizer.params.lr", "1e-4", "write 1e-4 without quotes"
    ),
    "true in quotes": Mistake({"bf16.enabled": "true"}, "bf16.enabled", "true", "write true without quotes"),
    "Python's True in quotes": Mistake(
        {"zero_optimization.overlap_comm": "True"},
        "zero_optimization.overlap_comm",
        "True",
        "write true without quotes",
    ),
    "a switch instead of its section": Mistake({"bf16": True}, "bf16", True, "must be an object"),
    "fp16 and bf16": Mistake(
        {"fp16.enabled": True, "bf16.enabled": True}, "fp16.enabled", True, "enable one of the two"
    ),
    "a fraction of a sample": Mistake({"train_batch_size": 2.5}, "train_batch_size", 2.5, "whole number"),
    "no sample at all": Mistake({"train_batch_size": 0}, "train_batch_size", 0, "at least 1"),
    "a batch that does not divide": Mistake(
        {"train_batch_size": 10}, "train_batch_size", 10, "x world size 4: write 8 or 12", world_size=4
    ),
    "three batch sizes that contradict": Mistake(
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
        "train_batch_size",
        8,
        "4 x gradient_accumulation_steps 4 x world size 1 = 16; leave one of the three out",
    ),
    "no batch size": Mistake({"train_batch_size": None}, "train_batch_size", None, "neither is given"),
    "accumulation of half a batch": Mistake(
        {"gradient_accumulation_steps": 0.5}, "gradient_accumulation_steps", 0.5, "whole number of at least 1"
    ),
    "a key that is misspelt": Mistake(
        {"gradient_cliping": 1.0}, "gradient_cliping", 1.0, "did you mean gradient_clipping?"
    ),
    "a British section": Mistake(
        {"zero_optimisation": {"stage": 3}}, "zero_optimisation", {"stage": 3}, "did you mean zero_optimization?"
    ),
    "a key without its underscore": Mistake(
        {"zero_optimization.stage3_max_liveparameters": 1},
        "zero_optimization.stage3_max_liveparameters",
        1,
        "did you mean zero_optimization.stage3_max_live_parameters?",
    ),
    "the offload section at the top": Mistake(
        {"offload_optimizer": {"device": "cpu"}},
        "offload_optimizer",
        {"device": "cpu"},
        "did you mean zero_optimization.offload_optimizer?",
    ),
    "aio inside zero_optimization, as old documents have it": Mistake(
        {"zero_optimization.aio": {"queue_depth": 8}}, "zero_optimization.aio", {"queue_depth": 8}, "did you mean aio?"
    ),
    "the learning rate beside the optimizer's type": Mistake(
        {"optimizer.lr": 1e-3}, "optimizer.lr", 1e-3, "did you mean optimizer.params.lr?"
    ),
    "torch's name of the rate": Mistake(
        {"optimizer.params.learning_rate": 1e-3}, "optimizer.params.learning_rate", 1e-3, "the closest is "
    ),
    "a key of another product": Mistake({"mixed_precision": "bf16"}, "mixed_precision", "bf16", "the closest is "),
    "a stage that is not there": Mistake(
        {"zero_optimization.stage": 4}, "zero_optimization.stage", 4, "less than or equal to 3"
    ),
    "weights offloaded at stage 2": Mistake(
        {"zero_optimization.stage": 2, "zero_optimization.offload_param.device": "cpu"},
        "zero_optimization.offload_param.device",
        "cpu",
        "weights stay whole at stage 2: write stage 3",
    ),
    "a stage in words": Mistake({"zero_optimization.stage": "3"}, "zero_optimization.stage", "3", "write 3 without"),
    "a stage in words, and what only that stage has": Mistake(
        {"zero_optimization.stage": "3", "zero_optimization.offload_param.device": "cpu"},
        "zero_optimization.stage",
        "3",
        "write 3 without",
    ),
    "auto without a trainer": Mistake({"gradient_clipping": "auto"}, "gradient_clipping", "auto", "only a trainer"),
    "an auto learning rate": Mistake({"optimizer.params.lr": "auto"}, "optimizer.params.lr", "auto", "write a value"),
    "a disk as a device": Mistake(
        {"zero_optimization.offload_param.device": "disk"},
        "zero_optimization.offload_param.device",
        "disk",
        "'none', 'cpu' or 'nvme'",
    ),
    "a GPU as a device": Mistake(
        {"zero_optimization.offload_optimizer.device": "cuda"},
        "zero_optimization.offload_optimizer.device",
        "cuda",
        "'none', 'cpu' or 'nvme'",
    ),
    "nvme without a path": Mistake(
        {"zero_optimization.offload_optimizer.device": "nvme"},
        "zero_optimization.offload_optimizer.nvme_path",
        None,
        "write nvme_path here or io_daemon.swap_dirs",
    ),
    "a path that is not there": Mistake(
        {"zero_optimization.offload_param": NVME},
        "zero_optimization.offload_param.nvme_path",
        "/no/such/directory",
        "mkdir -p /no/such/directory",
    ),
    "one swap directory instead of a list": Mistake(
        {"io_daemon.swap_dirs": "/tmp"}, "io_daemon.swap_dirs", "/tmp", "must be a list"
    ),
    "an optimizer of another kind": Mistake(
        {"optimizer.type": "Adafactor"}, "optimizer.type", "Adafactor", "'Adam', 'AdamW'"
    ),
    "an optimizer without its type": Mistake({"optimizer": {"params": {}}}, "optimizer.type", None, "is required"),
    "one beta": Mistake({"optimizer.params.betas": [0.9]}, "optimizer.params.betas.1", None, "is required"),
    "a beta of one": Mistake({"optimizer.params.betas": [0.9, 1.0]}, "optimizer.params.betas.1", 1.0, "less than 1"),
    "a negative rate": Mistake(
        {"optimizer.params.lr": -1e-3}, "optimizer.params.lr", -1e-3, "greater than or equal to 0"
    ),
    "a schedule of torch's": Mistake(
        {"scheduler.type": "CosineAnnealingLR"}, "scheduler.type", "CosineAnnealingLR", "must be one of 'WarmupLR'"
    ),
    "a schedule without its end": Mistake(
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
        "scheduler.params.total_num_steps",
        None,
        "is required",
    ),
    "a warm-up of no steps": Mistake(
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        "scheduler.params.warmup_num_steps",
        0,
        "greater than or equal to 1",
    ),
    "another schedule's parameter": Mistake(
        {"scheduler": {"type": "WarmupLR", "params": {"cycle_max_lr": 1.0}}},
        "scheduler.params.cycle_max_lr",
        1.0,
        "WarmupLR takes no such parameter",
    ),
    "negative sub-groups": Mistake(
        {"zero_optimization.sub_group_size": -1}, "zero_optimization.sub_group_size", -1, "greater than or equal to 0"
    ),
    "a block size that no drive takes": Mistake({"aio.block_size": 5000}, "aio.block_size", 5000, "multiple of 4096"),
    "two queue depths": Mistake(
        {"aio.queue_depth": 8, "io_daemon.queue_depth": 16},
        "aio.queue_depth",
        8,
        "contradicts io_daemon.queue_depth = 16; remove one of the two",
    ),
    "an old name beside its new one": Mistake(
        {"zero_optimization.cpu_offload": True, "zero_optimization.offload_optimizer": NVME},
        "zero_optimization.cpu_offload",
        True,
        "contradicts zero_optimization.offload_optimizer.device = 'nvme'; remove the old name",
    ),
    "clipping that is not a number": Mistake(
        {"gradient_clipping": float("nan")}, "gradient_clipping", pytest.approx(float("nan"), nan_ok=True), "finite"
    ),
    "a ratio in per cent": Mistake(
        {"zero_optimization.offload_optimizer.ratio": 30},
        "zero_optimization.offload_optimizer.ratio",
        30,
        "less than or equal to 1",
    ),
    "quantized weights": Mistake(
        {"zero_optimization.zero_quantized_weights": True},
        "zero_optimization.zero_quantized_weights",
        True,
        "communication is exact; write false",
    ),
    "a monitor": Mistake({"comet": {"enabled": True}}, "comet.enabled", True, "remove the section"),
}


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value


def _config(*mistakes: Mistake) -> dict[str, Any]:
    config: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    for mistake in mistakes:
        for path, value in mistake.keys.items():
            _put(config, path, value)
    for name, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if name in config and not any(name in mistake.keys for mistake in mistakes):
            config[name].setdefault("type", kind)
    return config


def _complaints(config: object, world_size: int = 1) -> list[ConfigError]:
    with pytest.raises(ConfigError) as caught:
        parse_config(config, world_size=world_size)  # type: ignore[arg-type]
    error = caught.value
    return list(error.complaints) if isinstance(error, CombinedConfigError) else [error]


def test_there_are_forty() -> None:
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_answered_with_key_value_and_remedy(mistake: Mistake) -> None:
    """And with that alone: nothing is said of what follows from it."""
    complaints = _complaints(_config(mistake), mistake.world_size)
    found = {each.key: each for each in complaints}
    assert mistake.key in found
    error = found[mistake.key]
    assert error.value == mistake.value
    assert mistake.words in error.remedy
    assert str(error).startswith(f"{mistake.key} = ")
    assert len(complaints) == (2 if mistake.keys.get("zero_optimization.offload_optimizer") is NVME else 1)


# --- all of them together


def test_everything_that_is_wrong_is_told_at_once() -> None:
    chosen = [
        MISTAKES[name]
        for name in (
            "5e8 in quotes",
            "a switch instead of its section",
            "a key that is misspelt",
            "aio inside zero_optimization, as old documents have it",
            "a stage that is not there",
            "an auto learning rate",
            "a disk as a device",
            "nvme without a path",
            "another schedule's parameter",
            "a block size that no drive takes",
            "quantized weights",
            "a monitor",
            "a batch that does not divide",
        )
    ]
    complaints = _complaints(_config(*chosen), world_size=4)
    assert {each.key for each in complaints} == {mistake.key for mistake in chosen}
    for mistake in chosen:
        error = next(each for each in complaints if each.key == mistake.key)
        assert (error.value, mistake.words in error.remedy) == (mistake.value, True)


def test_one_error_holds_all_of_them() -> None:
    config = _config(MISTAKES["5e8 in quotes"], MISTAKES["a monitor"])
    with pytest.raises(CombinedConfigError) as caught:
        parse_config(config)
    error = caught.value
    assert (error.key, error.value) == (error.complaints[0].key, error.complaints[0].value)
    first, *lines = str(error).splitlines()
    assert first == "2 settings cannot work:"
    assert [line.strip() for line in lines] == [str(each) for each in error.complaints]


def test_all_that_is_missing_is_asked_for() -> None:
    section = {"type": "OneCycle", "params": {"cycle_momentum": "yes"}}
    complaints = _complaints({**_config(), "scheduler": section})
    assert [(each.key, each.value) for each in complaints] == [
        ("scheduler.params.cycle_min_lr", None),
        ("scheduler.params.cycle_max_lr", None),
        ("scheduler.params.cycle_momentum", "yes"),
    ]


def test_a_key_that_stands_twice_does_not_hide_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"train_batch_size": 8, "train_batch_size": 9, "zero_optimization": {"stage": 3, "stage": 3}, "aoi": {}}'
    )
    assert {each.key for each in _complaints(str(file))} == {"train_batch_size", "zero_optimization.stage", "aoi"}


def test_the_same_mistakes_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = _config(MISTAKES["5e8 in quotes"], MISTAKES["true in quotes"], MISTAKES["a stage that is not there"])
    file.write_text(json.dumps(config))
    assert [str(each) for each in _complaints(file)] == [str(each) for each in _complaints(config)]
