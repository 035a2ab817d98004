"""fp16 with its loss scales, bf16, autocast, dtypes of reductions."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import WIDTH, batches, config, stack, start, sums, train

ALL = {str(stage): stage for stage in range(4)}
ZERO = {"1": 1, "2": 2, "3": 3}


@cases_over(ALL)
def bf16(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, bf16={"enabled": True}))
    losses = train(engine, 3, dtype=torch.bfloat16)
    return losses, str(next(engine.module.parameters()).dtype), engine.bfloat16_enabled(), engine.fp16_enabled()


@cases_over(ZERO)
def fp16_static(_directory: Path, stage: int) -> Any:
    given = config(stage, fp16={"enabled": True, "loss_scale": 8.0})
    engine = start(stack(), given)
    losses = train(engine, 3, dtype=torch.float16)
    facts = [engine.loss_scale(), engine.dynamic_loss_scale(), engine.optimizer.cur_scale, engine.optimizer.loss_scale]
    return losses, str(next(engine.module.parameters()).dtype), facts


@cases_over(ZERO)
def fp16_dynamic_scale_of_good_steps(_directory: Path, stage: int) -> Any:
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 2}
    engine = start(stack(), config(stage, fp16=fp16))
    scales = []
    for x, y in batches(7, dtype=torch.float16):
        engine.backward(engine(x, y))
        engine.step()
        scaler = engine.optimizer.loss_scaler
        scales.append((engine.optimizer.cur_scale, scaler.cur_iter, scaler.cur_hysteresis, engine.optimizer.overflow))
    return scales, engine.skipped_steps, engine.optimizer.dynamic_loss_scale


@cases_over({f"{stage}-{h}{'c' if c else ''}": (stage, h, c) for stage in (1, 2, 3) for h in (1, 2) for c in (0, 1)})
def fp16_dynamic_scale_of_overflows(_directory: Path, given: tuple[int, int, int]) -> Any:
    stage, hysteresis, consecutive = given
    fp16 = {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": hysteresis,
        "consecutive_hysteresis": bool(consecutive), "min_loss_scale": 1,
    }  # fmt: skip
    engine = start(stack(), config(stage, fp16=fp16))
    seen = []
    for number, (x, y) in enumerate(batches(9, dtype=torch.float16)):
        if number in (1, 2, 5):
            x = torch.full_like(x, torch.inf)
        engine.backward(engine(x, y))
        engine.step()
        scaler = engine.optimizer.loss_scaler
        seen.append([engine.optimizer.cur_scale, scaler.cur_hysteresis, scaler.cur_iter, engine.optimizer.overflow])
    return seen, engine.skipped_steps, engine.global_steps


@cases_over(ZERO)
def fp16_least_scale(_directory: Path, stage: int) -> Any:
    fp16 = {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 2}
    engine = start(stack(), config(stage, fp16=fp16))
    x, y = batches(1, dtype=torch.float16)[0]
    x = torch.full_like(x, torch.inf)
    engine.backward(engine(x, y))
    engine.step()
    engine.backward(engine(x, y))
    return engine.optimizer.cur_scale, raised(engine.step)


@cases_over(ZERO)
def scheduler_waits_for_skipped_steps(_directory: Path, stage: int) -> Any:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}}
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = start(stack(), config(stage, fp16=fp16, scheduler=scheduler))
    rates = []
    for number, (x, y) in enumerate(batches(5, dtype=torch.float16)):
        x = torch.full_like(x, torch.inf) if number in (1, 2) else x
        engine.backward(engine(x, y))
        engine.step()
        rates.append((engine.get_lr(), engine.lr_scheduler.get_last_lr(), engine.was_step_applied()))
    return rates


@cases_over(ALL)
def torch_autocast(_directory: Path, stage: int) -> Any:
    given = config(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine = start(stack(), given)
    losses = train(engine, 3)
    return losses, str(next(engine.module.parameters()).dtype), engine.torch_autocast_enabled()


@cases_over(ALL, ranks=2)
def torch_autocast_by_two(_directory: Path, stage: int) -> Any:
    given = config(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"}, gradient_accumulation_steps=2)
    return train(start(stack(), given), 6)


@cases_over({"1": 1, "2": 2, "3": 3})
def bf16_with_gradients_in(_directory: Path, stage: int) -> Any:
    out = []
    for dtype in ("fp32", "bf16"):
        given = config(stage, bf16={"enabled": True}, data_types={"grad_accum_dtype": dtype})
        out.append(train(start(stack(), given), 2, dtype=torch.bfloat16))
    return out


@cases_over({"1": 1, "2": 2, "3": 3}, ranks=2)
def communication_data_type(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, communication_data_type="fp32", bf16={"enabled": True}))
    train(engine, 1, dtype=torch.bfloat16)
    return str(engine.communication_data_type)


@cases_over(ALL)
def data_types(_directory: Path, stage: int) -> Any:
    out = []
    for section in ({}, {"bf16": {"enabled": True}}):
        engine = start(stack(), config(stage, **section))
        out.append([str(each) for each in engine.get_data_types()])
    return out


@case()
def both_at_once_are_refused(_directory: Path) -> Any:
    both = config(2, fp16={"enabled": True}, bf16={"enabled": True})
    return raised(lambda: start(stack(), both))


@cases_over(ZERO)
def fp16_auto_cast(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, fp16={"enabled": True, "auto_cast": True, "loss_scale": 4}))
    return train(engine, 2), engine.fp16_auto_cast()


@cases_over(ALL)
def inputs_of_another_dtype(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, bf16={"enabled": True}))
    x, y = batches(1)[0]
    return raised(lambda: engine(x, y)) != "nothing"


@cases_over(ZERO)
def master_weights_in_bf16(_directory: Path, stage: int) -> Any:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    engine = start(stack(), config(stage, bf16=bf16))
    return train(engine, 2, dtype=torch.bfloat16)


@cases_over(ZERO)
def scale_set_by_hand(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, fp16={"enabled": True, "initial_scale_power": 4}))
    before = engine.optimizer.loss_scale
    engine.optimizer.override_loss_scale(32.0)
    return before, engine.optimizer.loss_scale, engine.optimizer.cur_scale


@cases_over(ZERO)
def fp16_norm(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, fp16={"enabled": True, "loss_scale": 64.0}, gradient_clipping=1.0))
    train(engine, 1, dtype=torch.float16)
    return float(engine.get_global_grad_norm()), engine.gradient_clipping()


@case()
def fp16_weights_sum(_directory: Path) -> Any:
    out = []
    for stage in (1, 2, 3):
        engine = start(stack(), config(stage, fp16={"enabled": True, "loss_scale": 64.0}))
        train(engine, 2, dtype=torch.float16)
        out.append({name: round(value, 1) + 0.0 for name, value in sums(engine).items()})
    return [out[0] == each for each in out] and deepspeed.comm.get_rank()


@cases_over({"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"})
def fp16_optimizers_by_name(_directory: Path, name: str) -> Any:
    params: dict[str, Any] = {"lr": 0.01} | ({"torch_adam": True} if "Adam" in name else {})
    if name == "Adagrad":  # a kernel of DeepSpeed's, built on the spot
        return "not compared"
    given = config(2, fp16={"enabled": True, "loss_scale": 8.0}, optimizer={"type": name, "params": params})
    return train(start(stack(), given | {"zero_allow_untested_optimizer": True}), 3, dtype=torch.float16)


WIDTHS = {f"{stage}-{name}": (stage, getattr(torch, name)) for stage in (1, 2, 3) for name in ("bfloat16", "float16")}
"""Each stage of ZeRO, and the dtype in which a script has its model while the configuration names none."""


def _narrow(stage: int, dtype: torch.dtype, **others: Any) -> Any:
    engine = start(stack().to(dtype), config(stage, **others))
    losses = train(engine, 6, dtype=dtype)
    dtypes = sorted({str(param.dtype) for param in engine.module.parameters()})
    facts = [engine.bfloat16_enabled(), engine.fp16_enabled(), [str(each) for each in engine.get_data_types()]]
    return losses, dtypes, facts, str(engine.communication_data_type), engine.global_steps, engine.skipped_steps


def _losses_with_an_overflow(engine: Any, dtype: torch.dtype) -> Any:
    seen = []
    for number, (x, y) in enumerate(batches(3, dtype=dtype)):
        loss = engine(torch.full_like(x, torch.inf) if number == 1 else x, y)
        engine.backward(loss)
        engine.step()
        seen.append([loss.item(), engine.skipped_steps, engine.global_steps])
    return seen


@cases_over(WIDTHS)
def narrow_model_under_no_section(_directory: Path, given: tuple[int, torch.dtype]) -> Any:
    engine = start(stack().to(given[1]), config(given[0]))
    return _narrow(*given), float(engine.loss_scale()), type(engine.optimizer).__name__


@cases_over(WIDTHS, ranks=2)
def narrow_model_accumulates(_directory: Path, given: tuple[int, torch.dtype]) -> Any:
    return _narrow(*given, gradient_accumulation_steps=2, gradient_clipping=0.1)


@cases_over(WIDTHS)
def narrow_model_overflows(_directory: Path, given: tuple[int, torch.dtype]) -> Any:
    return _losses_with_an_overflow(start(stack().to(given[1]), config(given[0])), given[1])


@cases_over({f"{stage}{asked}": (stage, asked) for stage in range(4) for asked in ("", True, False)})
def bf16_overflows(_directory: Path, given: tuple[int, bool | str]) -> Any:
    asked = {} if given[1] == "" else {"check_grad_overflow": given[1]}
    engine = start(stack().bfloat16(), config(given[0], bf16={"enabled": True, **asked}))
    return _losses_with_an_overflow(engine, torch.bfloat16)


@cases_over(
    {f"{stage}{each}": (stage, each) for stage in range(4) for each in ("", "-autocast", "-offload", "-no-clip")}
)
def fp32_overflows(_directory: Path, given: tuple[int, str]) -> Any:
    stage, option = given
    zero = {"offload_optimizer": {"device": "cpu"}} if option == "-offload" and stage else {}
    others = {
        "-autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "-no-clip": {"gradient_clipping": 0.0},
    }
    return _losses_with_an_overflow(start(stack(), config(stage, zero=zero, **others.get(option, {}))), torch.float32)


@cases_over(
    {f"{section}-{label}": (section, *given) for section in ("fp16", "bf16") for label, given in WIDTHS.items()}
)
def narrow_model_under_a_section(_directory: Path, given: tuple[str, int, torch.dtype]) -> Any:
    section, stage, dtype = given
    engine = start(stack().to(dtype), config(stage, **{section: {"enabled": True}}))
    return train(engine, 2, dtype=torch.float16 if section == "fp16" else torch.bfloat16)


@cases_over({
    f"{name}{told}{section}": (getattr(torch, name), told, section)
    for name in ("float32", "bfloat16", "float16") for told in ("", "-told") for section in ("", "-bf16")
})  # fmt: skip
def dtype_made_under_init(_directory: Path, given: tuple[torch.dtype, str, str]) -> Any:
    dtype, told, section = given
    asked = config(3, **({"bf16": {"enabled": True}} if section else {}))
    torch.set_default_dtype(torch.float32 if told else dtype)
    with deepspeed.zero.Init(config_dict_or_path=asked, dtype=dtype if told else None):
        model = stack()
    torch.set_default_dtype(torch.float32)
    engine = start(model, asked)
    train(engine, 2, dtype=next(engine.module.parameters()).dtype)
    return sorted({str(param.dtype) for param in engine.module.parameters()}), engine.bfloat16_enabled()


@cases_over({"0-bfloat16": torch.bfloat16, "0-float16": torch.float16})
def narrow_model_at_stage_0(_directory: Path, dtype: torch.dtype) -> Any:
    return _narrow(0, dtype)


class _OverStored(torch.nn.Module):
    """A frozen matrix in a dtype of its own before the stack."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        drawn = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(11))
        stored = drawn if dtype.is_floating_point else 20 * drawn
        self.stored = torch.nn.Parameter(stored.to(dtype), requires_grad=False)
        self.stack = stack()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.stack(x @ self.stored.to(x.dtype) / 20, y)


@cases_over({
    f"{stage}-{name}": (stage, getattr(torch, name))
    for stages, names in ((range(4), "bfloat16 float16"), (range(2), "float8_e4m3fn int8"))
    for stage in stages
    for name in names.split()
})  # fmt: skip
def frozen_weights_in_a_dtype_of_their_own(_directory: Path, given: tuple[int, torch.dtype]) -> Any:
    model = _OverStored(given[1])
    engine = start(model, config(given[0]))
    return train(engine, 4), str(model.stored.dtype), engine.bfloat16_enabled()
