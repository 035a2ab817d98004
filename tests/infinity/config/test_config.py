"""Every key works, is subsumed, or is refused with key, value and remedy; none is ignored."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from infinity.config import Config, parse_config
from infinity.config.batch import resolve_batch
from infinity.config.dialect import BY_PATH, KEYS, SECTIONS, Key, Standing
from infinity.config.optimizer import AdamOptimizer
from infinity.config.reference import as_markdown, as_rows
from infinity.errors import ConfigError

WORKING = [key for key in KEYS if key.standing is Standing.WORKS]
SUBSUMED = [key for key in KEYS if key.standing is Standing.SUBSUMED]
REFUSED = [key for key in KEYS if key.standing is Standing.REFUSED]
SMALLEST: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
SHAPE_EXAMPLES: dict[str, tuple[Any, Any]] = {
    "boolean": (True, "yes"),
    "whole number": (5e8, 1.5),
    "number": (0.5, True),
    "string": ("x", 1),
    "list": ([], {}),
    "object": ({}, []),
}


def _path_of(key: Key) -> str:
    return key.path


def _with(path: str, value: object, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """``base`` and one more key."""
    config = copy.deepcopy(SMALLEST if base is None else base)
    *sections, name = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    if sections[:1] == ["optimizer"]:
        config["optimizer"].setdefault("type", "AdamW")
    if sections[:1] == ["scheduler"]:
        config["scheduler"].setdefault("type", "WarmupLR")
    return config


def _refusal(config: object, *, world_size: int = 1) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(config, world_size=world_size)  # type: ignore[arg-type]
    return caught.value


# --- the table itself


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes in an annotation: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        for section in inner:
            yield from _fields(section, f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}"


def test_what_the_engine_reads_is_what_the_table_lets_through() -> None:
    fields = set(_fields(Config)) - {"subsumed", "old_names"}
    assert {key.path for key in WORKING} <= fields
    for path in fields - {key.path for key in WORKING}:
        # a refused key has a field only for the value that switches it off: the engine is written against it
        assert BY_PATH[path].standing is Standing.REFUSED
        assert BY_PATH[path].accepts


def test_no_key_stands_twice_or_over_another() -> None:
    assert len(BY_PATH) == len(KEYS)
    assert not SECTIONS & BY_PATH.keys()


def test_every_refusal_says_why_and_what_to_write() -> None:
    assert all(key.note for key in KEYS)
    assert all(key.remedy for key in KEYS if key.standing is Standing.REFUSED or key.accepts is not None)


def test_the_documentation_lists_every_key() -> None:
    rows = as_rows()
    assert [row["key"] for row in rows] == [key.path for key in KEYS]
    assert all(f"`{key.path}`" in as_markdown() for key in KEYS)


def test_defaults_of_a_smallest_configuration() -> None:
    config = parse_config(SMALLEST)
    zero = config.zero_optimization
    assert (zero.sub_group_size, zero.stage3_prefetch_bucket_size) == (10**9, 5 * 10**7)
    assert (zero.stage3_param_persistence_threshold, zero.stage3_max_live_parameters) == (10**5, 10**9)
    assert zero.stage3_max_reuse_distance == 10**9
    assert (config.optimizer, config.scheduler, config.gradient_clipping, config.subsumed) == (None, None, 0.0, ())
    assert not config.offloads
    assert config.swap_dirs == ()


# --- subsumed and refused, key by key


@pytest.mark.parametrize("key", SUBSUMED, ids=_path_of)
def test_subsumed_keys_are_accepted_and_listed(key: Key) -> None:
    good, bad = SHAPE_EXAMPLES[key.shape]
    for value in key.accepts or (good,):
        assert parse_config(_with(key.path, value)).subsumed == (key.path,)
    assert parse_config(_with(key.path, "auto")).subsumed == ()
    error = _refusal(_with(key.path, bad))
    assert (error.key, error.value) == (key.path, bad)
    assert key.shape in error.remedy


@pytest.mark.parametrize("key", REFUSED, ids=_path_of)
def test_refused_keys_name_key_value_and_remedy(key: Key) -> None:
    value: Any = {key.switch: True} if key.switch else "a value that nobody serves"
    error = _refusal(_with(key.path, value))
    assert error.key == (f"{key.path}.{key.switch}" if key.switch else key.path)
    assert error.value == (True if key.switch else value)
    assert key.note in str(error)
    assert key.remedy in str(error)
    assert str(error.key) in str(error)


def test_a_word_that_a_subsumed_key_does_not_know_is_refused() -> None:
    assert "Fail" in _refusal(_with("checkpoint.tag_validation", "sometimes")).remedy


@pytest.mark.parametrize("key", [key for key in KEYS if key.accepts and key not in SUBSUMED], ids=_path_of)
def test_values_that_switch_a_refused_key_off_pass(key: Key) -> None:
    for value in key.accepts or ():
        config = parse_config(_with(key.path, value))
        assert key.path not in config.subsumed


@pytest.mark.parametrize("key", [key for key in KEYS if key.switch], ids=_path_of)
def test_a_section_that_is_off_passes_whatever_it_holds(key: Key) -> None:
    for off in (*key.off, None):
        parse_config(_with(key.path, {key.switch: off, "anything": 1}))
    parse_config(_with(key.path, {}))
    assert _refusal(_with(key.path, "on")).key == key.path


@pytest.mark.parametrize("key", [key for key in KEYS if key.switch], ids=_path_of)
def test_a_section_that_does_not_say_whether_it_is_on_is_refused(key: Key) -> None:
    """Its switch may be misspelt, or be another version's: nothing in it would be done."""
    error = _refusal(_with(key.path, {"enable": True}))
    assert (error.key, error.value) == (key.path, {"enable": True})
    assert f"write {key.switched_off}" in error.remedy


