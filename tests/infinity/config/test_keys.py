"""The table of keys says what the parser does, tests hold what works, and no key of DeepSpeed's is missing."""

from __future__ import annotations

import ast
import functools
from tempfile import gettempdir
from typing import Any

import pytest

from infinity.config import Config, resolve_config
from infinity.config.dialect import BY_PATH, KEYS, Key, Standing
from infinity.config.old_names import OLD_NAMES
from infinity.config.optimizer import SPELLINGS
from infinity.config.origins import Origin
from infinity.errors import ConfigError
from tests.infinity.config.deepspeed_keys import ALL
from tests.infinity.config.keys import DOCUMENT, EXAMPLES, ROOT, document

SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 100},
    "WarmupCosineLR": {"total_num_steps": 100},
    "OneCycle": {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0},
    "LRRangeTest": {},
}


def _with(path: str, value: object) -> dict[str, Any]:
    """A smallest configuration and one more key, beside what that needs."""
    config: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    *sections, name = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    if sections[:1] == ["optimizer"]:
        kind = next((kind for kind in SPELLINGS.values() if _has(kind, name)), "AdamW")
        config["optimizer"].setdefault("type", kind)
    if name.startswith("bf16_"):
        config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, **config["bf16"]}
    if name == "activation_checkpoints":
        config["io_daemon"]["swap_dirs"] = [gettempdir()]
    if name == "master_weights":
        config["bf16"] = {"enabled": True}
    if sections[:2] == ["scheduler", "params"]:
        kind = next(kind for kind in SCHEDULES if _takes(kind, name))
        config["scheduler"] = {"type": kind, "params": {**SCHEDULES[kind], name: value}}
    return config


def _has(optimizer: str, name: str) -> bool:
    """Whether the optimizer has a parameter of that name."""
    section = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "optimizer": {"type": optimizer}}
    config = resolve_config(section).config
    return config.optimizer is not None and name in type(config.optimizer.params).model_fields


@functools.cache
def _takes(schedule: str, name: str) -> bool:
    """Whether the schedule has a parameter of that name."""
    section = {"type": schedule, "params": SCHEDULES[schedule]}
    config = resolve_config({"train_batch_size": 8, "zero_optimization": {"stage": 3}, "scheduler": section}).config
    return config.scheduler is not None and name in type(config.scheduler.params).model_fields


def _read(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


# --- the table and the parser


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_the_table_says_what_the_parser_does(key: Key) -> None:
    if key.standing is Standing.WORKS:
        value = EXAMPLES[key.path].value
        resolved = resolve_config(_with(key.path, value))
        read = _read(resolved.config, key.path)
        meant = tuple(value) if isinstance(value, list) else value
        assert read == (meant if key.path != "optimizer.type" else "Adam")
        assert resolved.provenance[key.path].origin is Origin.GIVEN
        assert resolved.config.subsumed == ()
    elif key.standing is Standing.SUBSUMED:
        value = {"boolean": True, "whole number": 7, "number": 0.5, "string": "x", "list": [], "object": {}}[key.shape]
        value = key.accepts[0] if key.accepts else value
        assert resolve_config(_with(key.path, value)).config.subsumed == (key.path,)
    else:
        refused: Any = {key.switch: True} if key.switch else "a value that nobody serves"
        with pytest.raises(ConfigError) as caught:
            resolve_config(_with(key.path, refused))
        assert caught.value.key == (f"{key.path}.{key.switch}" if key.switch else key.path)
        assert key.note in caught.value.remedy
        assert key.remedy in caught.value.remedy


@pytest.mark.parametrize("key", [k for k in KEYS if k.standing is Standing.WORKS], ids=lambda k: k.path)
def test_a_key_that_works_refuses_what_it_cannot_be(key: Key) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(_with(key.path, {"no": "value"}))
    assert caught.value.key.startswith(key.path)


# --- the tests that hold them


def test_every_key_that_works_has_an_example_and_a_test() -> None:
    assert EXAMPLES.keys() == {key.path for key in KEYS if key.standing is Standing.WORKS}


@functools.cache
def _functions(file: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("test", sorted({example.test for example in EXAMPLES.values()}))
def test_the_tests_that_are_named_exist(test: str) -> None:
    file, function = test.split("::")
    assert function in _functions(file)


def test_the_document_is_up_to_date() -> None:
    """Written by ``python -m tests.infinity.config.keys``."""
    assert DOCUMENT.read_text() == document()


# --- nothing is missing


@pytest.mark.parametrize("path", ALL)
def test_every_key_of_deepspeed_is_known(path: str) -> None:
    """A section that is refused as a whole answers for what it holds."""
    old = {each.path for each in OLD_NAMES}
    parts = path.split(".")
    assert any(".".join(parts[:depth]) in BY_PATH.keys() | old for depth in range(1, len(parts) + 1))
