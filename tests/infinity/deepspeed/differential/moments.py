"""Moments of training that the documentation's loop does not have: gradients that are no numbers, calls out of turn,
settings that change on the way."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn

from tests.infinity.deepspeed.differential.case import cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, sums, train, train_on

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
PRECISIONS = {"": (torch.float32, {}), "-bf16": (torch.bfloat16, BF16), "-fp16": (torch.float16, FP16)}


def counts(engine: Any) -> list[Any]:
    return [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]


def _engine(stage: int, dtype: torch.dtype = torch.float32, accumulation: int = 2, **others: Any) -> Any:
    return start(stack().to(dtype), config(stage, gradient_accumulation_steps=accumulation, **others))


def _broken(stage: int, precision: str, where: Callable[[int], bool], value: float = torch.inf) -> Any:
    dtype, section = PRECISIONS[precision]
    engine = _engine(stage, dtype, scheduler=WARMUP, **section)
    seen = []
    for number, (x, y) in enumerate(batches(8, dtype=dtype)):
        loss = engine(torch.full_like(x, value) if where(number) else x, y)
        engine.backward(loss)
        engine.step()
        seen.append([loss.item(), engine.get_lr(), engine.was_step_applied(), counts(engine)])
    return seen


ALL = {str(stage): stage for stage in range(4)}
NARROW = {f"{stage}{each}": (stage, each) for stage in (1, 2, 3) for each in PRECISIONS} | {"0": (0, "")}


@cases_over(NARROW)
def inf_in_the_first_micro_batch(_directory: Path, given: tuple[int, str]) -> Any:
    return _broken(*given, lambda number: number == 2)


@cases_over(NARROW, ranks=2)
def nan_on_one_rank(_directory: Path, given: tuple[int, str]) -> Any:
    return _broken(*given, lambda number: number == 2 and deepspeed.comm.get_rank() == 1, torch.nan)


@cases_over({"1": 1, "2": 2, "3": 3})
def least_scale_in_the_first_micro_batch(_directory: Path, stage: int) -> Any:
    section = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    engine = _engine(stage, torch.float16, fp16=section, scheduler=WARMUP)
    seen = []
    for number, (x, y) in enumerate(batches(4, dtype=torch.float16)):
        engine.backward(engine(torch.full_like(x, torch.inf) if number in (0, 2) else x, y))
        seen.append([raised(engine.step), engine.optimizer.cur_scale, engine.get_lr(), counts(engine)])
    return seen


@cases_over(NARROW)
def gradients_of_zeros(_directory: Path, given: tuple[int, str]) -> Any:
    stage, precision = given
    dtype, section = PRECISIONS[precision]
    engine = _engine(stage, dtype, accumulation=1, scheduler=WARMUP, **section)
    losses = []
    for number, (x, y) in enumerate(batches(6, dtype=dtype)):
        loss = engine(x, y)
        engine.backward(loss * 0.0 if number in (0, 3) else loss)
        engine.step()
        losses.append([loss.item(), float(engine.get_global_grad_norm()) if stage else None, counts(engine)])
    return losses


class Choice(nn.Module):
    """One of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor, left: bool) -> Tensor:
        return nn.functional.cross_entropy((self.left if left else self.right)(torch.tanh(self.body(x))), y)


@cases_over({"0": 0, "1": 1, "2": 2}, ranks=2)
def each_rank_uses_another_head(_directory: Path, stage: int) -> Any:
    torch.manual_seed(3)
    engine = start(Choice(), config(stage))
    left = deepspeed.comm.get_rank() == 0
    return train_on(engine, [(x, y, left) for x, y in batches(4)]), sums(engine)


@cases_over(ALL)
def losses_that_are_no_scalars(_directory: Path, stage: int) -> Any:
    engine = _engine(stage)
    x, y = batches(1)[0]
    out = []
    for make in (
        lambda loss: loss.repeat(3)[:0],
        lambda loss: loss.repeat(3),
        lambda loss: loss.repeat(1),
        lambda loss: loss.detach(),
        lambda loss: [loss],
        lambda loss: float(loss),
        lambda loss: None,
    ):
        loss = make(engine(x, y))
        out.append(raised(lambda loss=loss: engine.backward(loss)))
    return out


def _reduced(how: str) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.inner(x), y, reduction=how)

    torch.manual_seed(2)
    return Net()


@cases_over({f"{stage}-{how}": (stage, how) for stage in range(4) for how in ("mean", "sum")}, ranks=2)
def an_empty_batch_on_one_rank(_directory: Path, given: tuple[int, str]) -> Any:
    stage, how = given
    engine = start(_reduced(how), config(stage))
    losses = []
    for number, (x, y) in enumerate(batches(4, width=6)):
        few = 0 if number == 1 and deepspeed.comm.get_rank() == 1 else 4
        loss = engine(x[:few], y[:few])
        engine.backward(loss)
        engine.step()
        losses.append([loss.item(), counts(engine)])
    return losses, sums(engine)


