"""Small names around the engine: sections as classes, schedules from options, model parallelism by any of its names."""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import config as runtime_config  # type: ignore[import-not-found]
from deepspeed.runtime import config_utils, lr_schedules, precision_config  # type: ignore[import-not-found]
from deepspeed.runtime import utils as runtime_utils  # type: ignore[import-not-found]
from deepspeed.runtime.zero import partition_parameters  # type: ignore[import-not-found]
from deepspeed.utils import bwc, zero_to_fp32  # type: ignore[import-not-found]
from pydantic import Field

from tests.infinity.deepspeed.differential.case import case, cases_over, raised


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1}, {"params": [torch.nn.Parameter(torch.ones(2))]}],
        lr=0.2,
    )


COUNTS = {
    "warmup": ("WarmupLR", "warmup_num_steps", {}),
    "warmup-of-decay": ("WarmupDecayLR", "warmup_num_steps", {"total_num_steps": 9}),
    "warmup-of-cosine": ("WarmupCosineLR", "warmup_num_steps", {"total_num_steps": 9}),
    "range": ("LRRangeTest", "lr_range_test_step_size", {}),
    "up": ("OneCycle", "cycle_first_step_size", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
    "down": ("OneCycle", "cycle_second_step_size", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
}


@cases_over(COUNTS)
def numbers_of_updates(_directory: Path, given: tuple[str, str, dict[str, Any]]) -> Any:
    name, key, others = given
    counts = (-3, 0, 1, 2) if name == "OneCycle" else (-3, 0, 1, 2.5, "5", None)
    given = [{**others, key: count} for count in counts]
    return [raised(lambda params=params: getattr(lr_schedules, name)(optimizer(), **params)) for params in given]


@case()
def what_schedules_show(_directory: Path) -> Any:
    warmup = lr_schedules.WarmupLR(optimizer(), 0.01, [0.3, 0.4], 4)
    cosine = lr_schedules.WarmupCosineLR(optimizer(), 9, warmup_num_steps=3)
    cycle = lr_schedules.OneCycle(optimizer(), 0.01, 0.1, cycle_first_step_size=3, cycle_second_step_size=5)
    still = lr_schedules.OneCycle(optimizer(), 0.01, 0.1, cycle_momentum=False)
    seen = [cycle.get_mom()]
    for _ in range(11):
        cosine.step()
        cycle.step()
        seen.append((cosine.get_lr_ratio(), cycle.get_mom()))
    shown = [warmup.min_lrs, warmup.max_lrs, cycle.min_lrs, cycle.max_lrs, cycle.step_ratio, cycle.total_size]
    return seen, shown, still.get_mom()


@case()
def schedules_from_options(_directory: Path) -> Any:
    parser = argparse.ArgumentParser()
    lr_schedules.add_tuning_arguments(parser)
    words = ["--lr_range_test_staircase", "--warmup_num_steps", "7", "--cycle_max_lr", "0.5"]
    names = [*lr_schedules.VALID_LR_SCHEDULES, "Nothing"]
    made = [lr_schedules.get_config_from_args(parser.parse_args([*words, "--lr_schedule", name])) for name in names]
    return made, lr_schedules.get_config_from_args(parser.parse_args([]))


@case()
def options_over_parameters(_directory: Path) -> Any:
    seen = {}
    for name in ("lr_range_test", "1cycle", "warmupLR", "warmupCosineLR"):
        params = {"warmup_num_steps": 3, "cycle_max_lr": 0.25}
        given = argparse.Namespace(warmup_num_steps=7, lr_range_test_min_lr=0.125, cycle_max_lr=None)
        getattr(lr_schedules, f"override_{name}_params")(given, params)
        seen[name] = params
    return seen


@case()
def rates_that_sections_speak_of(_directory: Path) -> Any:
    sections = [
        {},
        {"type": "WarmupLR"},
        {"type": "Nothing", "params": {}},
        {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.5}},
        {"type": "OneCycle", "params": {"cycle_max_lr": 0.75}},
        {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}},
        {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.25}},
        {"type": "WarmupCosineLR", "params": {}},
    ]
    return [lr_schedules.get_lr_from_config(section) for section in sections]


@case()
def names_of_optimizers(_directory: Path) -> Any:
    kinds = ("ADAGRAD", "ADAM", "ADAMW", "LAMB", "LION", "MUON")
    others = ("TORCH_ADAM_PARAM", "ADAM_W_MODE", "ADAM_W_MODE_DEFAULT")
    return [getattr(runtime_config, name) for name in (*(f"{kind}_OPTIMIZER" for kind in kinds), *others)]