def test_true_is_not_one_and_false_is_not_zero() -> None:
    assert _refusal(_with("zero_optimization.zero_hpz_partition_size", True)).value is True
    assert _refusal(_with("io_daemon.commit_every_n_steps", False)).value is False


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("io_daemon.commit_every_n_steps", 5, "last checkpoint"),
        ("zero_optimization.zero_quantized_weights", True, "exact"),
    ],
)
def test_what_is_not_built_yet_is_refused(path: str, value: object, words: str) -> None:
    error = _refusal(_with(path, value))
    assert (error.key, error.value) == (path, value)
    assert words in str(error)


def test_a_missing_stage_is_stage_0_as_in_deepspeed() -> None:
    assert parse_config({"train_batch_size": 8}).zero_optimization.stage == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_weights_are_offloaded_at_stage_3_only(stage: int, device: str, tmp_path: Path) -> None:
    offload = {"device": device, "nvme_path": str(tmp_path)}
    error = _refusal({"train_batch_size": 8, "zero_optimization": {"stage": stage, "offload_param": offload}})
    assert (error.key, error.value) == ("zero_optimization.offload_param.device", device)
    assert "write stage 3, or offload_optimizer" in error.remedy
    parse_config({"train_batch_size": 8, "zero_optimization": {"stage": stage, "offload_optimizer": offload}})


# --- unknown keys


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.subgroup_size", "zero_optimization.sub_group_size"),
        ("zero_optimization.offload_param.nvme_pth", "zero_optimization.offload_param.nvme_path"),
        ("io_daemon.host_budget", "io_daemon.host_budget_bytes"),
        ("optimizer.params.learning_rate", None),
        ("optimizer.params.weight_dcay", "optimizer.params.weight_decay"),
        ("scheduler.params.warmup_num_step", "scheduler.params.warmup_num_steps"),
        ("aio.threads_per_file", None),
        # right name, wrong section
        ("sub_group_size", "zero_optimization.sub_group_size"),
        ("offload_optimizer", "zero_optimization.offload_optimizer"),
        ("cpu_offload", "offload_optimizer: {device: cpu}"),
        ("zero_optimization.aio", "aio"),
        ("zero_optimization.lr", "optimizer.params.lr"),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(path: str, meant: str | None) -> None:
    error = _refusal(_with(path, 1))
    assert error.key == path
    assert "unknown key" in error.remedy
    if meant is not None:
        assert f"did you mean {meant}?" in error.remedy


