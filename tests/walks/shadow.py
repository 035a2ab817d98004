"""The textbook's training loop in plain torch, call by call as an engine has them. It knows nothing of infinity.

16-bit weights have fp32 masters, whose gradients add up in fp32 where a step may have several micro-batches; else a
step's gradient is autograd's. A gradient that is not finite skips a step of fp16, and under the name deepspeed those
that ZeRO skips. What an engine tells to be lost with a backward that failed, the judge has dropped here, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from tests.support.optimizers import CHOICES
from tests.support.plain_scale import PlainScale
from tests.walks.model import Walker, groups_of, loss_of, tokens_of, values_like
from tests.walks.settings import DTYPES, SCALE_POWER, SCALE_WINDOW, Recipe, Setting

SCHEDULES: Final[dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}

STATES: Final[dict[str, dict[str, str]]] = {
    "AdamW": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "amsgrad": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"},
    "SGD": {"momentum_buffer": "momentum_buffer"},
    "Lion": {"exp_avg": "m"},
    "RMSprop": {"square_avg": "square_avg", "momentum_buffer": "momentum_buffer", "grad_avg": "grad_avg"},
}
"""What an engine calls an optimizer's states, and what the reference's own optimizer does."""


def seeded(recipe: Recipe, seed: int) -> Walker:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return Walker(recipe)


class Shadow:
    def __init__(self, recipe: Recipe, setting: Setting, seed: int, files: dict[str, Any]) -> None:
        self.recipe, self.files = recipe, files
        self.fresh(setting, seed)

    def fresh(self, setting: Setting, seed: int) -> None:
        self.model = seeded(self.recipe, seed)
        self.masters: dict[nn.Parameter, Tensor] = {}
        self._start(setting)

    def again(self) -> None:
        """Another optimizer for the same model. Gradients of a running step went with the engine before."""
        self.drop()
        self._start(self.setting)

    def _start(self, setting: Setting) -> None:
        self.setting, self.dtype = setting, DTYPES[setting.dtype]
        self.accumulation, self.sums_in_fp32 = setting.accumulation, setting.accumulation > 1
        trained = [param for param in self.model.parameters() if param.requires_grad]
        if setting.dtype != "fp32" and not self.masters:
            self.masters = {param: param.detach().clone() for param in trained}
            for param in self.model.parameters():
                param.data = param.data.to(self.dtype)
            if not setting.deepspeed:
                self.model.mean = self.model.mean.to(self.dtype)
        self.optimizer = CHOICES[self.recipe.optimizer].plain(
            [{**group, "params": [self.stepped(p) for p in group["params"]]} for group in groups_of(self.model)]
        )
        schedule = SCHEDULES.get(self.recipe.schedule)
        self.schedule = None if schedule is None else schedule(self.optimizer)
        self.scale = PlainScale(power=SCALE_POWER, window=SCALE_WINDOW, hysteresis=1, consecutive=False)
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.has_stepped = False
        self.norm: float | None = None
        self.asked = self.clipped = False
        self.losses: list[Tensor] = []

    def stepped(self, param: nn.Parameter) -> Tensor:
        return self.masters.get(param, param)

    def param(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if param.requires_grad]

    # The loop

    def call(self, batch: int, direct: bool) -> Tensor:
        del direct
        logits: Tensor = self.model(tokens_of(batch))
        if logits.requires_grad:
            self.losses.append(loss_of(logits, batch))
        return logits

    def arm(self, where: str) -> None:
        self.model.goes_wrong = where

    def backward(self, retain: bool, times: float = 1.0) -> Tensor:
        loss = self.losses[-1] if retain else self.losses.pop()
        scaled = loss * times / self.accumulation if self.accumulation > 1 else loss * times
        times_scale = scaled.float() * self.scale.scale if self.setting.dtype == "fp16" else scaled
        self._differentiate(times_scale, retain)
        if self.sums_in_fp32:
            self._collect()
        return scaled.detach()

    def _differentiate(self, loss: Tensor, retain: bool) -> None:
        torch.autograd.backward(loss, retain_graph=retain)

    def _collect(self) -> None:
        for param, master in self.masters.items():
            if param.grad is not None:
                gradient = param.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                param.grad = None

    def drop(self) -> None:
        """What ``zero_grad`` leaves, and a backward that failed half-way."""
        self.clipped = False
        for param in self.model.parameters():
            param.grad = None
            self.stepped(param).grad = None
        self.micro_steps = 0

    def zero_grad(self) -> None:
        self.drop()

    def drop_gradient(self, name: str) -> None:
        param = self.param(name)
        param.grad = self.stepped(param).grad = None

    def _gradients(self) -> list[Tensor]:
        self._collect()
        found = (self.stepped(param).grad for param in self.trained)
        return [gradient for gradient in found if gradient is not None]

    def _unscaled(self) -> float:
        return self.scale.scale if self.setting.dtype == "fp16" else 1.0

    def clip(self, max_norm: float) -> Tensor:
        gradients = self._gradients()
        norm = nn.utils.get_total_norm(gradients) / self._unscaled()
        self._clip_by(gradients, max_norm, norm)
        self.norm, self.clipped = float(norm), True
        return norm

    @staticmethod
    def _clip_by(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)

    @torch.no_grad()
    def step(self, **scheduled: Any) -> None:
        self.micro_steps += 1
        self.has_stepped = True
        if self.micro_steps < self.accumulation:
            return
        gradients = self._gradients()
        fp16 = self.setting.dtype == "fp16"
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if not self.clipped:
            self.norm = None
        if not self.clipped and (self.recipe.clipping > 0 or self.asked or self._skips):
            norm = nn.utils.get_total_norm(gradients) / self._unscaled()
            self.norm = float(norm)
        if self._skips and not finite:
            self.skipped_steps += 1
        else:
            for gradient in gradients if fp16 else ():
                gradient.div_(self.scale.scale)
            if self.recipe.clipping:
                self._clip_by(gradients, self.recipe.clipping, norm)
            self.optimizer.step()
        for param, master in self.masters.items():
            param.copy_(master)
        self.drop()
        self.global_steps += 1
        if fp16:
            self.scale.update(overflow=not finite)
        if self.schedule is not None and (finite or not self._skips):
            self.schedule.step(**scheduled)

    @property
    def _skips(self) -> bool:
        """Whether a step with a gradient that is not finite is left out."""
        setting = self.setting
        zeros = setting.deepspeed and setting.update != "in_backward" and (setting.stage > 0 or setting.dtype == "bf16")
        return setting.dtype == "fp16" or zeros

    def grad_norm(self) -> float | None:
        self.asked = True
        return self.norm

    def set_accumulation(self, accumulation: int) -> None:
        self.accumulation = accumulation

    def mode(self, training: bool) -> None:
        self.model.train(training)

    def evaluate(self, batch: int, mode: str) -> Tensor:
        training = self.model.training
        self.model.eval()
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            logits: Tensor = self.model(tokens_of(batch))
        self.model.train(training)
        return logits

    def use_branch(self, used: bool) -> None:
        self.model.uses_branch = used

    # The optimizer

    def option(self, name: str, value: Any) -> None:
        for group in self.optimizer.param_groups:
            if name in group:
                group[name] = value

    def counters(self) -> dict[str, Any]:
        return {
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "steps": self.global_steps,
            "skipped": self.skipped_steps,
            "scale": self.scale.scale if self.setting.dtype == "fp16" else 1.0,
            "last_lr": None if self.schedule is None else self.schedule.get_last_lr(),
            "training": self.model.training,
        }

    def state(self, name: str, label: str) -> Tensor | None:
        param = self.param(name)
        if not param.requires_grad:
            return None
        stepped = self.stepped(param)
        found = self.optimizer.state.get(stepped, {}).get(STATES[self.recipe.optimizer][label])
        return torch.zeros_like(stepped) if found is None else found.clone()

    def set_state(self, name: str, label: str, seed: int) -> None:
        stepped = self.stepped(self.param(name))
        state = self.optimizer.state[stepped]
        if not state:
            for own in STATES[self.recipe.optimizer].values():
                state[own] = torch.zeros_like(stepped)
            if self.recipe.optimizer != "Lion":
                state["step"] = torch.zeros(())
        state[STATES[self.recipe.optimizer][label]].copy_(values_like(stepped, seed).abs())

    # Weights

    def read(self, name: str, how: str) -> Tensor:
        return self.param(name).detach().clone()

    def write(self, name: str, seed: int, how: str) -> None:
        param = self.param(name)
        with torch.no_grad():
            before = param.detach().clone()
            if how == "part":
                param.view(-1)[:2] = values_like(param, seed).to(param.dtype).view(-1)[:2]
            else:
                param.copy_(values_like(param, seed))
        self._follow(param, before)

    def kept(self, name: str) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """Weight and master of the parameter, or of all, for ``put_back``."""
        params = [self.param(name)] if name else list(self.model.parameters())
        return {param: (param.detach().clone(), self.stepped(param).detach().clone()) for param in params}

    @torch.no_grad()
    def put_back(self, kept: dict[nn.Parameter, tuple[Tensor, Tensor]]) -> None:
        for param, (weight, master) in kept.items():
            self.stepped(param).copy_(master)
            param.copy_(weight)

    @torch.no_grad()
    def _follow(self, param: nn.Parameter, before: Tensor) -> None:
        """A master stays where the weight is still its rounding."""
        master = self.masters.get(param)
        if master is not None:
            master.copy_(torch.where(param == master.to(param.dtype), master, param.float()))

    def master(self, name: str) -> Tensor:
        return self.stepped(self.param(name)).detach().float()

    @torch.no_grad()
    def set_master(self, name: str, seed: int) -> None:
        param = self.param(name)
        value = values_like(param, seed)
        if param in self.masters:
            self.masters[param].copy_(value)
        param.copy_(value)

    def gradient(self, name: str) -> Tensor | None:
        self._collect_if_read()
        param = self.param(name)
        found = self.stepped(param).grad if self.stepped(param).grad is not None else param.grad
        return None if found is None else found.detach().float()

    def _collect_if_read(self) -> None:
        if self.sums_in_fp32:
            self._collect()

    def set_gradient(self, name: str, seed: int) -> None:
        param = self.param(name)
        value = values_like(param, seed)
        if self.sums_in_fp32:
            self.stepped(param).grad = value
        else:
            param.grad = value.to(param.dtype)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def all_masters(self) -> dict[str, Tensor]:
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: self.stepped(param).detach().float() for name, param in named if param.requires_grad}

    def load_weights(self, seed: int, how: str, without: Sequence[str] = ()) -> None:
        """Another model's weights into this one's."""
        state = {name: value for name, value in seeded(self.recipe, seed).state_dict().items() if name not in without}
        if how == "part":
            state = {name: value for name, value in state.items() if name.startswith("head")}
        before = self.weights()
        self.model.load_state_dict(state, strict=how != "part" and not without)
        for name, param in self.model.named_parameters():
            self._follow(param, before[name])

    # Files

    def save(self, tag: str, asynchronous: bool) -> None:
        del asynchronous
        self.files[tag] = copy.deepcopy(
            {
                "weights": self.weights(),
                "masters": self.all_masters(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": None if self.schedule is None else self.schedule.state_dict(),
                "counters": (self.global_steps, self.skipped_steps),
                "scale": self.scale if self.setting.dtype == "fp16" else None,
                "random": torch.get_rng_state(),
            }
        )

    @torch.no_grad()
    def load(self, tag: str, only: str) -> None:
        found = copy.deepcopy(self.files[tag])
        for name, value in self.model.state_dict().items():
            value.copy_(found["masters"].get(name, found["weights"][name]))
        for name, param in self.model.named_parameters():
            if param in self.masters:
                self.masters[param].copy_(found["masters"][name])
        self.micro_steps = 0
        if only == "module":
            return
        if only != "no states":
            self.optimizer.load_state_dict(found["optimizer"])
            if self.setting.dtype == "fp16" and found["scale"] is not None:
                self.scale = found["scale"]
        if self.schedule is not None and only != "no schedule":
            self.schedule.load_state_dict(found["schedule"])
        self.global_steps, self.skipped_steps = found["counters"]
        if not self.setting.deepspeed or not (only or self.has_stepped):
            torch.set_rng_state(found["random"])

    def export(self, tag: str) -> None:
        self.files[tag] = self.weights()

    @torch.no_grad()
    def load_export(self, tag: str) -> None:
        """Weights and masters are what the file has."""
        for name, value in self.model.state_dict().items():
            value.copy_(self.files[tag][name])
        for name, param in self.model.named_parameters():
            if param in self.masters:
                self.masters[param].copy_(self.files[tag][name])

    # What only an engine has

    def offload(self, what: str) -> None: ...

    def reload(self) -> None: ...

    def empty_cache(self) -> None: ...

    def wait(self) -> None: ...

    def refused(self, what: str) -> None: ...

    def close(self) -> None: ...