FP16 = {
    "nothing": {},
    "empty": {"fp16": {}},
    "on": {"fp16": {"enabled": True}},
    "static": {"fp16": {"enabled": True, "loss_scale": 128}},
    "own": {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 4, "loss_scale_window": 7,
                     "min_loss_scale": 2, "consecutive_hysteresis": True, "auto_cast": True}},
    "auto": {"fp16": {"enabled": "auto", "hysteresis": "auto"}},
}  # fmt: skip


@cases_over(FP16)
def section_fp16(_directory: Path, given: dict[str, Any]) -> Any:
    section = precision_config.get_float16_config(given)
    return section.model_dump(), section.initial_dynamic_scale(), section.dynamic_loss_scale_args()


BF16 = {
    "nothing": {},
    "on": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "old": {"bfloat16": {"enabled": True, "immediate_grad_update": True}},
}


@cases_over(BF16)
def section_bf16(_directory: Path, given: dict[str, Any]) -> Any:
    return precision_config.get_bfloat16_config(given).model_dump()


@case()
def sections_in_16_bits_that_are_refused(_directory: Path) -> Any:
    return [
        raised(lambda: precision_config.get_float16_config({"fp16": {"hysteresis": "x"}})),
        raised(lambda: precision_config.get_float16_config({"fp16": {"nothing": 1}})),
        raised(lambda: precision_config.get_float16_config({"fp16": {"loss_scale": -1}})),
        raised(lambda: precision_config.get_bfloat16_config({"bf16": {"nothing": 1}})),
    ]


QUESTIONS = [
    *(f"bwc_tensor_model_parallel_{what}" for what in ("rank", "world_size", "group")),
    *(f"bwc_pipeline_parallel_{what}" for what in ("world_size", "group")),
]
KINDS = ("tensor_model_parallel", "slice_parallel", "model_parallel", "pipeline_model_parallel", "pipe_parallel")


@cases_over({"all": KINDS} | {kind: (kind,) for kind in KINDS} | {"none": ()})
def who_shares_the_model(_directory: Path, kinds: tuple[str, ...]) -> Any:
    answers = {f"get_{kind}_{what}": f"{kind} {what}" for kind in kinds for what in ("rank", "world_size", "group")}
    mpu = type("Mpu", (), {name: (lambda self, said=said: said) for name, said in answers.items()})()

    def answer(name: str, *given: Any) -> Any:
        failed = raised(lambda: getattr(bwc, name)(*given))
        return getattr(bwc, name)(*given) if failed == "nothing" else failed

    return [(answer(name), answer(name, mpu)) for name in QUESTIONS]


@case()
def numbers_in_16_bits_that_are_refused(_directory: Path) -> Any:
    given = (True, "nan", float("inf"), -float("inf"), float("nan"), -1, "x", 0, 64, 2.5, "128")
    return [raised(lambda value=value: precision_config.DeepSpeedFP16Config(loss_scale=value)) for value in given]


@case()
def what_is_no_loss_scale_is_told(_directory: Path) -> Any:
    def told(value: Any) -> bool:
        try:
            precision_config.DeepSpeedFP16Config(loss_scale=value)
        except ValueError as error:
            return "loss_scale must be a number" in str(error)
        return False

    return [told(value) for value in (True, "x", [], {}, None, 2, "3")]


class Inner(config_utils.DeepSpeedConfigModel):
    depth: int = 2
    shade: str = "grey"


class Own(config_utils.DeepSpeedConfigModel):
    width: int = 4
    replace_method: str = "none"
    inner: Inner = Inner()
    breadth: int = Field(
        0, json_schema_extra={"deprecated": True, "new_param": "width", "new_param_fn": lambda value: value * 2}
    )
    low: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "inner.depth"})
    gone: int = Field(0, json_schema_extra={"deprecated": True, "deprecated_msg": "it did nothing"})
    kept: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "width", "set_new_param": False})


OWN = {
    "nothing": {},
    "auto": {"width": "auto", "replace_method": "auto"},
    "given": {"width": 7, "inner": {"depth": 3}},
    "old": {"breadth": 5},
    "old below": {"low": 9},
    "old alone": {"gone": 1, "kept": 8},
    "both": {"breadth": 5, "width": 3},
    "both below": {"low": 9, "inner": {"depth": 3}},
    "unknown": {"height": 1},
    "wrong": {"width": "broad"},
    "wrong below": {"inner": {"depth": "deep"}},
}


@cases_over(OWN)
def sections_of_ones_own(_directory: Path, given: dict[str, Any]) -> Any:
    failed = raised(lambda: Own(**given))
    if failed != "nothing":
        return failed
    section = Own(**given)
    shown = {name: getattr(section, name, "gone") for name in ("width", "replace_method", "breadth", "low", "kept")}
    refused = [raised(lambda name=name: setattr(section, name, "x")) for name in ("width", "height")]
    section.width = 11
    return shown, section.inner.depth, refused, section.width, raised(lambda: Own(strict=True, width="auto"))


