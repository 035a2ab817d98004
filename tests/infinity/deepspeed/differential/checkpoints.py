"""Checkpoints: saved, loaded with every flag, into other stages, as weights alone, and recovered as fp32."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import Stack, config, stack, start, sums, train, weights

ALL = {str(stage): stage for stage in range(4)}
CPU = {"device": "cpu", "pin_memory": False}
PLACES = {str(stage): config(stage) for stage in range(4)} | {
    "2-offload": config(2, zero={"offload_optimizer": CPU}),
    "3-offload": config(3, zero={"offload_optimizer": CPU, "offload_param": CPU}),
    "3-sub-groups": config(3, zero={"sub_group_size": 100}),
}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 20, "warmup_type": "linear"}}


@cases_over(PLACES)
def resumed(directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    train(engine, 2)
    saved = engine.save_checkpoint(str(directory), client_state={"epoch": 3, "note": "x"})
    expected = train(engine, 2)
    other = start(stack(seed=1), given)
    path, state = other.load_checkpoint(str(directory))
    facts = [other.global_steps, other.skipped_steps, other.global_samples, other.micro_steps]
    return saved, Path(path).relative_to(directory).parts[0], {k: state[k] for k in ("epoch", "note")}, facts, (
        train(other, 2) == expected or expected
    )  # fmt: skip


WHOLE = {"0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "2-offload": {"stage": 2, "offload_optimizer": CPU}}


@cases_over(WHOLE, ranks=2)
def whole_weights_in_a_file(directory: Path, zero: dict[str, Any]) -> Any:
    """What scripts read of a checkpoint without an engine."""
    model = stack()
    frozen = next(model.parameters())
    frozen.requires_grad = False
    engine = start(model, config(zero["stage"], zero=zero, scheduler=SCHEDULER))
    train(engine, 2)
    found = []
    for exclude_frozen in (False, True):
        engine.save_checkpoint(
            str(directory), tag="t", client_state={"epoch": 3}, exclude_frozen_parameters=exclude_frozen
        )
        deepspeed.comm.barrier()
        state = torch.load(directory / "t" / "mp_rank_00_model_states.pt")
        told = [state[key] for key in ("buffer_names", "global_steps", "global_samples", "skipped_steps", "epoch")]
        sizes = [state["dp_world_size"], state["mp_world_size"], state["lr_scheduler"]["last_batch_iteration"]]
        sums_of = {name: value.double().abs().sum().item() for name, value in state["module"].items()}
        stage = state["ds_config"]["zero_optimization"]["stage"]
        deepspeed.comm.barrier()
        found.append((told, sizes, sums_of, stage))
    return found


@cases_over({key: PLACES[key] for key in ("0", "1", "2", "3")}, ranks=2)
def resumed_by_two(directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    train(engine, 2)
    engine.save_checkpoint(str(directory), tag="mine")
    other = start(stack(seed=1), given)
    other.load_checkpoint(str(directory), tag="mine")
    return train(other, 2), sums(other)


@cases_over(ALL)
def without_states_of_the_optimizer(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, scheduler=SCHEDULER))
    train(engine, 3)
    engine.save_checkpoint(str(directory))
    before = sums(engine)
    other = start(stack(seed=1), config(stage, scheduler=SCHEDULER))
    other.load_checkpoint(str(directory), load_optimizer_states=False)
    return sums(other) == before or sums(other), other.get_lr(), train(other, 2)


@cases_over(ALL)
def without_states_of_the_scheduler(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, scheduler=SCHEDULER))
    train(engine, 3)
    engine.save_checkpoint(str(directory))
    other = start(stack(seed=1), config(stage, scheduler=SCHEDULER))
    other.load_checkpoint(str(directory), load_lr_scheduler_states=False)
    iteration = other.lr_scheduler.last_batch_iteration
    train(other, 1)
    return iteration, other.lr_scheduler.last_batch_iteration, other.get_lr()


@cases_over(ALL)
def with_states_of_the_scheduler(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, scheduler=SCHEDULER))
    train(engine, 3)
    engine.save_checkpoint(str(directory))
    other = start(stack(seed=1), config(stage, scheduler=SCHEDULER))
    other.load_checkpoint(str(directory))
    return other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict(), other.get_lr(), train(other, 1)


@cases_over(ALL)
def of_the_module_alone(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 2)
    engine.save_checkpoint(str(directory))
    other = start(stack(seed=1), config(stage))
    path, state = other.load_checkpoint(str(directory), load_module_only=True)
    return path is not None, isinstance(state, dict), other.global_steps, sums(other) == sums(engine)


@cases_over(ALL)
def latest_and_tags(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 1)
    engine.save_checkpoint(str(directory))
    engine.save_checkpoint(str(directory), tag="second", save_latest=False)
    engine.save_checkpoint(str(directory), tag=7, save_latest=False)
    latest = (directory / "latest").read_text().strip()
    return (
        latest,
        sorted(each.name for each in directory.iterdir() if each.is_dir()),
        (directory / "zero_to_fp32.py").exists(),
    )


@case()
def a_directory_with_nothing_in_it(directory: Path) -> Any:
    engine = start(stack(), config(2))
    return engine.load_checkpoint(str(directory)), raised(lambda: engine.load_checkpoint(str(directory), tag="none"))


@cases_over(ALL)
def a_tag_that_is_not_there(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    engine.save_checkpoint(str(directory))
    return raised(lambda: engine.load_checkpoint(str(directory), tag="other")) != "nothing" or "given as None"


@cases_over(ALL)
def client_state(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    given = {"step": 3, "tensor": torch.arange(3), "nested": {"a": [1, 2.5, "x"]}}
    engine.save_checkpoint(str(directory), client_state=given)
    other = start(stack(), config(stage))
    _, found = other.load_checkpoint(str(directory))
    return {key: found[key] for key in given}


@cases_over(ALL)
def another_model_is_refused(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    engine.save_checkpoint(str(directory))
    other = start(stack(depth=3), config(stage))
    return raised(lambda: other.load_checkpoint(str(directory))) != "nothing"


@case()
def frozen_left_out(directory: Path) -> Any:
    out = []
    for stage in (1, 2, 3):
        model = stack()
        model.head.weight.requires_grad_(False)
        trained = [param for param in model.parameters() if param.requires_grad]
        engine = start(model, config(stage), model_parameters=trained)
        place = directory / str(stage)
        engine.save_checkpoint(str(place), exclude_frozen_parameters=True)
        path, _ = engine.load_checkpoint(str(place), load_module_strict=False)
        out.append(path is not None)
    return out


@cases_over({str(stage): stage for stage in range(4)})
def weights_of_16_bits(directory: Path, stage: int) -> Any:
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = start(stack(), config(stage, zero=zero, bf16={"enabled": True}))
    saved = engine.save_16bit_model(str(directory), "weights.bin")
    state = torch.load(directory / "weights.bin", weights_only=True)
    again = start(stack(), config(stage, zero=zero))
    again.save_16bit_model(str(directory))
    return (
        saved, sorted(state), str(state["head.weight"].dtype), state["head.weight"].float().sum().round(decimals=2),
        sorted(each.name for each in directory.iterdir()),
    )  # fmt: skip


@case()
def weights_of_16_bits_unless_gathered(directory: Path) -> Any:
    engine = start(stack(), config(3))
    return engine.save_16bit_model(str(directory)), raised(engine._zero3_consolidated_16bit_state_dict)


@cases_over({"1": 1, "2": 2, "3": 3})
def consolidated(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(3, zero={"stage3_gather_16bit_weights_on_model_save": True}))
    state = engine._zero3_consolidated_16bit_state_dict()
    return {name: value.sum() for name, value in state.items()}, stage


@cases_over({"1": 1, "2": 2, "3": 3})
def recovered_in_fp32(directory: Path, stage: int) -> Any:
    from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    engine = start(stack(), config(stage, bf16={"enabled": True}))
    train(engine, 2, dtype=torch.bfloat16)
    expected = _masters(engine)
    engine.save_checkpoint(str(directory), tag="t")
    state = get_fp32_state_dict_from_zero_checkpoint(str(directory))
    by_tag = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag="t")
    model = load_state_dict_from_zero_checkpoint(Stack(), str(directory))
    same = {name: torch.equal(state[name], value) for name, value in expected.items()}
    loaded = {name: torch.equal(param, expected[name]) for name, param in model.named_parameters()}
    return same, loaded, sorted(by_tag) == sorted(state), str(state["head.weight"].dtype)


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: deepspeed.utils.safe_get_full_fp32_param(param).clone()
        for name, param in engine.module.named_parameters()
    }


@case()
def no_checkpoint_to_recover(directory: Path) -> Any:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return raised(lambda: get_fp32_state_dict_from_zero_checkpoint(str(directory)))


@cases_over({"1": 1, "2": 2, "3": 3})
def loss_scales_go_on(directory: Path, stage: int) -> Any:
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2}
    engine = start(stack(), config(stage, fp16=fp16))
    train(engine, 4, dtype=torch.float16)
    engine.save_checkpoint(str(directory))
    other = start(stack(), config(stage, fp16=fp16))
    other.load_checkpoint(str(directory))
    before = [other.optimizer.cur_scale, other.optimizer.loss_scaler.cur_iter]
    train(other, 3, dtype=torch.float16)
    return before, other.optimizer.cur_scale


@cases_over(ALL)
def tied_weights(directory: Path, stage: int) -> Any:
    def tied() -> Stack:
        model = stack()
        model.layers[1].weight = model.layers[0].weight
        return model

    engine = start(tied(), config(stage))
    train(engine, 2)
    engine.save_checkpoint(str(directory))
    other = start(tied(), config(stage))
    other.load_checkpoint(str(directory))
    return train(other, 1), other.module.layers[1].weight is other.module.layers[0].weight


@cases_over(ALL)
def buffers(directory: Path, stage: int) -> Any:
    def made() -> Stack:
        model = stack()
        model.register_buffer("seen", torch.zeros(2))
        return model

    model = made()
    engine = start(model, config(stage))
    model.seen.fill_(3.0)
    engine.save_checkpoint(str(directory))
    other = made()
    start(other, config(stage)).load_checkpoint(str(directory))
    return other.seen


@cases_over({"0": 0, "2": 2, "3": 3})
def custom_loading(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    engine.save_checkpoint(str(directory))
    return list(engine.load_checkpoint.__code__.co_varnames[:9]) if stage == 9 else raised(
        lambda: engine.load_checkpoint(
            str(directory), tag=None, load_module_strict=True, load_optimizer_states=True,
            load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None,
        )
    )  # fmt: skip


@case()
def signatures(_directory: Path) -> Any:
    import inspect

    return [
        list(inspect.signature(getattr(deepspeed.DeepSpeedEngine, name)).parameters)[: 6 if "16" not in name else 3]
        for name in ("save_checkpoint", "save_16bit_model")
    ]


@cases_over(ALL)
def trained_on_after_saving(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    losses = train(engine, 1)
    engine.save_checkpoint(str(directory))
    losses += train(engine, 2)
    engine.load_checkpoint(str(directory))
    return losses, train(engine, 2), {name: value.sum() for name, value in weights(engine).items()}


@cases_over(ALL)
def states_are_no_files_of_experts(directory: Path, stage: int) -> Any:
    """What scripts replace to see that no states are loaded."""
    engine = start(stack(), config(stage))
    train(engine, 1)
    engine.save_checkpoint(str(directory), tag="mine")
    name = engine._get_optimizer_ckpt_name(str(directory), "mine", 0)
    asked = []
    engine._get_optimizer_ckpt_name = lambda *args: asked.append(args)
    engine.load_checkpoint(str(directory), load_optimizer_states=False)
    return Path(name).parent.relative_to(directory), asked


@case()
def scripts_are_made_executable(directory: Path) -> Any:
    engine = start(stack(), config(1))
    script = directory / "script.py"
    script.write_text("")
    script.chmod(0o640)
    seen = [bool(script.stat().st_mode & 0o100)]
    engine._change_recovery_script_permissions(str(script))
    seen += [bool(script.stat().st_mode & 0o100)]
    engine._change_recovery_script_permissions(str(directory / "none.py"))
    return seen


@cases_over({mode: {"tag_validation": mode} for mode in ("Ignore", "Warn", "Fail")} | {"unsaid": {}}, ranks=2)
def tags_that_differ(directory: Path, section: dict[str, Any]) -> Any:
    engine = start(stack(), config(2, checkpoint=section))
    tag = f"of-rank-{engine.global_rank}"
    answers = engine.checkpoint_tag_validation_enabled(), engine.checkpoint_tag_validation_fail()
    return *answers, raised(lambda: engine.save_checkpoint(str(directory), tag=tag))


@cases_over(ALL)
def saved_between_two_micro_batches(directory: Path, stage: int) -> Any:
    """What is accumulated is lost to who loads, and goes on here."""
    engine = start(stack(), config(stage, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=4))
    train(engine, 3)
    engine.save_checkpoint(str(directory))
    before, gone_on = sums(engine), train(engine, 3)
    other = start(stack(seed=1), config(stage, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=4))
    other.load_checkpoint(str(directory))
    return before, gone_on, sums(other), sums(engine)
