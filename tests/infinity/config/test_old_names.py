"""Old and second spellings mean what they meant, with one note each; what contradicts a new name is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from infinity.config import Config, parse_config, resolve_config
from infinity.config.dialect import BY_PATH, SECTIONS
from infinity.config.old_names import OLD_NAMES, OldName
from infinity.config.origins import Origin
from infinity.errors import ConfigError

SMALLEST: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}


def _zero(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "zero_optimization": {"stage": 3, **keys}}


CASES: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (_zero(cpu_offload=True), _zero(offload_optimizer={"device": "cpu"}), ("zero_optimization.cpu_offload",)),
    (_zero(cpu_offload=False), _zero(), ("zero_optimization.cpu_offload",)),
    (_zero(cpu_offload_param=True), _zero(offload_param={"device": "cpu"}), ("zero_optimization.cpu_offload_param",)),
    (_zero(cpu_offload_params=True), _zero(offload_param={"device": "cpu"}), ("zero_optimization.cpu_offload_params",)),
    (
        _zero(cpu_offload=True, cpu_offload_use_pin_memory=True),
        _zero(offload_optimizer={"device": "cpu", "pin_memory": True}),
        ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_use_pin_memory"),
    ),
    (
        _zero(cpu_offload_use_pin_memory=True, offload_param={"device": "cpu"}, offload_optimizer={"device": "none"}),
        _zero(offload_param={"device": "cpu", "pin_memory": True}),
        ("zero_optimization.cpu_offload_use_pin_memory",),
    ),
    (
        _zero(stage3_gather_fp16_weights_on_model_save=True),
        _zero(stage3_gather_16bit_weights_on_model_save=True),
        ("zero_optimization.stage3_gather_fp16_weights_on_model_save",),
    ),
    ({**SMALLEST, "bfloat16": {"enabled": True}}, {**SMALLEST, "bf16": {"enabled": True}}, ("bfloat16",)),
    ({**SMALLEST, "bfloat16": None}, SMALLEST, ()),
    (
        {**SMALLEST, "bfloat16": {"enabled": True}, "bf16": {"enabled": True}},
        {**SMALLEST, "bf16": {"enabled": True}},
        ("bfloat16",),
    ),
    (
        {**SMALLEST, "allgather_size": 5e8},
        _zero(allgather_bucket_size=5e8),
        ("allgather_size",),
    ),
    (
        {**SMALLEST, "fp32_allreduce": True},
        {**SMALLEST, "communication_data_type": "fp32"},
        ("fp32_allreduce",),
    ),
    ({**SMALLEST, "fp32_allreduce": False}, SMALLEST, ("fp32_allreduce",)),
    ({**SMALLEST, "aio": {"num_threads": 4}}, {**SMALLEST, "aio": {"intra_op_parallelism": 4}}, ("aio.num_threads",)),
    (_zero(param_persistence_threshold="auto", cpu_offload=None), _zero(), ()),
    (
        _zero(offload_optimizer=None, cpu_offload=True),
        _zero(offload_optimizer={"device": "cpu"}),
        ("zero_optimization.cpu_offload",),
    ),
    *(
        (_zero(**{old.path.split(".")[1]: value}), _zero(**{old.write.split(".")[1]: value}), (old.path,))
        for old, value in (
            (old, True if "gather" in old.path or "use_all" in old.path else 1e5)
            for old in OLD_NAMES
            if old.write.startswith("zero_optimization.stage3_")
        )
        if old.write != "zero_optimization.stage3_model_persistence_threshold"
    ),
]


def _without_notes(config: Config) -> Config:
    return config.model_copy(update={"old_names": ()})


@pytest.mark.parametrize(("old", "new", "names"), CASES, ids=[str(case[2]) for case in CASES])
def test_an_old_name_means_what_the_new_one_means(
    old: dict[str, Any], new: dict[str, Any], names: tuple[str, ...]
) -> None:
    before = copy.deepcopy(old)
    parsed = parse_config(old)
    assert _without_notes(parsed) == parse_config(new)
    assert old == before
    assert len(parsed.old_names) == len(names)
    for name, note in zip(names, parsed.old_names, strict=True):
        assert note.startswith(f"{name} is an old name: write ")
    assert parsed.notes[: len(names)] == parsed.old_names


@pytest.mark.parametrize("old", OLD_NAMES, ids=lambda old: old.path)
def test_an_old_name_is_no_key_and_names_one(old: OldName) -> None:
    assert old.path not in BY_PATH
    assert old.if_boolean or old.path not in SECTIONS
    if old.meaning.__qualname__.startswith("_renamed"):
        assert old.write in BY_PATH


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_a_boolean_zero_optimization_is_a_stage(value: bool, stage: int) -> None:
    config = parse_config({"train_batch_size": 8, "zero_optimization": value, "allgather_size": 5e8})
    assert config.zero_optimization.stage == stage
    assert [note.split(" is an old")[0] for note in config.old_names] == ["zero_optimization", "allgather_size"]


def test_a_complaint_about_what_an_old_name_gave_names_the_old_one() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"train_batch_size": 8, "zero_optimization": {"stage": 1, "cpu_offload_param": True}})
    assert (caught.value.key, caught.value.value) == ("zero_optimization.offload_param.device", "cpu")
    assert "zero_optimization.cpu_offload_param says so" in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        (_zero(cpu_offload=True, offload_optimizer={"device": "nvme"}), "zero_optimization.cpu_offload", "contradicts"),
        (_zero(cpu_offload="true"), "zero_optimization.cpu_offload", "must be a boolean"),
        (_zero(cpu_offload={"device": "cpu"}), "zero_optimization.cpu_offload", "write offload_optimizer"),
        (_zero(param_persistence_threshold=1, stage3_param_persistence_threshold=2), None, "contradicts"),
        (
            {**SMALLEST, "bfloat16": {"enabled": True}, "bf16": {"enabled": False}},
            "bfloat16",
            "contradicts bf16.enabled",
        ),
        ({**SMALLEST, "bfloat16": True}, "bf16", "bfloat16 says so"),
        ({**SMALLEST, "bfloat16": {"enable": True}}, "bf16.enable", "did you mean bf16.enabled?"),
        (
            _zero(param_persistence_threshold="1e5"),
            "zero_optimization.stage3_param_persistence_threshold",
            "without quotes",
        ),
    ],
)
def test_an_old_name_that_cannot_be_meant_is_refused(config: dict[str, Any], key: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    assert key is None or caught.value.key == key
    assert words in str(caught.value)


@pytest.mark.parametrize("inside", [None, "auto", 4096])
def test_sizes_at_the_top_are_taken_where_the_section_is_silent(inside: Any) -> None:
    """As trainers of preferences write them, with nine tenths of a number of elements."""
    name = "stage3_prefetch_bucket_size"
    config = {**_zero(**{name: inside}), f"zero_optimization.{name}": 0.9 * 64 * 64}
    parsed = parse_config(config)
    assert getattr(parsed.zero_optimization, name) == (4096 if inside == 4096 else 3686)
    said = f"zero_optimization.{name} stands at the top: write it inside zero_optimization"
    assert parsed.old_names == (f"{said}, whose own value goes before it",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero_optimization.reduce_bucket_size", "5e8"),
        ("zero_optimization.reduce_bucket_size", -1),
        ("zero_optimization.reduce_bucket_size", float("nan")),
        ("zero_optimization.stage", 2),
        ("optimizer.params.lr", 1e-3),
    ],
)
def test_other_dotted_names_and_wrong_sizes_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**_zero(), name: value})
    assert caught.value.key == name


def test_the_origin_of_a_value_is_the_old_name() -> None:
    resolved = resolve_config(_zero(cpu_offload=True, param_persistence_threshold=7))
    device = resolved.provenance["zero_optimization.offload_optimizer.device"]
    assert (device.origin, device.source) == (Origin.MAPPED, "zero_optimization.cpu_offload")
    threshold = resolved.provenance["zero_optimization.stage3_param_persistence_threshold"]
    assert str(threshold) == "mapped from zero_optimization.param_persistence_threshold"
