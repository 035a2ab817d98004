"""The JSON Schema says the same as the parser, value by value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infinity.config.dialect import KEYS, Key, Standing
from infinity.config.old_names import OLD_NAMES
from infinity.config.schema import json_schema
from tests.infinity.config.keys import EXAMPLES
from tests.infinity.config.test_mistakes import MISTAKES, Mistake
from tests.support.json_schema import problems

SMALLEST: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
SEVERAL_VALUES = {
    "fp16 and bf16",
    "a batch that does not divide",
    "three batch sizes that contradict",
    "no batch size",
    "weights offloaded at stage 2",
    "nvme without a path",
    "a path that is not there",
    "an optimizer without its type",
    "a schedule without its end",
    "another schedule's parameter",
    "two queue depths",
    "an old name beside its new one",
    "auto without a trainer",
    "an auto learning rate",
}
"""Mistakes that no single value shows, or that depend on the machine or on a trainer."""


BOOLEANS = {
    "stage3_gather_fp16_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
}
"""Of the old names."""


def _with(path: str, value: object) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(SMALLEST))
    *sections, name = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return config


SCHEMA = json_schema()


def test_it_is_json() -> None:
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert problems(SMALLEST, SCHEMA) == []


@pytest.mark.parametrize("key", [k for k in KEYS if k.standing is Standing.WORKS], ids=lambda key: key.path)
def test_what_works_is_allowed(key: Key) -> None:
    for value in (EXAMPLES[key.path].value, None, *(["auto"] if key.accepts is None else [])):
        assert problems(_with(key.path, value), SCHEMA) == []
    assert problems(_with(key.path, {"no": "value"}), SCHEMA)


@pytest.mark.parametrize("key", [k for k in KEYS if k.standing is Standing.SUBSUMED], ids=lambda key: key.path)
def test_what_is_subsumed_has_its_shape(key: Key) -> None:
    good, bad = {
        "boolean": (True, "yes"),
        "whole number": (5e8, 1.5),
        "number": (0.5, "x"),
        "string": ("x", 1),
        "list": ([], {}),
        "object": ({}, []),
    }[key.shape]
    assert problems(_with(key.path, key.accepts[0] if key.accepts else good), SCHEMA) == []
    assert problems(_with(key.path, bad), SCHEMA)


@pytest.mark.parametrize("key", [k for k in KEYS if k.standing is Standing.REFUSED], ids=lambda key: key.path)
def test_what_is_refused_is_not_allowed(key: Key) -> None:
    refused: Any = {key.switch: True} if key.switch else "a value that nobody serves"
    assert problems(_with(key.path, refused), SCHEMA)
    for value in (*(key.accepts or ()), None, *([{key.switch: key.off[0], "any": 1}] if key.switch else [])):
        assert problems(_with(key.path, value), SCHEMA) == []


def test_old_names_are_allowed_and_marked() -> None:
    for old in OLD_NAMES:
        if old.path == "zero_optimization":
            assert problems({"train_batch_size": 8, "zero_optimization": True}, SCHEMA) == []
            continue
        value: Any = True if old.boolean or old.path.split(".")[-1] in BOOLEANS else 7
        if old.path == "bfloat16":
            value = {"enabled": True}
        assert problems(_with(old.path, value), SCHEMA) == [], old.path
    assert json.dumps(SCHEMA).count('"deprecated": true') == len(OLD_NAMES)


@pytest.mark.parametrize(
    "mistake", [m for name, m in MISTAKES.items() if name not in SEVERAL_VALUES and m.value == m.value], ids=str
)
def test_a_mistake_in_one_value_is_seen(mistake: Mistake) -> None:
    config: dict[str, Any] = {}
    for path, value in mistake.keys.items():
        *sections, name = path.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    assert problems(config, SCHEMA)
