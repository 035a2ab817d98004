"""One training story in which state is read and changed all the time: by ``infinity.utils``, and by plain torch.

Run in one process, or on every rank of several; the plain side trains on all ranks' batches and takes the mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity
from infinity import utils
from infinity.zero import GatheredParameters

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
STATES = ("exp_avg", "exp_avg_sq")


def build() -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.LayerNorm(50), nn.Linear(50, 33), nn.Linear(33, 7))
    model[3].requires_grad_(False)
    return model


def config(tier: str, swap_dir: str, *, bf16: bool, world_size: int = 1) -> dict[str, Any]:
    device: dict[str, Any] = {"device": tier, **({"nvme_path": swap_dir} if tier == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "bf16": {"enabled": bf16},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 60,
            "stage3_max_live_parameters": 0,
            "offload_param": device,
            "offload_optimizer": device,
        },
        "io_daemon": {"host_budget_bytes": 96 << 20},
    }


class Plain:
    """Weights of the model's dtype, fp32 masters that torch's AdamW steps; in fp32 they are the same tensors."""

    def __init__(self, model: nn.Module, *, bf16: bool) -> None:
        self.model = model
        masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        if bf16:
            model.bfloat16()
        self.params = dict(model.named_parameters())
        self.masters: dict[str, Tensor] = {
            name: masters[name] if bf16 and param.requires_grad else param for name, param in self.params.items()
        }
        trained = [self.masters[name] for name, p in self.params.items() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, fused=True, **ADAM)

    def backward(self, batches: list[Tensor]) -> None:
        """The mean of the gradients over ``batches``, of one rank each."""
        self.model.zero_grad()
        sums: dict[str, Tensor] = {}
        for batch in batches:
            grads = torch.autograd.grad(
                loss_of(self.model, batch), [p for p in self.params.values() if p.requires_grad]
            )
            names = [name for name, p in self.params.items() if p.requires_grad]
            for name, grad in zip(names, grads, strict=True):
                share = grad.float() / len(batches)
                sums[name] = sums[name] + share if name in sums else share
        for name, total in sums.items():
            self.masters[name].grad = total

    def follow(self, name: str) -> None:
        """The weights are rounded anew from their master."""
        with torch.no_grad():
            self.params[name].copy_(self.masters[name])

    def step(self) -> None:
        self.optimizer.step()
        for name in self.params:
            self.follow(name)


def loss_of(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def batches_of(step: int, *, world_size: int, bf16: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(3, 24, generator=generator).to(torch.bfloat16 if bf16 else torch.float32) for _ in range(world_size)
    ]


def differences(tier: str, swap_dir: str, *, bf16: bool, world_size: int = 1) -> list[str]:
    """What is not bit-equal to the plain run, in words; empty if everything is."""
    found: list[str] = []
    model = build()
    plain = Plain(copy.deepcopy(model), bf16=bf16)
    engine, *_ = infinity.initialize(model=model, config=config(tier, swap_dir, bf16=bf16))
    rank = dist.get_rank() if world_size > 1 else 0
    params = dict(model.named_parameters())

    def same(what: str, got: Tensor | None, expected: Tensor | None) -> None:
        if got is None or expected is None:
            if got is not expected:
                found.append(f"{what}: {got} instead of {expected}")
        elif got.shape != expected.shape or not torch.equal(got.detach().float(), expected.detach().float()):
            found.append(what)

    def local(full: Tensor) -> Tensor:
        """This rank's part, as state access cuts it."""
        numel = -(-full.numel() // world_size)
        numel = -(-numel // 64) * 64
        return full.flatten()[rank * numel : (rank + 1) * numel]

    def observe(when: str) -> None:
        for name, param in params.items():
            trained = param.requires_grad
            master = plain.masters[name]
            same(f"{when}: {name}", utils.safe_get_full_fp32_param(param), master if trained else plain.params[name])
            same(f"{when}: {name} local", utils.safe_get_local_fp32_param(param), local(master.detach()))
            gradient = master.grad if trained else None
            same(f"{when}: {name} grad", utils.safe_get_full_grad(param), gradient)
            part = None if gradient is None else local(gradient)
            same(f"{when}: {name} local grad", utils.safe_get_local_grad(param), part)
            for state in STATES:
                kept = plain.optimizer.state.get(master, {}).get(state, torch.zeros_like(master)) if trained else None
                same(f"{when}: {name} {state}", utils.safe_get_full_optimizer_state(param, state), kept)
                part = None if kept is None else local(kept)
                same(f"{when}: {name} local {state}", utils.safe_get_local_optimizer_state(param, state), part)

    observe("at first")
    for step in range(2):
        batches = batches_of(step, world_size=world_size, bf16=bf16)
        plain.backward(batches)
        engine.backward(loss_of(engine, batches[rank]))
        observe(f"after backward {step}")
        _change_gradients(step, params, plain, same)
        engine.step()
        plain.step()
        for master in plain.masters.values():
            master.grad = None
        observe(f"after step {step}")
        _change_weights(step, params, plain, rank=rank, world_size=world_size)
        _change_states(params, plain)
        observe(f"changed after step {step}")
        with torch.no_grad():
            same(f"forward {step}", engine(batches[0]), plain.model(batches[0]))
    for name, value in engine.full_state_dict().items():
        same(f"at the end: {name}", value, plain.params[name])
    engine.destroy()
    return found


def _change_gradients(step: int, params: dict[str, nn.Parameter], plain: Plain, same: Callable[..., None]) -> None:
    grads = {name: master.grad for name, master in plain.masters.items() if master.grad is not None}
    first, second, *rest = grads
    utils.safe_set_full_grad(params[first], 2 * grads[first])
    grads[first].mul_(2)
    part = utils.safe_get_local_grad(params[second])
    assert part is not None
    utils.safe_set_local_grad(params[second], part * -0.5)
    grads[second].mul_(-0.5)
    utils.safe_update_full_grad_vectorized([params[name] for name in rest], lambda grad, _: grad + step)
    for name in rest:
        grads[name].add_(step)
    for name, grad in grads.items():
        same(f"changed gradient {step}: {name}", utils.safe_get_full_grad(params[name]), grad)


def _change_weights(step: int, params: dict[str, nn.Parameter], plain: Plain, *, rank: int, world_size: int) -> None:
    whole, part, gathered, shared = "0.weight", "2.bias", "4.weight", "3.weight"
    modifier = step % world_size
    with torch.no_grad():
        value = utils.safe_get_full_fp32_param(params[whole])
        assert value is not None
        utils.safe_set_full_fp32_param(params[whole], value * 1.25)
        plain.masters[whole].mul_(1.25)
        own = utils.safe_get_local_fp32_param(params[part])
        assert own is not None
        utils.safe_set_local_fp32_param(params[part], own + 0.125)
        plain.masters[part].add_(0.125)
        for name in (whole, part):
            plain.follow(name)
        with GatheredParameters([params[gathered], params[shared]], modifier_rank=modifier):
            with GatheredParameters(params[gathered]):
                assert torch.equal(params[gathered], plain.params[gathered])
            if rank == modifier:
                params[gathered].mul_(0.75)
                params[shared].data = params[shared].data + 1
        for name, changed in ((gathered, plain.params[gathered] * 0.75), (shared, plain.params[shared] + 1)):
            plain.params[name].copy_(changed)
            plain.masters[name].copy_(changed)


def _change_states(params: dict[str, nn.Parameter], plain: Plain) -> None:
    for name, state in (("0.bias", "exp_avg"), ("4.weight", "exp_avg_sq")):
        kept = plain.optimizer.state[plain.masters[name]][state]
        kept.mul_(0.5)
        utils.safe_set_full_optimizer_state(params[name], kept.clone(), state)
        part = utils.safe_get_local_optimizer_state(params[name], state)
        assert part is not None
        utils.safe_set_local_optimizer_state(params[name], part * 2, state)
        kept.mul_(2)
