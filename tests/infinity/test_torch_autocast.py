"""``torch_autocast``: the bits of a plain loop under ``torch.autocast``, with torch's own scaler where that is fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.config import parse_config
from infinity.errors import ConfigError

WIDTH = 64


class Model(nn.Module):
    """Operations that autocast casts, keeps in fp32, and leaves alone; the embedding's weights are the head's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.norm = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH)
        self.hidden, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.second(torch.nn.functional.gelu(self.hidden(self.norm(self.embedding(x)))))
        return torch.nn.functional.cross_entropy(hidden @ self.embedding.weight.t(), target)


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(32, (2, 4), generator=torch.Generator().manual_seed(step))
    return drawn[0], drawn[1]


def engine_of(dtype: str | None, directory: Path, *, stage: int, accumulation: int = 1) -> Any:
    states = {"device": "nvme", "nvme_path": str(directory)}
    offload = {"offload_optimizer": states, "offload_param": states} if stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **offload},
        "torch_autocast": {"enabled": True, **({"dtype": dtype} if dtype else {})},
    }
    return infinity.initialize(model=Model(), config=config)[0]


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize(("stage", "dtype", "accumulation"), [(3, None, 2), (2, "bfloat16", 1)])
def test_losses_and_weights_are_those_of_a_plain_loop(
    stage: int, dtype: str | None, accumulation: int, tmp_path: Path
) -> None:
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.0, fused=True)
    with engine_of(dtype, tmp_path, stage=stage, accumulation=accumulation) as engine:
        for step in range(4 * accumulation):
            loss = engine(*batch(step))
            engine.backward(loss)
            engine.step()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = plain(*batch(step))
            (expected / accumulation).backward()
            if step % accumulation == accumulation - 1:
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(loss, expected)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected = plain(*batch(9))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            assert torch.equal(engine(*batch(9)), expected), "the caller's autocast gives way to the configuration's"
        assert equal(engine.full_state_dict(), dict(plain.state_dict()))


def test_in_fp16_the_loss_is_scaled_as_by_torchs_grad_scaler(tmp_path: Path) -> None:
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scales, ours = [], []
    with engine_of("fp16", tmp_path, stage=3) as engine:
        assert engine.dynamic_loss_scale()
        for step in range(8):
            blown_up = 1e4 if step in (2, 5) else 1.0
            engine.backward(engine(*batch(step)) * blown_up)
            engine.step()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = plain(*batch(step)) * blown_up
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            ours.append(engine.cur_scale)
        assert engine.skipped_steps >= 2
        assert ours == scales
        assert equal(engine.full_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("other", ["bf16", "fp16"])
def test_16_bit_weights_are_not_cast_once_more(other: str) -> None:
    with pytest.raises(ConfigError, match=f"{other} is enabled, too") as refusal:
        parse_config({"train_batch_size": 1, "torch_autocast": {"enabled": True}, other: {"enabled": True}})
    assert refusal.value.key == "torch_autocast.enabled"