def test_an_unknown_key_like_no_other_lists_what_is_known_here() -> None:
    assert "host_budget_bytes, master_weights, moments, queue_depth" in _refusal(_with("io_daemon.zzz", 1)).remedy


# --- values


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train_batch_size", 0, "at least 1"),
        ("train_batch_size", 2.5, "whole number"),
        ("train_batch_size", True, "whole number"),
        ("train_batch_size", "8", "whole number"),
        ("gradient_clipping", -1.0, "greater than or equal to 0"),
        ("gradient_clipping", float("nan"), "finite"),
        ("gradient_clipping", "1.0", "number"),
        ("steps_per_print", -1, "greater than or equal to 0"),
        ("communication_data_type", "fp8", "'fp32', 'bf16' or 'fp16'"),
        ("bf16.enabled", 1, "boolean"),
        ("bf16", True, "object"),
        ("zero_optimization.stage", 4, "less than or equal to 3"),
        ("zero_optimization.sub_group_size", -1, "greater than or equal to 0"),
        ("zero_optimization.sub_group_size", 1e9 + 0.5, "integer"),
        ("zero_optimization.stage3_max_live_parameters", -1, "greater than or equal to 0"),
        ("zero_optimization.offload_param.device", "disk", "'none', 'cpu' or 'nvme'"),
        ("zero_optimization.offload_param.pin_memory", "true", "boolean"),
        ("optimizer.type", "Lamb", "pass a LAMB of your own"),
        ("optimizer.type", "OneBitAdam", "compresses what ranks exchange"),
        ("optimizer.type", "Yogi", "pass an object"),
        ("optimizer.params.momentum", 0.9, "AdamW takes no such parameter"),
        ("optimizer.params.lr", -1e-3, "greater than or equal to 0"),
        ("optimizer.params.betas", [0.9, 1.0], "less than 1"),
        ("optimizer.params.betas", [0.9], "is required"),
        ("scheduler.type", "Cosine", "'WarmupLR', 'WarmupDecayLR', 'WarmupCosineLR', 'OneCycle', 'LRRangeTest'"),
        ("scheduler.params.warmup_min_lr", [1e-4, -1e-4], "greater than or equal to 0"),
        ("scheduler.params.warmup_type", "cosine", "'log' or 'linear'"),
        ("scheduler.params.total_num_steps", 10, "WarmupLR takes no such parameter"),
        ("aio.block_size", 5000, "multiple of 4096"),
        ("io_daemon.block_size", 512, "4096"),
        ("io_daemon.queue_depth", 0, "greater than or equal to 1"),
        ("io_daemon.host_budget_bytes", 0, "greater than or equal to 1"),
        ("io_daemon.engine", "io_uring", "'require:io_uring'"),
        ("io_daemon.start", "sometimes", "'auto' or 'never'"),
        ("io_daemon.socket", "/" + "s" * 107, "107 bytes"),
        ("io_daemon.swap_dirs", "/tmp", "a list"),
        ("io_daemon", [], "object"),
    ],
)
def test_wrong_values_are_refused_by_key(path: str, value: object, words: str) -> None:
    error = _refusal(_with(path, value))
    assert error.key.startswith(path)
    assert words in error.remedy


def test_what_is_required_is_asked_for_by_its_key() -> None:
    assert _refusal({**SMALLEST, "scheduler": {"params": {}}}).key == "scheduler.type"
    assert _refusal({**SMALLEST, "optimizer": {"params": {}}}).key == "optimizer.type"
    decay = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}
    error = _refusal({**SMALLEST, "scheduler": decay})
    assert (error.key, error.remedy) == ("scheduler.params.total_num_steps", "is required")