@cases_over(ALL)
def a_group_at_rate_zero(_directory: Path, stage: int) -> Any:
    model = stack()
    groups = [{"params": list(model.layers.parameters()), "lr": 0.0}, {"params": list(model.head.parameters())}]
    engine = start(model, config(stage), model_parameters=groups)
    losses = train(engine, 3)
    engine.optimizer.param_groups[0]["lr"] = 0.05
    return losses, train(engine, 3), engine.get_lr(), sums(engine)


@cases_over(ALL)
def all_frozen(_directory: Path, stage: int) -> Any:
    model = stack().requires_grad_(False)

    def go() -> None:
        engine = start(model, config(stage))
        engine.backward(engine(*batches(1)[0]))

    return raised(go) != "nothing"


@cases_over(ALL)
def evaluation_within_accumulation(_directory: Path, stage: int) -> Any:
    engine = _engine(stage)
    out = []
    for x, y in batches(6):
        engine.backward(engine(x, y))
        engine.eval()
        with torch.no_grad():
            out.append(engine(x, y).item())
        out.append(engine(y=y, x=x).item())
        engine.train()
        engine.step()
    return out, counts(engine)


@cases_over(ALL)
def a_step_without_a_backward(_directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=1)
    train(engine, 1)
    before = sums(engine)
    return raised(engine.step), sums(engine) == before


@cases_over({f"{stage}-{n}": (stage, n) for stage in range(4) for n in (1, 2)})
def two_backwards_before_a_step(_directory: Path, given: tuple[int, int]) -> Any:
    engine = _engine(given[0], accumulation=given[1])
    losses = []
    pairs = batches(8)
    for (x, y), (v, w) in zip(pairs[::2], pairs[1::2], strict=True):
        for each in (engine(x, y), engine(v, w)):
            engine.backward(each)
            losses.append(each.item())
        engine.step()
    return losses, counts(engine)


@cases_over(ALL)
def both_forwards_come_first(_directory: Path, stage: int) -> Any:
    engine = _engine(stage)
    losses = []
    pairs = batches(8)
    for (x, y), (v, w) in zip(pairs[::2], pairs[1::2], strict=True):
        for each in [engine(x, y), engine(v, w)]:
            engine.backward(each)
            engine.step()
            losses.append(each.item())
    return losses, counts(engine)


@cases_over(ALL)
def a_graph_that_is_kept(_directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=1)
    losses = []
    for x, y in batches(3):
        loss = engine(x, y)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, sums(engine)


@cases_over({"0-1": (0, 1), "1-2": (1, 2), "2-2": (2, 2), "3-2": (3, 2)})
def undivided(_directory: Path, given: tuple[int, int]) -> Any:
    engine = _engine(given[0], accumulation=given[1])
    losses = []
    for x, y in batches(4):
        loss = engine(x, y)
        losses.append([loss.item(), engine.backward(loss, scale_wrt_gas=False).item()])
        engine.step()
    return losses, sums(engine)


def _fail(*_: Any) -> None:
    raise ValueError("on purpose")


@cases_over({f"{stage}-{n}": (stage, n) for stage in range(4) for n in (1, 2)})
def an_error_in_forward(_directory: Path, given: tuple[int, int]) -> Any:
    engine = _engine(given[0], accumulation=given[1])
    losses, errors = [], []
    for number, (x, y) in enumerate(batches(8)):
        if number in (2, 5):
            errors.append(raised(lambda x=x, y=y: engine(x[:, :3], y)))
            continue
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, errors, counts(engine)


@cases_over(ALL)
def an_error_before_backward(_directory: Path, stage: int) -> Any:
    """As loops leave out a batch that does not fit: its loss is dropped."""
    engine = _engine(stage, accumulation=1)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = engine(x, y)
        if number in (2, 3):
            continue
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, counts(engine)


CHANGES = {"lr": 0.2, "weight_decay": 0.3, "betas": (0.5, 0.6), "eps": 0.1}


@cases_over({f"{stage}-{key}": (stage, key) for stage in range(4) for key in CHANGES})
def options_change_before_a_step(_directory: Path, given: tuple[int, str]) -> Any:
    stage, key = given
    engine = _engine(stage, accumulation=2)
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        loss = engine(x, y)
        engine.backward(loss)
        if number == 3:
            for group in engine.optimizer.param_groups:
                group[key] = CHANGES[key]
        engine.step()
        losses.append(loss.item())
    return losses, engine.get_lr(), engine.get_mom()


@cases_over(ALL)
def a_rate_is_set_under_a_schedule(_directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=1, scheduler=WARMUP)
    seen = []
    for number, (x, y) in enumerate(batches(7)):
        loss = engine(x, y)
        engine.backward(loss)
        if number in (2, 5):
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.3
        engine.step()
        seen.append([loss.item(), engine.get_lr()])
    return seen


