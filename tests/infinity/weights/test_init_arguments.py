"""What the dialect's other arguments of ``Init`` mean, as a table."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ConfigError
from infinity.weights.init_arguments import REFUSED, placed, refuse_foreign

OFFLOADED = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "buffer_count": 4}}}
IN_MEMORY = {"zero_optimization": {"stage": 3}}
PLACED: list[tuple[dict[str, Any], str | None, bool, dict[str, Any]]] = [
    # configuration, remote_device, pin_memory, its section then
    (IN_MEMORY, "cpu", False, {"device": "cpu"}),
    (IN_MEMORY, "nvme", True, {"device": "nvme", "pin_memory": True}),
    (IN_MEMORY, "none", False, {"device": "none"}),
    (OFFLOADED, "cpu", False, {"device": "cpu", "buffer_count": 4}),
    (OFFLOADED, None, True, {"device": "cpu", "buffer_count": 4, "pin_memory": True}),
    ({}, "cpu", False, {"device": "cpu"}),
    ({"zero_optimization": {"offload_param": None}}, "cpu", False, {"device": "cpu"}),
]


@pytest.mark.parametrize(("config", "device", "pin_memory", "section"), PLACED)
def test_where_parameters_go(
    config: dict[str, Any], device: str | None, pin_memory: bool, section: dict[str, Any], tmp_path: Path
) -> None:
    before = copy.deepcopy(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    zero = {**config.get("zero_optimization", {}), "offload_param": section}
    for source in (config, path, str(path)):
        assert placed(source, device, pin_memory=pin_memory) == {**config, "zero_optimization": zero}
    assert config == before, "the user's own stays as it was"


def test_where_nothing_is_said_the_configuration_is_the_users_own() -> None:
    assert placed(OFFLOADED, None, pin_memory=False) is OFFLOADED


@pytest.mark.parametrize(
    ("config", "device", "pin_memory", "key"),
    [
        (IN_MEMORY, "cuda", False, "remote_device"),
        (OFFLOADED, "nvme", False, "remote_device"),
        ({"zero_optimization": 3}, "cpu", False, "remote_device"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "cpu", False, "remote_device"),
        (IN_MEMORY, None, True, "pin_memory"),
        (IN_MEMORY, "none", True, "pin_memory"),
    ],
)
def test_what_contradicts_itself_is_refused(
    config: dict[str, Any], device: str | None, pin_memory: bool, key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(config, device, pin_memory=pin_memory)
    assert refused.value.key == key


def test_keys_that_stand_twice_are_complained_of(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"zero_optimization": {}, "zero_optimization": {}}')
    with pytest.raises(ConfigError, match="twice"):
        placed(path, "cpu", pin_memory=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_unless_it_is_off(name: str) -> None:
    refuse_foreign({name: None})
    refuse_foreign({name: False})
    for value in (True, object(), 0):
        with pytest.raises(ConfigError) as refused:
            refuse_foreign({name: value})
        assert (refused.value.key, refused.value.remedy) == (name, REFUSED[name])
        assert refused.value.value == (True if value is True else type(value).__name__)


def test_an_argument_that_nobody_knows_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'remote_devise'"):
        refuse_foreign({"mpu": None, "remote_devise": None})