def test_deepspeed_spellings_of_numbers_and_names() -> None:
    config = parse_config(
        {
            "log_level": "Warning",
            "activation_checkpointing": {"number_checkpoints": False},
            "train_batch_size": 8.0,
            "steps_per_print": float("inf"),
            "gradient_clipping": 1,
            "zero_optimization": {"stage": 3, "sub_group_size": 2e7, "stage3_max_live_parameters": 0},
            "optimizer": {"type": "adamw", "params": {"lr": 1, "betas": [0.9, 0.95]}},
            "scheduler": None,
        }
    )
    assert (config.train_batch_size, config.steps_per_print, config.gradient_clipping) == (8, 0, 1.0)
    assert (config.log_level, config.activation_checkpointing.number_checkpoints) == ("warning", None)
    assert type(config.zero_optimization.sub_group_size) is int
    assert config.zero_optimization.sub_group_size == 20_000_000
    assert config.optimizer is not None
    assert isinstance(config.optimizer, AdamOptimizer)
    assert (config.optimizer.type, config.optimizer.params.betas) == ("AdamW", (0.9, 0.95))


@pytest.mark.parametrize(
    ("kind", "adam_w_mode", "decoupled"),
    [("Adam", True, True), ("Adam", False, False), ("AdamW", False, True), ("AdamW", True, True)],
)
def test_adam_means_adamw_unless_told_otherwise(kind: str, adam_w_mode: bool, decoupled: bool) -> None:
    config = parse_config({**SMALLEST, "optimizer": {"type": kind, "params": {"adam_w_mode": adam_w_mode}}})
    assert config.optimizer is not None
    assert isinstance(config.optimizer, AdamOptimizer)
    assert config.optimizer.decoupled_weight_decay is decoupled


@pytest.mark.parametrize("key", [key for key in WORKING if key.auto == "refused"], ids=_path_of)
def test_auto_is_refused_where_only_a_trainer_knows(key: Key) -> None:
    error = _refusal(_with(key.path, "auto"))
    assert error.key == key.path
    assert '"auto"' in error.remedy


@pytest.mark.parametrize("key", [key for key in WORKING if key.auto != "refused"], ids=_path_of)
def test_auto_is_resolved_where_it_can_be(key: Key) -> None:
    base = _with("train_micro_batch_size_per_gpu", 8) if key.path == "train_batch_size" else None
    assert parse_config(_with(key.path, "auto", base)) == parse_config(base or SMALLEST)


def test_configurations_are_frozen() -> None:
    config = parse_config(SMALLEST)
    with pytest.raises(ValidationError, match="frozen"):
        config.zero_optimization.stage = 2


# --- batch arithmetic


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "world_size", "expected"),
    [
        (32, None, None, 4, (32, 8, 1)),
        (32, 2, None, 4, (32, 2, 4)),
        (32, None, 4, 4, (32, 2, 4)),
        (32, 2, 4, 4, (32, 2, 4)),
        (None, 2, None, 4, (8, 2, 1)),
        (None, 2, 3, 4, (24, 2, 3)),
    ],
)
def test_two_of_three_batch_settings_give_the_third(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int, expected: tuple[int, int, int]
) -> None:
    given_keys = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    for absent in (None, "auto"):
        raw = {name: absent if value is None else value for name, value in given_keys.items()}
        config = parse_config({"zero_optimization": {"stage": 3}, **raw}, world_size=world_size)
        assert (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        ) == expected


@given(micro=st.integers(1, 64), accumulation=st.integers(1, 64), world_size=st.integers(1, 64))
def test_any_two_of_consistent_batch_settings_agree(micro: int, accumulation: int, world_size: int) -> None:
    whole = (micro * accumulation * world_size, micro, accumulation)
    for left_out in range(3):
        train, some_micro, some_accumulation = (None if i == left_out else n for i, n in enumerate(whole))
        sizes = resolve_batch(train=train, micro=some_micro, accumulation=some_accumulation, world_size=world_size)
        assert sizes == whole


