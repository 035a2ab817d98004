"""Frozen weights that are narrower than those that learn: they stay in the dtype that they came in, on every tier."""

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

WIDTH = 70
NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool]
OTHER_8_BITS = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


class Layer(nn.Module):
    """A frozen matrix, as somebody has stored it, and an adapter beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        drawn = torch.randn(WIDTH, WIDTH)
        stored = drawn > 0 if dtype is torch.bool else (drawn * (1 if dtype.is_floating_point else 20)).to(dtype)
        self.stored = nn.Parameter(stored, requires_grad=False)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.adapter(x) + x @ self.stored.to(x.dtype))


class Adapted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(3))
        self.scale: Tensor
        self.register_buffer("scale", torch.full((1,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x * self.scale, use_reentrant=False)
        return x.float().square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def config_of(directory: Path, *, stage: int, device: str, **sections: Any) -> dict[str, Any]:
    offload = {"device": device, **({"nvme_path": str(directory)} if device == "nvme" else {})}
    section: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_live_parameters": 6000,
    }
    if device != "none":
        section |= {"offload_param": offload, "offload_optimizer": offload}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": section,
        **sections,
    }


def plain(dtype: torch.dtype, num_steps: int = 3) -> dict[str, Tensor]:
    model = Adapted(dtype)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(num_steps):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def unlike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name, value in wanted.items()
        if found[name].dtype is not value.dtype or differing_bits(found[name].contiguous(), value)
    ]


def train(engine: Any, first: int, stop: int, inputs: torch.dtype = torch.float32) -> None:
    for step in range(first, stop):
        engine.backward(engine(batch(step).to(inputs)))
        engine.step()


@pytest.mark.parametrize(
    ("stage", "device", "dtype"),
    [
        *((stage, device, torch.bfloat16) for stage, device in ((0, "none"), (3, "none"), (3, "cpu"))),
        *((stage, device, dtype) for stage, device in ((2, "none"), (3, "nvme")) for dtype in NARROW),
    ],
    ids=str,
)
def test_they_train_as_in_plain_torch(
    stage: int, device: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_DEBUG", "poison")
    config = config_of(tmp_path, stage=stage, device=device)
    with infinity.initialize(model=Adapted(dtype), config=config)[0] as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved")
    with infinity.initialize(model=Adapted(dtype), config=config)[0] as engine:
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, 2, 3)
        assert unlike(engine.full_state_dict(), plain(dtype)) == []
        assert [param.dtype for param in engine.module.parameters()] == [
            param.dtype for param in Adapted(dtype).parameters()
        ]


@pytest.mark.parametrize("dtype", [*NARROW, *OTHER_8_BITS], ids=str)
def test_they_are_written_under_gathered_parameters_and_exported(dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_of(tmp_path, stage=3, device="nvme")
    with infinity.Init(config=config):
        model = Adapted(dtype)
    with infinity.initialize(model=model, config=config)[0] as engine:
        stored = model.get_parameter("layers.1.stored")
        with infinity.zero.GatheredParameters(stored, modifier_rank=0):
            new = stored.detach().flip(0).clone()
            stored.data.copy_(new)
        wanted = dict(Adapted(dtype).named_parameters()) | {"layers.1.stored": new}
        assert unlike(engine.full_state_dict(), {name: value.detach() for name, value in wanted.items()}) == []
        engine.save_16bit_model(tmp_path / "export")
    read: Any = Adapted(dtype)
    infinity.load_pretrained(read, tmp_path / "export")
    assert unlike(read.state_dict(), {"layers.1.stored": new}) == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_bytes_stay_beside_weights_of_16_bits_and_buffers_follow_those(dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_of(tmp_path, stage=3, device="nvme", bf16={"enabled": True})
    with infinity.initialize(model=Adapted(dtype), config=config)[0] as engine:
        train(engine, 0, 2, torch.bfloat16)
        kept = {name: param.detach() for name, param in Adapted(dtype).named_parameters() if not param.requires_grad}
        assert unlike(engine.full_state_dict(), kept) == []
        assert {param.dtype for param in engine.module.parameters()} == {dtype, torch.bfloat16}
        assert engine.module.scale.dtype is torch.bfloat16


def test_the_arena_and_the_disk_hold_them_in_their_own_size(tmp_path: Path) -> None:
    """Of a frozen model in bf16 beside one adapter the swap files are half of what fp32 would take."""

    def swap_bytes(dtype: torch.dtype) -> int:
        torch.manual_seed(1)
        base = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).to(dtype).requires_grad_(False)
        config = config_of(tmp_path, stage=3, device="nvme")
        with infinity.initialize(model=nn.Sequential(base, nn.Linear(4, 4)), config=config)[0] as engine:
            return int(engine.io_report().swap_bytes)

    assert swap_bytes(torch.bfloat16) < 0.55 * swap_bytes(torch.float32)


ON_RANKS = """
    import json, os
    import torch
    import infinity
    from pathlib import Path
    from tests.infinity.test_frozen_dtypes import NARROW, Adapted, config_of, plain, train, unlike

    found = {}
    for dtype in NARROW[::2]:
        for stage, device in ((1, "none"), (3, "nvme")):
            config = config_of(Path.cwd(), stage=stage, device=device)
            with infinity.Init(config=config, enabled=device == "nvme"):
                model = Adapted(dtype)
            with infinity.initialize(model=model, config=config)[0] as engine:
                train(engine, 0, 3)
                found[f"{dtype} {stage} {device}"] = unlike(engine.full_state_dict(), plain(dtype))
    print(json.dumps(found))
"""


def test_they_are_gathered_of_several_ranks(tmp_path: Path) -> None:
    for ended in run_ranks(ON_RANKS, tmp_path, num_ranks=2):
        assert {name: which for name, which in ended.answer.items() if which} == {}
        assert len(ended.answer) == 2 * len(NARROW[::2])
