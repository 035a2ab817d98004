"""``offload_optimizer.ratio``: part of the states stays on the device, and no bit depends on which part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import infinity
from infinity.config import parse_config
from infinity.plan.memory_plan import StateShape, plan_memory
from infinity.plan.precision import STATES_MASK, Precision, Tiers
from infinity.plan.sharding import NORM_BLOCK, cut_chunks, place_group
from io_daemon.shared.protocol import PAGE_BYTES, ObjectKind, align_up

WIDTH = 300


def _config(ratio: float, device: str, directory: Path | str = ".", **sections: Any) -> dict[str, Any]:
    states = {"device": device, "nvme_path": str(directory), "ratio": ratio}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 16384, "offload_optimizer": states}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0.1,
        "zero_optimization": zero,
        **sections,
    }


def _trained(config: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Weights after some steps, and the bytes that are on the device between steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    model[3].requires_grad_(False)
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    with infinity.initialize(model=model, config=config)[0] as engine:
        for step in range(3):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
            engine.backward(engine(x).float().square().mean())
            engine.step()
        on_device = engine._runtime.store.stats().get("resident_bytes", 0.0)
        return engine.full_master_state_dict(), on_device


@pytest.mark.parametrize(("device", "bf16"), [("nvme", False), ("nvme", True), ("cpu", True)])
def test_no_bit_depends_on_the_part_that_stays(device: str, bf16: bool, tmp_path: Path) -> None:
    precision: dict[str, Any] = {"bf16": {"enabled": bf16}}
    runs = {ratio: _trained(_config(ratio, device, tmp_path, **precision)) for ratio in (0.0, 0.3, 1.0)}
    expected = _trained(_config(1.0, "none", **precision))[0]
    for weights, _ in runs.values():
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    none, part, whole = (runs[ratio][1] for ratio in (1.0, 0.3, 0.0))
    if bf16:  # beside masters on the device there are no weights
        whole += 2 * sum(weights.numel() for weights in expected.values())
    states = whole - none
    assert states > 0
    assert 0.5 * states < part - none < 0.75 * states, "0.7 of the elements, in whole chunks"


@given(
    st.lists(st.tuples(st.integers(1, 2_000_000), st.booleans()), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
    st.sampled_from(["nvme", "cpu"]),
)
def test_the_plan_reserves_what_does_not_stay(groups: list[tuple[int, bool]], ratio: float, device: str) -> None:
    config = parse_config({**_config(ratio, device), "bf16": {"enabled": True}}, check_paths=False)
    precision = Precision.of(config, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32})
    dtypes = precision.dtypes(trainable=True)
    tiers = Tiers.of(config, precision)
    placed = [
        place_group(number, [(number, numel)], world_size=1, trainable=trainable)
        for number, (numel, trainable) in enumerate(groups)
    ]
    shape = StateShape(
        group_shard_numels=[group.shard_numel for group in placed],
        group_trainable=[group.trainable for group in placed],
        itemsizes={k: d.itemsize for k, d in dtypes.items() if tiers.host_mask >> k & 1},
        trained_mask=~ObjectKind.WEIGHT.mask,
        pinned_mask=tiers.pinned_mask,
        ratio=tiers.ratio,
    )
    made = plan_memory(shape, budget_bytes=None, chunk_numel_max=NORM_BLOCK, local_world_size=1, budget_key="k")
    chunks = [chunk for group in placed for chunk in cut_chunks(group, rank=0, chunk_numel=made.chunk_numel)]
    trained = [placed[chunk.group].trainable for chunk in chunks]
    masks = tiers.device_masks((chunk.numel, flag) for chunk, flag in zip(chunks, trained, strict=True))
    away = [chunk.numel for chunk, mask, flag in zip(chunks, masks, trained, strict=True) if flag and not mask >> 1 & 1]
    assert all(mask in (tiers.device_mask, tiers.device_mask | STATES_MASK) for mask in masks)
    sizes = [d.itemsize for k, d in dtypes.items() if k != ObjectKind.WEIGHT]
    needed = sum(align_up(numel * size, PAGE_BYTES) for numel in away for size in sizes)
    assert made.swap_bytes == (needed if device == "nvme" else 0)
    frames = sum(-(-align_up(numel * size, PAGE_BYTES) // made.frame_bytes) for numel in away for size in sizes)
    assert made.pinned_frames == (frames if device == "cpu" else 0)
    stay = sum(chunk.numel for chunk, flag in zip(chunks, trained, strict=True) if flag) - sum(away)
    total = sum(group.shard_numel for group in placed if group.trainable)
    assert stay <= total - round(ratio * total)


def test_a_ratio_of_what_is_not_offloaded_is_told() -> None:
    notes = parse_config(_config(0.5, "none")).notes
    assert "zero_optimization.offload_optimizer.ratio = 0.5 is not used: device is none" in notes