@pytest.mark.parametrize(
    ("keys", "world_size", "words"),
    [
        ({}, 1, "neither is given"),
        ({"gradient_accumulation_steps": 2}, 1, "neither is given"),
        ({"train_batch_size": 10}, 4, "8 or 12"),
        ({"train_batch_size": 3}, 4, "write 4"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}, 1, "9 or 12"),
        ({"train_batch_size": 10, "gradient_accumulation_steps": 4}, 1, "8 or 12"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            2,
            "leave one of the three out",
        ),
    ],
)
def test_batch_settings_that_cannot_be_reconciled(keys: dict[str, int], world_size: int, words: str) -> None:
    error = _refusal({"zero_optimization": {"stage": 3}, **keys}, world_size=world_size)
    assert error.key == "train_batch_size"
    assert words in error.remedy


# --- offload, swap directories, aio


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_nvme_needs_a_directory(section: str, tmp_path: Path) -> None:
    config = _with(f"zero_optimization.{section}.device", "nvme")
    error = _refusal(config)
    assert error.key == f"zero_optimization.{section}.nvme_path"
    assert "io_daemon.swap_dirs" in error.remedy
    config["io_daemon"] = {"swap_dirs": [str(tmp_path)]}
    assert parse_config(config).swap_dirs == (tmp_path,)


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_a_path_that_accelerates_launcher_has_dropped_is_said_to_be(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"ACCELERATE_DEEPSPEED_{section.upper()}_NVME_PATH") as caught:
        parse_config(_with(f"zero_optimization.{section}", {"device": "nvme", "nvme_path": "none"}))
    assert caught.value.key == f"zero_optimization.{section}.nvme_path"
    with pytest.raises(ConfigError, match=r"swap_dirs.*does not exist: mkdir -p none"):
        parse_config(_with(f"zero_optimization.{section}", {"device": "nvme"}) | {"io_daemon": {"swap_dirs": ["none"]}})


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_path_beside_another_device_is_taken_with_a_note(section: str, device: str) -> None:
    """As common configurations have it; the directory need not even be there."""
    config = parse_config(_with(f"zero_optimization.{section}", {"device": device, "nvme_path": "/no/such/directory"}))
    assert config.swap_dirs == ()
    key = f"zero_optimization.{section}.nvme_path"
    assert config.notes == (f"{key} = '/no/such/directory' is not used: device is {device}",)


def test_swap_directories_are_collected_once_each(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    config = parse_config(
        {
            **SMALLEST,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": f"{one}/"},
                "offload_optimizer": {"device": "nvme", "nvme_path": str(one), "pin_memory": True},
            },
            "io_daemon": {"swap_dirs": [str(two), str(one)]},
        }
    )
    assert config.swap_dirs == (one, two)
    assert config.offloads
    assert config.pin_memory


def _nvme(path: Path) -> dict[str, Any]:
    return _with("zero_optimization.offload_param", {"device": "nvme", "nvme_path": str(path)})


def test_a_swap_directory_must_exist(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    error = _refusal(_nvme(missing))
    assert (error.key, error.value) == ("zero_optimization.offload_param.nvme_path", str(missing))
    assert f"mkdir -p {missing}" in error.remedy
    assert parse_config(_nvme(missing), check_paths=False).swap_dirs == (missing,)


def test_a_swap_directory_must_be_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "no directory" in _refusal(_nvme(file)).remedy


def test_a_swap_directory_must_be_writable() -> None:
    """/proc is writable for nobody, not even for root."""
    error = _refusal(_nvme(Path("/proc")))
    assert "not writable" in error.remedy


def test_aio_names_two_settings_of_io_daemon() -> None:
    config = parse_config({**SMALLEST, "aio": {"block_size": 65536, "queue_depth": 8}})
    assert (config.io_daemon.block_size, config.io_daemon.queue_depth) == (65536, 8)
    agreeing = {**SMALLEST, "aio": {"queue_depth": 8}, "io_daemon": {"queue_depth": 8}}
    assert parse_config(agreeing).io_daemon.queue_depth == 8
    error = _refusal({**SMALLEST, "aio": {"queue_depth": 8}, "io_daemon": {"queue_depth": 16}})
    assert error.key == "aio.queue_depth"
    assert "io_daemon.queue_depth" in error.remedy


# --- files


def test_a_file_and_a_dict_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALLEST))
    assert parse_config(file) == parse_config(str(file)) == parse_config(SMALLEST)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        ('{"train_batch_size": 8, "train_batch_size": 9}', "twice"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "twice"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert words in _refusal(file).remedy


def test_a_file_may_have_comments_and_commas_behind_the_last_entry(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        """// as DeepSpeed reads them
        {
          "train_batch_size": 8, # of all ranks
          "csv_monitor": {"enabled": false, "output_path": "//a/*b*/#c,}", "job_name": "a \\" // b",}, /* of
          two lines */
          "zero_optimization": {"stage": 3, "leaf_module": {"names": ["a", "b", // the last
          ]}}, # and a comment behind the last comma
        }
        """
    )
    config = parse_config(file)
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 3)
    assert (config.csv_monitor.output_path, config.csv_monitor.job_name) == ("//a/*b*/#c,}", 'a " // b')
    assert config.zero_optimization.leaf_module.names == ("a", "b")
    file.write_text('{\n  /* here */ "a": 1,\n  "b": 2]\n}')
    assert "line 3 column 9" in _refusal(file).remedy, "places are the file's"


