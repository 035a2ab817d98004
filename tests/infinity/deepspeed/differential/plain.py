"""An engine of plain torch with the calls that the cases make: who is right where the real one and ours differ.

``run --plain`` starts it in the place of ``deepspeed.initialize``. Nothing here knows infinity or DeepSpeed, but for
its schedules. In 16 bits fp32 masters are stepped, and gradients of micro-batches add up in fp32. A step with gradients
that are not finite is left out where ZeRO leaves it out.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.plain_scale import PlainScale

HALVES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
OF_MODEL = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}


class PlainEngine(nn.Module):
    """What ``deepspeed.initialize`` returns first, of plain torch."""

    def __init__(self, model: nn.Module, given: Mapping[str, Any], *, model_parameters: Any = None, **others: Any):
        super().__init__()
        self.module = model
        self._given = given
        if {*given.get("data_types", {})} - {"grad_accum_dtype"} or hasattr(model, "_keep_in_fp32_modules"):
            raise NotImplementedError("plain torch has no rule for buffers")
        named = next((name for name in HALVES if given.get(name, {}).get("enabled")), None)
        stage = int(given.get("zero_optimization", {}).get("stage", 0))
        of_model = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
        section = named or (OF_MODEL.get(of_model) if stage else None)
        self._named = HALVES[named] if named else None
        self._half = HALVES[section] if section else None
        narrow = bool(named) and given[named].get("bf16_master_weights_and_grads", False)
        self._fp16 = {"enabled": True, **given.get("fp16", {})} if section == "fp16" else {}
        bf16s = given.get("bf16", {}).get("check_grad_overflow", bool(named) or stage == 3)
        self._skips_overflow = {"fp16": True, "bf16": bf16s, None: stage > 0}[section]
        self._clipping = given.get("gradient_clipping", 1.0)
        self._sums_in = torch.bfloat16 if narrow else DTYPES[given.get("data_types", {}).get("grad_accum_dtype")]
        self._micro = given.get("train_micro_batch_size_per_gpu")
        self._accumulation = self._count_of_micro_batches()
        params = model_parameters if model_parameters is not None else model.parameters()
        self._params = [param for param in params if param.requires_grad]
        for param in model.parameters() if self._half else ():
            if param.dtype is not torch.float32:  # no master has what such a cast rounds
                param.data = param.data.to(self._half)
        wide = [] if narrow or not self._half else [param.detach().clone().float() for param in self._params]
        for param in model.parameters() if self._half else ():
            param.data = param.data.to(self._half)
        self._masters = wide or self._params
        self._sums: dict[int, Tensor] = {}
        self._divided = False
        for number, param in enumerate(self._params):
            param.register_post_accumulate_grad_hook(partial(self._collect, number))
        own, schedule = others.get("optimizer"), others.get("lr_scheduler")
        made = own(self._masters) if callable(own) else own
        self.optimizer = made or _optimizer(given.get("optimizer"), self._masters)
        if made is own and own is not None and self._half:
            raise NotImplementedError("an optimizer that was made over 16-bit weights")
        schedule = schedule(self.optimizer) if callable(schedule) else schedule
        self.lr_scheduler = schedule or _scheduler(given.get("scheduler"), self.optimizer)
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self._applied, self._norm, self._boundary = False, None, None
        power = int(math.log2(self._fp16.get("loss_scale") or 2 ** self._fp16.get("initial_scale_power", 16)))
        self._scale = PlainScale(
            power=power if self._fp16 else 0,
            window=self._fp16.get("loss_scale_window", 1000) if not self._fp16.get("loss_scale") else 10**9,
            hysteresis=self._fp16.get("hysteresis", 2),
            consecutive=self._fp16.get("consecutive_hysteresis", False),
            least=self._fp16.get("min_loss_scale", 1),
        )

    def _count_of_micro_batches(self) -> int:
        given, ranks = self._given, dist.get_world_size()
        if "gradient_accumulation_steps" in given:
            return int(given["gradient_accumulation_steps"])
        if "train_batch_size" in given and self._micro:
            return int(given["train_batch_size"]) // int(self._micro) // ranks
        return 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._fp16.get("auto_cast"):
            args = tuple(each.half() if each.is_floating_point() else each for each in args)
        with self._autocast():
            return self.module(*args, **kwargs)

    def _autocast(self) -> Any:
        section = self._given.get("torch_autocast", {})
        dtype = getattr(torch, section.get("dtype", "bfloat16"))
        return torch.autocast("cpu", dtype=dtype, enabled=section.get("enabled", False), cache_enabled=False)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Of the loss of one micro-batch."""
        divided = loss / self._accumulation if scale_wrt_gas and self._accumulation > 1 else loss
        self._divided = True
        try:
            self.scale(divided).backward(retain_graph=retain_graph)
        finally:
            self._divided = False
        return divided

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale.scale if self._fp16 else loss

    def _collect(self, number: int, param: nn.Parameter) -> None:
        """A gradient of one micro-batch is added to those of the former ones; of ``loss.backward()`` it is divided."""
        gradient, param.grad = param.grad, None
        gradient = gradient.to(self._sums_in if self._half else gradient.dtype)
        if not self._divided and self._accumulation > 1:
            gradient = gradient / self._accumulation
        self._sums[number] = self._sums[number] + gradient if number in self._sums else gradient

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self._accumulation == 0 if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    @torch.no_grad()
    def step(self) -> None:
        """The end of a micro-batch, and after the last of them the update."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if not boundary:
            return
        for number, master in enumerate(self._masters):
            master.grad = self._averaged(number)
        grads = [master.grad for master in self._masters if master.grad is not None]
        overflow = self._skips_overflow and not all(each.isfinite().all() for each in grads)
        if not overflow:
            norm = nn.utils.get_total_norm([each.float() for each in grads])
            self._norm = float(norm)
            for each in grads if self._clipping else ():  # as torch.nn.utils.clip_grad_norm_, with a norm in fp32
                each.mul_(float((self._clipping / (norm + 1e-6)).clamp(max=1.0)))
            self.optimizer.step()
            for param, master in zip(self._params, self._masters, strict=True):
                param.copy_(master)
            self._applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.skipped_steps += bool(overflow)
        if self._fp16:
            self._scale.update(overflow=bool(overflow))
        self.zero_grad()
        self.global_steps += 1

    def _averaged(self, number: int) -> Tensor | None:
        gradient = self._sums.get(number)
        if dist.get_world_size() > 1:
            used = torch.tensor([float(gradient is not None)])
            dist.all_reduce(used)
            if used:
                gradient = torch.zeros_like(self._masters[number]) if gradient is None else gradient
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        return None if gradient is None else gradient.to(self._masters[number].dtype) / self._scale.scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        for tensor in [*self._params, *self._masters]:
            tensor.grad = None
        self._sums = {}

    def get_global_grad_norm(self) -> float | None:
        return self._norm

    def was_step_applied(self) -> bool:
        return self._applied

    def bfloat16_enabled(self) -> bool:
        return self._named is torch.bfloat16

    def fp16_enabled(self) -> bool:
        return self._named is torch.float16

    def fp16_auto_cast(self) -> bool:
        return self._fp16.get("auto_cast", False)

    def torch_autocast_enabled(self) -> bool:
        return self._given.get("torch_autocast", {}).get("enabled", False)

    def gradient_clipping(self) -> float:
        return self._clipping

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def destroy(self) -> None:
        """Nothing to give back."""


def _optimizer(section: Mapping[str, Any] | None, params: list[Tensor]) -> torch.optim.Optimizer | None:
    """Adam decays as AdamW does unless ``adam_w_mode`` is off; with ``torch_adam`` torch's own decay holds, too."""
    if section is None:
        return None
    options = dict(section.get("params", {}))
    torchs, decoupled = options.pop("torch_adam", False), options.pop("adam_w_mode", True)
    if section["type"] in ("Adam", "AdamW"):
        corrected = options.pop("bias_correction", True)
        decoupled = section["type"] == "AdamW" or decoupled
        options |= {"weight_decay": options.get("weight_decay", 0.0)} if not torchs else {}
        made = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = made(params, **options, **({} if torchs else {"fused": True}))
        for param in [] if corrected else params:  # after so many steps both corrections are 1.0
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(1e6), **moments}
        return optimizer
    return getattr(torch.optim, section["type"])(params, **options)


def _scheduler(section: Mapping[str, Any] | None, optimizer: Any) -> Any:
    if section is None:
        return None
    from deepspeed.runtime import lr_schedules  # type: ignore[import-not-found]

    return getattr(lr_schedules, section["type"])(optimizer, **section["params"])
