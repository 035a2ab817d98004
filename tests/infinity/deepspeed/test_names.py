"""Every name that DeepSpeed's users import is there, and what is not there says so in words."""

from __future__ import annotations

import fcntl
import importlib
from collections.abc import Container
from typing import Any
from unittest import mock

import pytest
import torch

import infinity.deepspeed
from infinity.deepspeed import refused_classes
from infinity.deepspeed.absent import ABSENT
from infinity.deepspeed.tree import ALIASES, TREE
from infinity.errors import ConfigError

ROOT = "infinity.deepspeed"
REACHED = [
    "initialize",
    "DeepSpeedEngine",
    "comm.is_initialized",
    "comm.init_distributed",
    "comm.get_rank",
    "zero.Init",
    "zero.GatheredParameters",
    "zero.register_external_parameter",
    "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor",
    "runtime.zero.partition_parameters._orig_torch_arange",
    "runtime.zero.partition_parameters.get_accelerator",
    "runtime.lr_schedules.VALID_LR_SCHEDULES",
    "ops.adam.DeepSpeedCPUAdam",
    "ops.adagrad.DeepSpeedCPUAdagrad",
    "ops.lion.DeepSpeedCPULion",
    "utils.logger.setLevel",
    "utils.set_z3_leaf_modules",
    "utils.safe_get_full_grad",
    "accelerator.get_accelerator",
    "checkpoint.utils.clone_tensors_for_torch_save",
    "launcher.runner.DEEPSPEED_ENVIRONMENT_NAME",
]
"""What Transformers, Accelerate and PEFT reach, from the package on."""


REFUSED = [
    (place, name)
    for place, names in TREE.items()
    for name, home in names.items()
    if home.startswith(refused_classes.__name__)
]


def names_above(name: str) -> Container[str]:
    return TREE.get(name.rpartition(".")[0], ())


def _module(place: str) -> Any:
    return importlib.import_module(f"{ROOT}.{place}" if place else ROOT)


@pytest.mark.parametrize("place", TREE)
def test_every_name_of_the_tree_is_there(place: str) -> None:
    module = _module(place)
    missing = [name for name in TREE[place] if not hasattr(module, name)]
    assert not missing
    assert set(TREE[place]) <= set(dir(module))


@pytest.mark.parametrize("place", [place for place in TREE if place])
def test_a_module_is_there_with_all_above_it(place: str) -> None:
    assert place.rpartition(".")[0] in TREE


@pytest.mark.parametrize("name", REACHED)
def test_names_are_reached_without_importing_their_modules(name: str) -> None:
    found: Any = infinity.deepspeed
    for part in name.split("."):
        found = getattr(found, part)
    assert found is not None


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_the_module_that_it_stands_for(alias: str) -> None:
    assert getattr(infinity.deepspeed, alias) is _module(ALIASES[alias])
    with pytest.raises(ModuleNotFoundError, match=f"no module, but another name of {ROOT}.{ALIASES[alias]}: import"):
        importlib.import_module(f"{ROOT}.{alias}")


@pytest.mark.parametrize("name", [name for name in ABSENT if name.rpartition(".")[2] not in names_above(name)])
def test_what_is_absent_is_refused_in_words(name: str) -> None:
    above, _, last = name.rpartition(".")
    if name in TREE:  # it is there in part
        with pytest.raises(AttributeError, match=f"has no {name}.nothing_such: .{{20}}"):
            _ = _module(name).nothing_such
        return
    with pytest.raises(ImportError, match=f"infinity serves {ROOT!r} here, which has no {name}: .{{20}}"):
        importlib.import_module(f"{ROOT}.{name}")
    if above in TREE:
        assert not hasattr(_module(above), last)
        with pytest.raises(AttributeError, match=f"which has no {name}: .{{20}}"):
            getattr(_module(above), last)


@pytest.mark.parametrize(("place", "name"), REFUSED)
def test_classes_of_what_is_not_built_can_be_asked_for_and_not_be_made(place: str, name: str) -> None:
    kind = getattr(_module(place), name)
    assert not isinstance(torch.nn.Linear(1, 1), kind)
    derived = type("Users", (kind,), {"__init__": lambda self: None})
    for each in (kind, derived):
        with pytest.raises(ConfigError, match=f"{name} = 'made': .{{20}}"):
            each()


def test_groups_of_experts_are_the_groups_that_were_given() -> None:
    utils, param = _module("moe.utils"), torch.nn.Parameter(torch.ones(1))
    split = utils.split_params_into_different_moe_groups_for_optimizer
    group = {"params": [param], "name": "all"}
    assert split(group) == split([group]) == split((group,)) == [group]
    assert utils.has_moe_layers(torch.nn.Linear(1, 1)) == (False, 0)
    assert not utils.is_moe_param(param)
    param.allreduce = False  # type: ignore[attr-defined]
    assert utils.is_moe_param(param)


def test_from_package_import_name_shows_the_reason() -> None:
    with pytest.raises(ImportError, match="there is no tensor parallelism"):
        exec(f"from {ROOT} import tp_model_init")
    with pytest.raises(ImportError, match="did you mean safe_get_full_grad"):
        exec(f"from {ROOT}.utils import safe_get_ful_grad")


def test_names_of_constructors_can_be_assigned_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module("runtime.zero.partition_parameters")
    before = module._orig_torch_arange
    with monkeypatch.context() as patched:
        patched.setattr(module, "_orig_torch_arange", len)
        assert importlib.import_module(f"{ROOT}.runtime.zero.partition_parameters")._orig_torch_arange is len
    assert module._orig_torch_arange is before


@pytest.mark.parametrize("create", [False, True])
def test_what_a_script_sets_is_read_until_it_takes_it_back(create: bool, capsys: pytest.CaptureFixture[str]) -> None:
    debug: Any = importlib.import_module(f"{ROOT}.utils.debug")
    with mock.patch.object(debug, "fcntl", None, create=create):
        assert (debug.fcntl,) == (None,)
        debug.printflock("without", "locks")
    assert debug.fcntl is fcntl
    debug.printflock("with them")
    assert capsys.readouterr().out == "without locks\nwith them\n"
    with (
        mock.patch.object(debug.fcntl, "flock", side_effect=OSError("no locks")),
        pytest.raises(OSError, match="no locks"),
    ):
        debug.printflock("never")