HJSON = """{
  # as DeepSpeed reads it
  train_batch_size: 8
  bf16: {enabled: true}
  zero_optimization: {
    stage: 3
    offload_param: {"device": "cpu"}
  }
}
"""


def test_a_file_may_be_hjson(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(HJSON)
    config = parse_config(file)
    assert (config.train_batch_size, config.bf16.enabled) == (8, True)
    assert (config.zero_optimization.stage, config.zero_optimization.offload_param.device) == (3, "cpu")
    file.write_text(HJSON.replace("stage: 3", "stage: 3\n    stage: 2"))
    assert "twice" in _refusal(file).remedy
    file.write_text(HJSON.replace("stage: 3", "stage: three"))
    assert _refusal(file).key == "zero_optimization.stage"
    file.write_text(HJSON[:-3])
    assert "nor Hjson" in _refusal(file).remedy
    file.write_text("# nothing but a comment\n")
    assert "is not JSON" in _refusal(file).remedy
    file.write_text("{a:" * 20_000)
    assert "nested too deeply" in _refusal(file).remedy


def test_hjson_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    file = tmp_path / "config.json"
    file.write_text(HJSON)
    assert "infinity[hjson]" in _refusal(file).remedy


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in _refusal(tmp_path / "none.json").remedy
    assert "dict or the path" in _refusal(3).remedy


def test_the_callers_dict_is_left_as_it_was() -> None:
    config = _with("aio.queue_depth", 8, _with("zero_optimization.overlap_comm", True))
    before = copy.deepcopy(config)
    parse_config(config)
    assert config == before


def test_subsumed_keys_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = _with("zero_optimization.round_robin_gradients", True, _with("zero_optimization.allgather_bucket_size", 7))
    with caplog.at_level(logging.INFO, logger="infinity.config.parse"):
        parse_config(config)
        parse_config(config)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert any("allgather_bucket_size needs no setting" in message for message in messages)


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "one of the two"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states", "master_weights"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads", "bf16.enabled"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "write fp32"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", "weights are fp32 by the sections"),
        (
            {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bfloat16"}},
            "data_types.grad_accum_dtype",
            "write fp32 or fp16",
        ),
    ],
)
def test_dtypes_that_contradict_each_other_are_refused(sections: dict[str, Any], key: str, words: str) -> None:
    error = _refusal({**SMALLEST, **sections})
    assert error.key == key
    assert words in error.remedy


@pytest.mark.parametrize(("section", "dtype"), [("fp16", "float16"), ("bf16", "bf16"), (None, "fp32")])
def test_dtypes_that_agree_are_taken(section: str | None, dtype: str) -> None:
    sections: dict[str, Any] = {section: {"enabled": True}} if section else {}
    parsed = parse_config({**SMALLEST, **sections, "data_types": {"param_dtype": dtype}})
    assert parsed.data_types.param_dtype == (section or "fp32")
