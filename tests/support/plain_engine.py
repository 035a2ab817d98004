"""Plain torch behind the engine's surface: the same user's script runs on both, and the bits are compared.

fp32 parameters are stepped as they are, by torch's fused AdamW unless the script has an optimizer; other dtypes have an
fp32 master, and so has what is not contiguous where the optimizer is fused, which gets that wrong: a contiguous one.
What a user writes to a parameter between steps counts: the master takes over what is no longer its rounding. Nothing
here knows infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.device import CPU, USED

LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
EPS = 1e-8


def cast_weights(model: nn.Module, *, with_buffers: bool = True) -> None:
    """fp32 parameters to bf16 in place, as a bf16 section asks, and ``with_buffers`` all of an fp32 model's that its
    state dict holds and Transformers does not list as to be kept; what has another dtype keeps it. Weights in 8 bits
    do not say what their model came in."""
    params = list(nn.Module.parameters(model))  # also those that the model's own ``parameters()`` hides
    all_fp32 = all(param.dtype is torch.float32 for param in params if param.dtype.itemsize > 1)
    kept = {name for module in model.modules() for name in getattr(module, "_keep_in_fp32_modules_strict", None) or ()}
    values = [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set | kept
    ]
    for tensor in [*params, *(values if all_fp32 and with_buffers else [])]:
        if tensor.dtype is torch.float32 and not tensor.is_meta:
            tensor.data = tensor.data.bfloat16()


class PlainEngine(nn.Module):
    """``module`` trained by plain torch; ``snapshots`` are its weights before the first step and after each."""

    def __init__(
        self,
        module: nn.Module,
        *,
        bf16: bool,
        accumulation: int,
        clipping: float,
        parameters: Iterable[Any] | None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        offloaded: bool = False,
        casts_buffers: bool = True,
    ) -> None:
        """
        Args:
            offloaded: masters are on the CPU and stepped there, wherever the module is.
            casts_buffers: those of an fp32 model follow its weights into bf16.
        """
        super().__init__()
        self.module = module
        self._masters_on = CPU if offloaded else USED
        self.accumulation, self.clipping, self.bf16 = accumulation, clipping, bf16
        self.global_steps = self.micro_steps = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
            for param in module.parameters()
            if bf16 and accumulation > 1 and param.requires_grad
        ]
        given = list(parameters) if parameters is not None else list(module.parameters())
        groups = [dict(group) for group in given] if given and isinstance(given[0], dict) else [{"params": given}]
        self._layout = torch.preserve_format
        if optimizer is None or optimizer([nn.Parameter(torch.zeros(1))]).defaults.get("fused"):
            self._layout = torch.contiguous_format
        self._master_of: dict[nn.Parameter, Tensor] = {}
        for group in groups:
            group["params"] = [self._stepped(param) for param in group["params"]]
        if bf16:
            cast_weights(module, with_buffers=casts_buffers)
        if any(group["params"] for group in groups):
            self.optimizer = (
                optimizer(groups)
                if optimizer is not None
                else torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
            )
        self._grad_norm: float | None = None
        self.snapshots = [self.full_state_dict()]

    def _stepped(self, param: nn.Parameter) -> Tensor:
        """The tensor that the optimizer steps for ``param``: itself, or its master."""
        on_its_own = param.device.type == self._masters_on.type
        is_as_is = self._layout is torch.preserve_format or param.is_contiguous()
        if on_its_own and not self.bf16 and param.dtype is torch.float32 and is_as_is:
            return param
        master = param.detach().clone(memory_format=self._layout).float().to(self._masters_on)
        self._master_of[param] = master
        return master

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        scaled = loss / self.accumulation if self.accumulation > 1 else loss
        torch.autograd.backward(scaled, retain_graph=retain_graph)
        return scaled.detach()

    def _as_accumulated(self, stepped: Tensor) -> Tensor:
        """The gradient as autograd lays it out, like its parameter: torch sums a norm in the order of memory."""
        if stepped.grad is None:
            raise RuntimeError("what is stepped has a gradient")
        param = next((param for param, master in self._master_of.items() if master is stepped), stepped)
        like = torch.empty_like(param, dtype=stepped.grad.dtype, device=stepped.device)
        return like.copy_(stepped.grad.to_dense())

    def _collect(self, param: nn.Parameter) -> None:
        """What autograd has accumulated goes to the master: at once where micro-batches of bf16 add up in fp32."""
        master = self._master_of.get(param)
        if master is None or param.grad is None:
            return
        gradient = param.grad.detach()
        gradient = gradient.float().to(master.device).clone(memory_format=self._layout)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """The end of a micro-batch, as DeepSpeed counts them: by calls of ``step``."""
        self.micro_steps += 1
        if self.micro_steps < self.accumulation:
            return
        for param, master in self._master_of.items():
            self._collect(param)
            rounded, now = master.to(param.dtype), param.to(master.device)
            if not torch.equal(now, rounded):
                master.copy_(torch.where(rounded == now, master, now.to(master.dtype)))
        if self.optimizer is not None:
            known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            in_order = (self._master_of.get(p, p) for p in self.module.parameters())  # as scripts clip, groups or not
            stepped = [p for p in in_order if id(p) in known and p.grad is not None]
            norm = nn.utils.get_total_norm([self._as_accumulated(p) for p in stepped])
            self._grad_norm = float(norm)
            if self.clipping:
                nn.utils.clip_grads_with_norm_(stepped, self.clipping, norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        for param in self.module.parameters():
            param.grad = None
        for param, master in self._master_of.items():
            param.copy_(master)
        self.micro_steps = 0
        self.global_steps += 1
        self.snapshots.append(self.full_state_dict())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for tensor in [*self.module.parameters(), *self._master_of.values()]:
            tensor.grad = None
        self.micro_steps = 0

    def drop_gradients(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if (master := self._master_of.get(param)) is not None:
                master.grad = None

    def get_global_grad_norm(self) -> float | None:
        return None if self._grad_norm is None or math.isnan(self._grad_norm) else self._grad_norm

    def full_state_dict(self) -> dict[str, Any]:
        """As the engine's: a copy of every entry of ``state_dict``, one of what stands there under several names."""
        entries = self.module.state_dict(keep_vars=True)
        copies = {id(value): value.detach().clone() for value in entries.values() if isinstance(value, Tensor)}
        return {name: copies.get(id(value), value) for name, value in entries.items()}

    def destroy(self) -> None:
        """Nothing to give back."""
