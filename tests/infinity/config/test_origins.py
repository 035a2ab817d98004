"""Where each value comes from, and that a resolved configuration says the same when it is parsed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.config import parse_config, resolve_config
from infinity.config.origins import Origin, flattened

SMALLEST: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}


def _origins(config: dict[str, Any], **options: Any) -> dict[str, str]:
    return {path: str(origin) for path, origin in resolve_config(config, **options).provenance.items()}


def test_every_value_has_an_origin() -> None:
    resolved = resolve_config({**SMALLEST, "scheduler": {"type": "WarmupLR"}, "optimizer": {"type": "adam"}})
    assert [path for path, _, _ in resolved.rows()] == [path for path, _ in flattened(resolved.values())]
    assert resolved.provenance.keys() == {path for path, _ in flattened(resolved.values())}


def test_given_default_and_auto() -> None:
    origins = _origins(
        {**SMALLEST, "gradient_clipping": 0.0, "steps_per_print": "auto", "bf16": {"enabled": None}, "fp16": None}
    )
    assert origins["gradient_clipping"] == "given"
    assert origins["steps_per_print"] == 'default, "auto"'
    assert origins["bf16.enabled"] == origins["fp16.enabled"] == origins["scheduler"] == "default"


@pytest.mark.parametrize(
    ("keys", "derived"),
    [
        (
            {"train_batch_size": 8},
            {"train_micro_batch_size_per_gpu": "derived from train_batch_size, world size 2"},
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": "auto"},
            {
                "train_batch_size": "derived from train_micro_batch_size_per_gpu, gradient_accumulation_steps, "
                "world size 2"
            },
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
            {
                "gradient_accumulation_steps": "derived from train_batch_size, train_micro_batch_size_per_gpu, "
                "world size 2"
            },
        ),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, {}),
    ],
)
def test_batch_sizes_follow_from_each_other(keys: dict[str, Any], derived: dict[str, str]) -> None:
    origins = _origins({"zero_optimization": {"stage": 3}, **keys}, world_size=2)
    assert {path: said for path, said in origins.items() if said.startswith("derived")} == derived


def test_settings_of_aio_reach_io_daemon() -> None:
    resolved = resolve_config({**SMALLEST, "aio": {"queue_depth": 8}})
    origin = resolved.provenance["io_daemon.queue_depth"]
    assert (origin.origin, origin.source) == (Origin.DERIVED, "aio.queue_depth")
    assert resolved.provenance["aio.queue_depth"].origin is Origin.GIVEN


CONFIGURATIONS: list[dict[str, Any]] = [
    SMALLEST,
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bfloat16": {"enabled": True},
        "optimizer": {"type": "adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "adam_w_mode": False}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [1e-5], "cycle_max_lr": 1e-3}},
        "aio": {"block_size": 65536},
        "steps_per_print": float("inf"),
    },
]


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=["smallest", "much"])
def test_a_resolved_configuration_resolves_to_itself(config: dict[str, Any], tmp_path: Path) -> None:
    config = {**config, "zero_optimization": {"stage": 3, "overlap_comm": True, "cpu_offload": True}}
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    resolved = resolve_config(config, world_size=2)
    again = resolve_config(resolved.values(), world_size=2)
    assert again.values() == resolved.values()
    assert again.config == resolved.config.model_copy(update={"subsumed": (), "old_names": ()})
    assert all(origin.origin in (Origin.GIVEN, Origin.DEFAULT) for origin in again.provenance.values())


# --- before a trainer has filled in its part


UNFILLED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e8,
    },
}


def test_init_takes_what_it_needs_of_a_file_that_a_trainer_has_not_filled_in() -> None:
    config = parse_config(UNFILLED, before_trainer=True)
    assert config.zero_optimization.sub_group_size == 100_000_000
    assert config.scheduler is None
    with pytest.raises(ValueError, match="only a trainer") as caught:
        parse_config(UNFILLED)
    for key in ("gradient_clipping", "bf16.enabled", "optimizer.params.lr", "scheduler.params.total_num_steps"):
        assert f"{key} = 'auto'" in str(caught.value)
    assert "neither is given" in str(caught.value)
    assert "sub_group_size" not in str(caught.value)


def test_init_needs_no_batch_size_but_judges_what_is_there() -> None:
    assert parse_config({"zero_optimization": {"stage": 3}}, before_trainer=True).train_batch_size == 1
    with pytest.raises(ValueError, match="multiple of"):
        parse_config({**SMALLEST, "train_batch_size": 3}, world_size=2, before_trainer=True)
    with pytest.raises(ValueError, match="did you mean"):
        parse_config({**UNFILLED, "gradient_cliping": 1.0}, before_trainer=True)


def test_what_a_trainer_filled_in_is_given() -> None:
    filled = {
        **UNFILLED,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 0.1e2}},
    }
    config = parse_config(filled, world_size=2)
    assert config.scheduler is not None
    assert (config.train_batch_size, config.scheduler.params.model_dump()["warmup_num_steps"]) == (16, 10)
