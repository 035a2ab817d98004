"""What holds each key that works: a value of it, and the test that would fail if the engine did not heed it.

``python -m tests.infinity.config.keys`` writes docs/config-keys.md from this and from the dialect itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from infinity.config.dialect import KEYS, Key, Standing
from infinity.config.old_names import OLD_NAMES
from infinity.config.reference import note_of

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "config-keys.md"
BEFORE = {Standing.WORKS: 43, Standing.SUBSUMED: 37, Standing.REFUSED: 95}
"""Counts of the foundation, before stages 0 to 2, fp16 and other optimizers were begun."""

HEAD = """\
# Keys of the configuration

Every key of DeepSpeed's dialect, and of our own section `io_daemon`, is in one of three classes. It **works**, and
a test holds that; it is **subsumed**: accepted, since the engine always does so or has no such limit; or it is
**refused** with a reason and a remedy, but for the values that switch it off. No key is parsed and ignored, and an
unknown one is refused with the closest that is known. `infinity config check FILE` applies this table to a file,
`infinity config schema` prints it for editors. Written by `python -m tests.infinity.config.keys`.
"""


class Example(NamedTuple):
    value: Any
    """Something that passes beside a batch size of 8 and stage 3."""
    test: str
    """File::function, from tests/ on."""


_CONFIG, _ORIGINS = "infinity/config/test_config.py", "infinity/config/test_origins.py"
_SETTINGS, _RULES = "infinity/test_settings.py", "infinity/weights/test_live_set_rules.py"
_TRAVEL = "infinity/test_stages_on_ranks.py::test_what_travels_at_each_stage_and_as_the_keys_say"
_CELL = "infinity/test_parity.py::test_cells"
_BATCH = f"{_CONFIG}::test_two_of_three_batch_settings_give_the_third"
_OPTIMIZER = f"{_SETTINGS}::test_the_optimizers_parameters_are_torchs"
_NAMED = "infinity/update/test_rules.py::test_an_optimizer_of_the_configuration_steps_as_torch_or_the_paper"
_SCALE, _PRECISION = "infinity/update/test_loss_scale.py", "infinity/test_precision.py"
_AUTOCAST = "infinity/test_torch_autocast.py"
_SEQUENCE = f"{_SCALE}::test_scales_skips_and_norms_are_those_of_a_plain_loop"
_STEPPED = f"{_PRECISION}::test_bf16_weights_are_stepped_as_they_are"
_LEAVES = f"{_SETTINGS}::test_leaf_modules_of_the_configuration"
_RATES = "infinity/update/test_schedules.py::test_a_thousand_updates_run_at_the_documented_rates"
_MOMENTA = "infinity/update/test_schedules.py::test_momentum_goes_against_the_rate_and_grows_after_the_cycle"
_TUNING = "integration/test_tuning.py::test_the_emitted_section_is_accepted_and_used"
_CONNECTION = "infinity/tiers/test_connection.py"
_NO_PATH = "integration/test_engine_faults.py::test_nvme_without_a_path_is_refused_with_the_key"
_LOCKED = f"{_CONNECTION}::test_pin_memory_asks_for_locked_memory_or_none"

_OBSERVING = "infinity/observe/test_observing.py"
_BREAKDOWNS = f"{_OBSERVING}::test_breakdowns_and_the_configuration_are_logged"

_TOP = {
    "train_batch_size": Example(8, _BATCH),
    "train_micro_batch_size_per_gpu": Example(8, _BATCH),
    "gradient_accumulation_steps": Example(1, _CELL),
    "managed_gradient_accumulation": Example(
        False, f"{_SETTINGS}::test_whoever_manages_accumulation_updates_with_each_step"
    ),
    "gradient_clipping": Example(1.0, _CELL),
    "steps_per_print": Example(100, f"{_SETTINGS}::test_progress_is_printed_every_so_many_steps"),
    **{name: Example(True, _BREAKDOWNS) for name in ("wall_clock_breakdown", "memory_breakdown", "dump_state")},
    "log_level": Example("warning", f"{_OBSERVING}::test_the_level_of_the_logs_is_the_configurations"),
    "dataloader_drop_last": Example(True, f"{_SETTINGS}::test_a_last_batch_that_is_not_full"),
    "communication_data_type": Example(
        "fp32", f"{_SETTINGS}::test_gradients_travel_and_wait_in_the_dtypes_that_were_asked_for"
    ),
    "prescale_gradients": Example(True, _TRAVEL),
    "gradient_predivide_factor": Example(2.0, _TRAVEL),
    "gradient_allreduce_op": Example("sum", _TRAVEL),
    **{f"zero_optimization.{name}": Example(False, _TRAVEL) for name in ("reduce_scatter", "allgather_partitions")},
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Example(True, _TRAVEL),
    "bf16.enabled": Example(True, _CELL),
    "bf16.check_grad_overflow": Example(True, f"{_SCALE}::test_bf16_checks_its_gradients_where_it_is_told_to"),
    **{f"bf16.{name}": Example(True, _STEPPED) for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")},
    "fp16.enabled": Example(True, _CELL),
    "fp16.auto_cast": Example(True, f"{_SCALE}::test_auto_cast_casts_floating_inputs_and_nothing_else"),
    "fp16.loss_scale": Example(128.0, f"{_SCALE}::test_a_skipped_step_leaves_weights_schedule_and_moments_alone"),
    **{
        f"fp16.{name}": Example(value, _SEQUENCE)
        for name, value in {
            "initial_scale_power": 32,
            "loss_scale_window": 500,
            "hysteresis": 4,
            "consecutive_hysteresis": True,
        }.items()
    },
    "fp16.min_loss_scale": Example(
        0.5, f"{_SCALE}::test_an_overflow_at_the_least_scale_is_an_error_and_changes_nothing"
    ),
    "torch_autocast.enabled": Example(True, f"{_AUTOCAST}::test_losses_and_weights_are_those_of_a_plain_loop"),
    "torch_autocast.dtype": Example("fp16", f"{_AUTOCAST}::test_in_fp16_the_loss_is_scaled_as_by_torchs_grad_scaler"),
    "data_types.grad_accum_dtype": Example("fp32", f"{_PRECISION}::test_gradients_add_up_in_the_dtype_asked_for"),
    "data_types.param_dtype": Example("fp32", "infinity/config/test_config.py::test_dtypes_that_agree_are_taken"),
    "data_types.buffer_dtype": Example(
        "fp32",
        "infinity/weights/test_buffer_dtypes.py::test_constants_stay_in_fp32_and_values_follow_fp32_weights_into_16_bits",
    ),
    "data_types.keep_in_fp32_modules": Example(["router"], f"{_PRECISION}::test_buffers_that_are_named_stay_in_fp32"),
    "optimizer.type": Example("adam", _OPTIMIZER),
    "optimizer.params.lr": Example(1e-4, _OPTIMIZER),
    "optimizer.params.betas": Example([0.9, 0.95], _OPTIMIZER),
    "optimizer.params.eps": Example(1e-6, _OPTIMIZER),
    "optimizer.params.weight_decay": Example(0.1, _OPTIMIZER),
    "optimizer.params.adam_w_mode": Example(False, _OPTIMIZER),
    **{
        f"optimizer.params.{name}": Example(value, _NAMED)
        for name, value in {
            "amsgrad": True,
            "bias_correction": False,
            "torch_adam": True,
            "momentum": 0.9,
            "dampening": 0.1,
            "nesterov": True,
            "lr_decay": 0.01,
            "initial_accumulator_value": 0.1,
            "muon_lr": 0.02,
            "adam_lr": 1e-3,
            "ns_method": "standard",
            "alpha": 0.9,
            "centered": True,
            "rho": 0.8,
            "momentum_decay": 0.01,
            "decoupled_weight_decay": True,
            "lambd": 1e-3,
            "t0": 10,
            "etas": [0.4, 1.3],
            "step_sizes": [1e-5, 10],
        }.items()
    },
}
_SCHEDULES = {
    "scheduler.type": Example("LRRangeTest", "infinity/update/test_schedules.py::test_every_schedule_is_covered"),
    **{
        f"scheduler.params.{name}": Example(value, _RATES)
        for name, value in {
            "total_num_steps": 100,
            "warmup_min_lr": 1e-6,
            "warmup_max_lr": 1e-3,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.01,
            "warmup_num_steps": 10,
            "warmup_type": "linear",
            "cycle_min_lr": 1e-5,
            "cycle_max_lr": 1e-3,
            "decay_lr_rate": 0.1,
            "cycle_first_step_size": 100,
            "cycle_second_step_size": 50,
            "cycle_first_stair_count": 4,
            "cycle_second_stair_count": 2,
            "decay_step_size": 10,
            "lr_range_test_min_lr": 1e-5,
            "lr_range_test_step_size": 10,
            "lr_range_test_step_rate": 0.5,
            "lr_range_test_staircase": True,
        }.items()
    },
    "scheduler.params.cycle_momentum": Example(
        False, "infinity/update/test_schedules.py::test_momentum_is_left_alone_where_it_is_told_so"
    ),
    **{
        f"scheduler.params.{name}": Example(value, _MOMENTA)
        for name, value in {"cycle_min_mom": 0.8, "cycle_max_mom": 0.95, "decay_mom_rate": 0.01}.items()
    },
    "scheduler.params.last_batch_iteration": Example(
        99, "infinity/update/test_schedules.py::test_last_batch_iteration_begins_in_the_middle"
    ),
}
_ZERO = {
    "stage": Example(3, "infinity/test_stages.py::test_every_stage_gives_the_bits_of_stage_3"),
    "reduce_bucket_size": Example(
        5e8, "infinity/plan/test_grouping.py::test_persistent_parameters_are_cut_into_buckets"
    ),
    "sub_group_size": Example(1e8, "infinity/plan/test_memory_plan.py::test_a_chunk_never_exceeds_the_sub_group"),
    "stage3_prefetch_bucket_size": Example(1e6, f"{_RULES}::test_the_next_groups_are_leased_ahead_within_the_bucket"),
    "stage3_param_persistence_threshold": Example(
        0, "infinity/plan/test_grouping.py::test_small_parameters_are_persistent"
    ),
    "stage3_model_persistence_threshold": Example(
        1e6, "infinity/plan/test_grouping.py::test_persistent_parameters_are_bounded_together"
    ),
    "stage3_max_live_parameters": Example(0, f"{_RULES}::test_a_group_is_kept_only_within_the_live_limit"),
    "stage3_max_reuse_distance": Example(
        0, f"{_RULES}::test_a_group_is_kept_if_it_is_needed_again_within_the_reuse_distance"
    ),
    "ignore_unused_parameters": Example(
        False, f"{_SETTINGS}::test_unused_parameters_end_the_step_where_they_are_not_ignored"
    ),
    "enable_sanity_checks": Example(
        True, "infinity/weights/test_staging.py::test_a_change_that_nobody_keeps_is_refused_where_checks_are_asked_for"
    ),
    "stage3_gather_16bit_weights_on_model_save": Example(
        True, "infinity/test_weight_files.py::test_what_trainers_take_into_memory"
    ),
    "leaf_module.classes": Example(["MoE"], _LEAVES),
    "leaf_module.names": Example(["layers.0"], _LEAVES),
    "leaf_module.name_suffixes": Example(["experts"], _LEAVES),
    "offload_param.device": Example("cpu", _CELL),
    "offload_param.nvme_path": Example("/tmp", _NO_PATH),
    "offload_param.pin_memory": Example(True, _LOCKED),
    "offload_optimizer.device": Example("cpu", _CELL),
    "offload_optimizer.nvme_path": Example("/tmp", _NO_PATH),
    "offload_optimizer.ratio": Example(
        0.3, "infinity/test_device_share.py::test_no_bit_depends_on_the_part_that_stays"
    ),
    "offload_optimizer.pin_memory": Example(True, _LOCKED),
}
_IO = {
    "aio.block_size": Example(65536, f"{_CONFIG}::test_aio_names_two_settings_of_io_daemon"),
    "aio.queue_depth": Example(8, f"{_CONFIG}::test_aio_names_two_settings_of_io_daemon"),
    "io_daemon.socket": Example("/run/io.sock", f"{_CONNECTION}::test_a_daemon_that_is_named_is_the_one"),
    "io_daemon.host_budget_bytes": Example(
        1e9, "integration/test_engine_faults.py::test_too_small_a_budget_names_the_smallest_that_works"
    ),
    "io_daemon.swap_dirs": Example(["/tmp"], f"{_CONFIG}::test_swap_directories_are_collected_once_each"),
    "io_daemon.engine": Example("require:posix", f"{_CONNECTION}::test_settings_reach_the_daemon_that_is_started"),
    "io_daemon.block_size": Example(65536, _TUNING),
    "io_daemon.queue_depth": Example(8, _TUNING),
    "io_daemon.update": Example(
        "in_step", "infinity/test_update_on_use.py::test_whoever_looks_first_sees_what_an_update_in_step_leaves"
    ),
    "io_daemon.update_in_backward": Example(
        True, "infinity/test_update_in_backward.py::test_the_bits_are_those_of_an_update_after_backward"
    ),
    "io_daemon.master_weights": Example(
        "split", "infinity/test_split_masters.py::test_the_bits_are_those_of_whole_masters"
    ),
    "io_daemon.activation_checkpoints": Example(
        True, "infinity/tiers/test_activations.py::test_the_bits_are_those_of_inputs_in_memory"
    ),
    "io_daemon.moments": Example("bf16", "infinity/test_moments.py::test_the_bits_are_those_of_a_loop_that_rounds"),
    "io_daemon.verify_checksums": Example(False, f"{_CONNECTION}::test_settings_reach_the_daemon_that_is_started"),
    "io_daemon.start": Example("never", f"{_CONNECTION}::test_no_daemon_is_started_where_none_may_be"),
}
_CHECKPOINTING = "infinity/test_checkpointing.py"
_ACTIVATIONS = {
    f"activation_checkpointing.{name}": Example(value, f"{_CHECKPOINTING}::{test}")
    for name, value, test in (
        ("cpu_checkpointing", True, "test_inputs_wait_where_they_are_told_to_and_no_bit_changes"),
        ("contiguous_memory_optimization", True, "test_inputs_wait_where_they_are_told_to_and_no_bit_changes"),
        ("number_checkpoints", 4, "test_more_checkpoints_than_were_told_of_are_refused"),
        ("synchronize_checkpoint_boundary", True, "test_each_call_is_waited_for_and_timed"),
        ("profile", True, "test_each_call_is_waited_for_and_timed"),
    )
}
_MONITORS = {
    f"{section}.{name}": Example(value, f"{_OBSERVING}::{test}")
    for section, test, values in (
        (
            "tensorboard",
            "test_wandb_and_tensorboard_are_told_the_figures",
            {"enabled": True, "output_path": "runs", "job_name": "one"},
        ),
        (
            "csv_monitor",
            "test_csv_files_hold_the_figures_of_every_step",
            {"enabled": True, "output_path": "runs", "job_name": "one"},
        ),
        (
            "wandb",
            "test_wandb_and_tensorboard_are_told_the_figures",
            {"enabled": True, "group": "g", "team": "t", "project": "p"},
        ),
        (
            "flops_profiler",
            "test_operations_of_one_forward_are_counted_by_module",
            {
                "enabled": True,
                "profile_step": 2,
                "module_depth": 1,
                "top_modules": 3,
                "detailed": False,
                "recompute_fwd_factor": 1.0,
                "output_file": "flops.txt",
            },
        ),
        (
            "comms_logger",
            "test_collectives_are_counted_on_every_rank",
            {"enabled": True, "prof_all": False, "prof_ops": ["all_gather"]},
        ),
        ("comms_logger", "test_each_collective_is_logged_where_it_is_asked_for", {"verbose": True, "debug": True}),
        ("timers.throughput", "test_samples_a_second_are_of_the_steps_since_the_last_line", {"enabled": False}),
        ("timers.throughput", "test_the_device_is_waited_for_where_that_is_asked_for", {"synchronized": False}),
    )
    for name, value in values.items()
}
EXAMPLES: dict[str, Example] = {
    **_TOP,
    **_SCHEDULES,
    **{f"zero_optimization.{name}": example for name, example in _ZERO.items()},
    **_IO,
    **_ACTIVATIONS,
    **_MONITORS,
}
"""By path, every key that works."""


def document() -> str:
    """The table as Markdown."""
    counts = Counter(key.standing for key in KEYS)
    now = ", ".join(f"{counts[standing]} {standing.value}" for standing in Standing)
    before = ", ".join(f"{count} {standing.value}" for standing, count in BEFORE.items())
    lines = [HEAD, f"Now {now}; before the dialect was filled {before}.", ""]
    for standing in Standing:
        lines += [f"## {standing.value.capitalize()}", "", *_table(standing), ""]
    lines += [
        "## Old names",
        "",
        "Each is read as what it meant, with one warning.",
        "",
        "| written | read as |",
        "|---|---|",
    ]
    lines += [f"| `{old.path}`{' as a boolean' if old.if_boolean else ''} | `{old.write}` |" for old in OLD_NAMES]
    return "\n".join(lines) + "\n"


def _table(standing: Standing) -> list[str]:
    keys = [key for key in KEYS if key.standing is standing]
    if standing is Standing.WORKS:
        rows = [f"| `{key.path}` | {note_of(key)} | `{EXAMPLES[key.path].test}` |" for key in keys]
        return ["| key | | held by |", "|---|---|---|", *rows]
    if standing is Standing.SUBSUMED:
        return ["| key | why |", "|---|---|", *(f"| `{key.path}` | {note_of(key)} |" for key in keys)]
    return [
        "| key | why | remedy |",
        "|---|---|---|",
        *(f"| `{key.path}` | {note_of(key)} | {_remedy(key)} |" for key in keys),
    ]


def _remedy(key: Key) -> str:
    return key.remedy.replace("|", "\\|")


def main() -> int:
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