@case()
def defaults_of_sections(_directory: Path) -> Any:
    asked = ("width", "inner", "height")
    return [raised(lambda name=name: config_utils.get_config_default(Own, name)) for name in asked]


BATCHES = [(train, micro, steps) for train in (None, 0, 8) for micro in (None, 0, 2, 3) for steps in (None, 0, 2, 4)]


@case()
def batch_sizes_that_are_filled_in(_directory: Path) -> Any:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    seen = []
    for given in BATCHES:
        config = runtime_config.DeepSpeedConfig({"train_batch_size": 4})
        for name, value in zip(names, given, strict=True):
            setattr(config, name, value)
        failed = raised(config._configure_train_batch_size)
        seen.append([getattr(config, name) for name in names] if failed == "nothing" else "refused")
    return seen


@case()
def files_of_checkpoints(directory: Path) -> Any:
    found = [raised(lambda: zero_to_fp32.get_optim_files(str(directory)))]
    for number in (10, 9, 1):
        (directory / f"bf16_zero_pp_rank_{number}_mp_rank_00_optim_states.pt").touch()
        (directory / f"zero_pp_rank_{number}_mp_rank_00_model_states.pt").touch()
    (directory / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    lists = zero_to_fp32.get_optim_files(str(directory)), zero_to_fp32.get_model_state_files(str(directory))
    found += [[Path(path).name for path in each] for each in lists]
    found += [Path(zero_to_fp32.get_model_state_file(str(directory), 3)).name]
    return found, raised(lambda: zero_to_fp32.get_model_state_file(str(directory), 2))


@case()
def weights_in_another_dtype(_directory: Path) -> Any:
    whole = torch.arange(6.0).reshape(2, 3)
    state = {"a": whole, "tied": whole, "across": whole.t(), "count": torch.arange(3)}
    seen = []
    for dtype in (None, "fp16", "torch.bfloat16", "BF16", torch.float32):
        made = zero_to_fp32.to_torch_tensor(state, dtype=dtype)
        empty = zero_to_fp32.to_torch_tensor(state, return_empty_tensor=True, dtype=dtype)
        seen.append([
            [(name, str(each.dtype), list(each.shape), each.is_contiguous()) for name, each in of.items()]
            + [of["a"] is of["tied"]]
            for of in (made, empty)
        ])  # fmt: skip
        seen.append({name: each.tolist() for name, each in made.items()})
    return seen, [raised(lambda d=d: zero_to_fp32.to_torch_tensor(state, dtype=d)) for d in ("int8", torch.int8)]


@case()
def parameters_that_a_backward_uses(_directory: Path) -> Any:
    used = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    unused = torch.nn.Parameter(torch.ones(2))
    counts = []

    def count(_gradient: torch.Tensor) -> None:
        counts.append(runtime_utils.count_used_parameters_in_backward([*used, used[0], frozen, unused]))

    for tail in (used, used[:2]):
        inputs = torch.ones(2, requires_grad=True)
        middle = inputs * used[0]
        middle.register_hook(count)
        loss = middle.sum()
        for each in tail:
            loss = loss + (middle * each).sum()
        loss.backward()
    return counts, raised(lambda: runtime_utils.count_used_parameters_in_backward(used))


@case()
def handles_that_are_waited_for_as_one(_directory: Path) -> Any:
    seen = []
    handles = [type("Handle", (), {"wait": lambda self, **how: seen.append(how)})() for _ in range(2)]
    partition_parameters.MultipleAllGatherHandles(handles).wait()
    partition_parameters.MultipleAllGatherHandles(handles).wait(handle_dependency=False)
    return seen, partition_parameters.partitioned_param_data_shape


@case()
def cycles_of_another_number_of_groups(_directory: Path) -> Any:
    given = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    names = ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom")
    return [
        raised(lambda name=name, n=n: lr_schedules.OneCycle(optimizer(), **{**given, name: [0.1] * n}))
        for name in names
        for n in (1, 2, 3)
    ]


@case()
def norms_among_an_optimizers_parameters(directory: Path) -> Any:
    params = {"lr": 0.5, "max_grad_norm": 1.0}
    given = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": params}}
    (directory / "config.json").write_text(json.dumps(given))
    made = runtime_config.DeepSpeedConfig(str(directory / "config.json"))
    return made.optimizer_name, made.optimizer_params, made.train_batch_size


@cases_over({"0": 0, "1": 1})
def switches_as_numbers(_directory: Path, value: int) -> Any:
    names = ("prescale_gradients", "wall_clock_breakdown", "memory_breakdown", "dump_state")
    given = dict.fromkeys((*names, "zero_allow_untested_optimizer"), value)
    made = runtime_config.DeepSpeedConfig({"train_batch_size": 1, **given})
    return [bool(getattr(made, name)) for name in names]
