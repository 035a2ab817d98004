"""What is kept in which dtype, where a configuration asks for another than the usual ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.support.ranks import run_ranks
from tests.support.reference import differing_bits

NUM_STEPS = 6


class Routed(nn.Module):
    """Two layers; three buffers, of which a model of transformers' would want some in fp32."""

    _keep_in_fp32_modules_strict = ("router",)
    _keep_in_fp32_modules = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 130), nn.Linear(130, 9)
        self.router_bias: Tensor
        self.scale: Tensor
        self.mean: Tensor
        for name in ("router_bias", "scale", "mean"):
            self.register_buffer(name, torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output.square().mean()


def model() -> Routed:
    torch.manual_seed(2)
    return Routed()


def batch(number: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(number)).to(dtype)


def engine_of(**sections: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 200},
        **sections,
    }
    return infinity.initialize(model=model(), config=config)[0]


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> int:
    return sum(differing_bits(left[name], right[name]) for name in right)


def plain_bf16(*, states_too: bool) -> dict[str, Tensor]:
    """AdamW on bf16 weights: its states in bf16, too, or the step in fp32 and its result rounded."""
    mine = model().bfloat16()
    params = list(mine.parameters())
    stepped = params if states_too else [param.detach().float() for param in params]
    optimizer = torch.optim.AdamW(stepped, lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(NUM_STEPS):
        mine(batch(step, torch.bfloat16)).backward()
        if not states_too:
            for copy, param in zip(stepped, params, strict=True):
                copy.copy_(param.detach())
                copy.grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copy, param in zip(stepped, params, strict=True):
                param.copy_(copy)
        mine.zero_grad(set_to_none=True)
    return {name: value.detach() for name, value in mine.named_parameters()}


@pytest.mark.parametrize("states_too", [False, True])
def test_bf16_weights_are_stepped_as_they_are(states_too: bool) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states_too}
    with engine_of(bf16=bf16) as engine:
        for step in range(NUM_STEPS):
            engine.backward(engine(batch(step, torch.bfloat16)))
            engine.step()
        assert differing(engine.full_state_dict(), plain_bf16(states_too=states_too)) == 0


def plain_sums(dtype: torch.dtype) -> dict[str, Tensor]:
    """One step of AdamW over fp32 masters of a bf16 model, three gradients added up in ``dtype``."""
    mine = model().bfloat16()
    masters = {name: param.detach().float() for name, param in model().named_parameters()}
    for number in range(3):
        (mine(batch(number, torch.bfloat16)) / 3).backward()
        for name, param in mine.named_parameters():
            if param.grad is not None:
                own, before = param.grad.to(dtype), masters[name].grad
                masters[name].grad = own.float() if before is None else (before.to(dtype) + own).float()
                param.grad = None
    torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.0, fused=True).step()
    return masters