@cases_over(ALL)
def batch_sizes_that_change_on_the_way(_directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=2)
    seen = []
    for number, (x, y) in enumerate(batches(12)):
        if number == 4:
            engine.set_train_batch_size(4)
        if number == 6:
            engine.set_train_batch_size(12)
        if number == 9:
            engine.set_train_micro_batch_size(2)
        loss = engine(x, y)
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        seen.append([loss.item(), boundary, engine.was_step_applied(), counts(engine), engine.train_batch_size()])
    return seen


@cases_over(ALL)
def a_batch_size_changes_within_a_step(_directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=2)
    train(engine, 3)
    return raised(lambda: engine.set_train_batch_size(16))


CLIPPINGS = {"0": 0.0, "tiny": 1e-6, "1": 1, "1000": 1e3, "none": None}


@cases_over({f"{stage}-{key}": (stage, key) for stage in range(4) for key in CLIPPINGS}, relative=1e-5)
def clipped_to(_directory: Path, given: tuple[int, str]) -> Any:
    stage, key = given
    engine = _engine(stage, accumulation=1, gradient_clipping=CLIPPINGS[key], **SGD)
    losses = []
    for x, y in batches(4):
        loss = engine(x * 50, y)
        engine.backward(loss)
        engine.step()
        losses.append([loss.item(), float(engine.get_global_grad_norm() or 0) if stage else None])
    return losses, sums(engine), engine.gradient_clipping()


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}

ZEROED: dict[str, Callable[[Any], Any]] = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "module": lambda engine: engine.module.zero_grad(),
    "params": lambda engine: [setattr(each, "grad", None) for each in engine.module.parameters()],
}


@cases_over({f"{stage}-{key}": (stage, key) for stage in range(1, 4) for key in ZEROED})
def zeroed_between_backward_and_step(_directory: Path, given: tuple[int, str]) -> Any:
    stage, key = given
    engine = _engine(stage, accumulation=1)
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        loss = engine(x, y)
        engine.backward(loss)
        if number in (1, 3):
            ZEROED[key](engine)
        engine.step()
        losses.append(loss.item())
    return losses, counts(engine)


@cases_over({f"{stage}-{key}": (stage, key) for stage in range(4) for key in ZEROED})
def zeroed_between_micro_batches(_directory: Path, given: tuple[int, str]) -> Any:
    stage, key = given
    engine = _engine(stage, accumulation=2)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if number == 2:
            losses.append(raised(lambda: ZEROED[key](engine)))
    return losses, counts(engine)


@cases_over({f"{stage}-{key}": (stage, key) for stage in range(4) for key in ZEROED})
def zeroed_before_each_backward(_directory: Path, given: tuple[int, str]) -> Any:
    stage, key = given
    engine = _engine(stage, accumulation=1)
    losses = []
    for x, y in batches(5):
        loss = engine(x, y)
        ZEROED[key](engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, counts(engine)


@cases_over(ALL)
def saved_within_accumulation(directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=2)
    pairs = batches(8)
    train_on(engine, pairs[:3])
    saved = raised(lambda: engine.save_checkpoint(str(directory), tag="t"))
    return saved, train_on(engine, pairs[3:6]), counts(engine)


@cases_over(ALL)
def loaded_within_accumulation(directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=2)
    train(engine, 2)
    engine.save_checkpoint(str(directory), tag="t")
    train(engine, 1)
    return raised(lambda: engine.load_checkpoint(str(directory), tag="t"))


@cases_over({"0": 0, "1": 1}, ranks=2)
def no_sync_around_a_micro_batch(_directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=2)
    losses = []
    pairs = batches(6)
    for first, last in zip(pairs[::2], pairs[1::2], strict=True):
        with engine.no_sync():
            loss = engine(*first)
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        losses += train_on(engine, [last])
    return losses, counts(engine)


@cases_over({f"{stage}-{n}": (stage, n) for stage in range(4) for n in (1, 2)})
def unmanaged(_directory: Path, given: tuple[int, int]) -> Any:
    stage, n = given
    engine = _engine(stage, accumulation=n, managed_gradient_accumulation=False, scheduler=WARMUP)
    seen = []
    for number, (x, y) in enumerate(batches(7)):
        loss = engine(x, y)
        engine.backward(loss)
        seen.append([loss.item(), engine.is_gradient_accumulation_boundary()])
        if number in (0, 2, 5, 6):
            engine.step()
            seen.append([counts(engine), engine.get_lr(), engine.was_step_applied()])
    return seen


@cases_over(ALL)
def the_norm_before_any_step(_directory: Path, stage: int) -> Any:
    engine = _engine(stage, accumulation=1)
    before = engine.get_global_grad_norm()
    engine.backward(engine(*batches(1)[0]))
    between = engine.get_global_grad_norm()
    engine.step()
    return before, between, engine.was_step_applied()