@pytest.mark.parametrize(("name", "dtype"), [(None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_gradients_add_up_in_the_dtype_asked_for(name: str | None, dtype: torch.dtype) -> None:
    sections = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3, "data_types": {"grad_accum_dtype": name}}
    with engine_of(**sections) as engine:
        for number in range(3):
            engine.backward(engine(batch(number, torch.bfloat16)))
            engine.step()
        masters = engine.full_master_state_dict()
    assert differing(masters, plain_sums(dtype)) == 0
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    assert differing(masters, plain_sums(other)) > 0


@pytest.mark.parametrize(
    ("precision", "kept", "in_fp32"),
    [
        ("bf16", None, ["router_bias"]),
        ("bf16", "auto", ["router_bias"]),
        ("fp16", "auto", ["router_bias", "scale"]),
        ("bf16", [], []),
        ("bf16", ["r*bias", "ean"], ["router_bias", "mean"]),
    ],
)
def test_buffers_that_are_named_stay_in_fp32(precision: str, kept: Any, in_fp32: list[str]) -> None:
    sections: dict[str, Any] = {precision: {"enabled": True}, "data_types": {"keep_in_fp32_modules": kept}}
    with engine_of(**sections) as engine:
        found = [name for name, buffer in engine.module.named_buffers() if buffer.dtype is torch.float32]
    assert found == in_fp32


OVERFLOW_ON_ONE_RANK = """
    import json, math, os
    import torch
    from torch import nn
    import infinity

    rank, found = int(os.environ["RANK"]), {}
    for stage in (1, 3):
        torch.manual_seed(5)
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
        engine, optimizer, _, scheduler = infinity.initialize(
            model=nn.Sequential(nn.Linear(24, 300), nn.Tanh(), nn.Linear(300, 4)),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2},
                "gradient_clipping": 0.5,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "scheduler": schedule,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
                "steps_per_print": 0,
            },
        )
        rows = []
        for step in range(8):
            x = torch.randn(2, 24, generator=torch.Generator().manual_seed(10 * step + rank)).half()
            # each rank overflows once, alone
            blow_up = math.inf if (step, rank) in ((2, 1), (5, 0)) else 1.0
            scale = engine.cur_scale
            engine.backward((engine(x) * blow_up).square().mean())
            engine.step()
            norm = engine.get_global_grad_norm()
            rows.append([scale, engine.was_step_applied(), norm if math.isfinite(norm) else None,
                         scheduler.last_batch_iteration])
        total = sum(float(value.double().abs().sum()) for value in engine.full_state_dict().values())
        found[stage] = [rows, total]
        engine.destroy()
    print(json.dumps(found))
"""


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    first, second = (ended.answer for ended in run_ranks(OVERFLOW_ON_ONE_RANK, tmp_path, num_ranks=2))
    assert first == second
    assert first["1"] == first["3"], "the stage decides who keeps what, not what happens"
    rows, _ = first["3"]
    assert [applied for _, applied, _, _ in rows] == [True, True, False, True, True, False, True, True]
    assert [scale for scale, *_ in rows] == [256, 256, 256, 128, 128, 128, 64, 64]
    assert [norm is None for _, _, norm, _ in rows] == [not applied for _, applied, _, _ in rows]
    assert [iteration for *_, iteration in rows] == [0, 1, 1, 2, 3, 3, 4, 5]


def travelling_in_bf16(stage: int) -> dict[str, Any]:
    """Two micro-batches a step, of a model in fp32."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "communication_data_type": "bf16",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_rounds_the_gradients_of_each_micro_batch_as_several_do(stage: int) -> None:
    """DeepSpeed's weights, which were held against this sum once: rounded gradients, added up in fp32."""

    def model() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(24, 24)

    batches = [torch.randn(4, 24, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    plain, expected = model(), torch.zeros(24, 24)
    with infinity.initialize(model=model(), config=travelling_in_bf16(stage))[0] as engine:
        for batch in batches:
            engine.backward(engine(batch).square().mean())
            engine.step()
            (gradient,) = torch.autograd.grad(plain(batch).square().mean() / 2, [plain.weight])
            expected += gradient.bfloat16()
        assert torch.equal(engine.full_state_dict()["weight"], plain.weight.detach() - expected)


@pytest.mark.parametrize("stage", [0, 1])
def test_one_rank_rounds_the_sum_of_a_steps_gradients_as_several_do(stage: int) -> None:
    """Where micro-batches are summed before they travel, it is their sum that travels: also of a layer that the last
    one does not use, and of a gradient that a re-entrant checkpoint gives twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = x.requires_grad_()
            out = checkpoint(self.first, x, use_reentrant=True) + checkpoint(self.first, x.tanh(), use_reentrant=True)
            found: torch.Tensor = out + self.second(x) if both else out
            return found

    plain = Twice()
    with infinity.initialize(model=Twice(), config=travelling_in_bf16(stage))[0] as engine:
        for step in range(4):
            batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(batch.clone(), step % 2 == 0).square().mean())
            engine.step()
            (plain(batch.clone(), step % 2 == 0).square().mean() / 2).backward()
            if step % 2 == 1:
                norm = torch.nn.utils.get_total_norm(
                    [p.grad.bfloat16().float() for p in plain.parameters() if p.grad is not None]
                )
                assert engine.get_global_grad_norm() in (None, pytest.approx(float(norm)))
                for param in plain.parameters():
                    assert param.grad is not None
                    param.data -= param.grad.bfloat16()
                    param.grad = None
        expected = plain.state_dict()
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, expected[name]), name
