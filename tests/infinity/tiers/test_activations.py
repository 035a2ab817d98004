"""Inputs of checkpointed calls that wait in swap files: the bits of those in memory, bytes that travel, space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import infinity
from infinity import checkpointing
from infinity.config import parse_config
from infinity.errors import ConfigError, EngineStateError
from infinity.tiers.activations import ActivationStore
from io_daemon.shared.metrics import TenantStats
from io_daemon.shared.protocol import ObjectKind
from tests.support.ranks import run_ranks

WIDTH, ROWS, NUM_BLOCKS, NUM_STEPS = 64, 512, 12, 2
INPUT_BYTES = WIDTH * ROWS * 4
BUDGET_BYTES = 8 << 20
"""An eighth is the activations': 8 frames of 128 KiB, of which a step has 12 inputs."""


class Block(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.call, self.fails = call, False

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("a block fails")
        hidden = self.call(lambda y: torch.relu(self.inner(y)), x)  # a checkpoint within a checkpoint
        out: Tensor = x + self.dropout(self.outer(hidden)) * scale
        return out


class Model(nn.Module):
    def __init__(self, call: Callable[..., Any], inner: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(inner or call) for _ in range(NUM_BLOCKS))
        self.call = call
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x, self.scale * 2)
        return x.square().mean()


def torchs(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)


def batch(step: int) -> Tensor:
    """A leaf, as a re-entrant checkpoint needs it."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()


def config(swap_dir: Path | str, *, device: str = "none", **sections: Any) -> dict[str, Any]:
    offload = {"device": device, **({"nvme_path": str(swap_dir)} if device == "nvme" else {})}
    daemon = {"host_budget_bytes": BUDGET_BYTES, "activation_checkpoints": True, "swap_dirs": [str(swap_dir)]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": daemon,
        **sections,
    }


def plain() -> dict[str, Tensor]:
    model = Model(torchs)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0, fused=True)
    torch.manual_seed(7)
    for step in range(NUM_STEPS):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def train(engine: Any, *, num_steps: int = NUM_STEPS) -> None:
    torch.manual_seed(7)
    for step in range(num_steps):
        engine.backward(engine(batch(step)))
        engine.step()


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> checkpointing.Checkpointing:
    """The process's settings are the test's alone."""
    own = checkpointing.Checkpointing()
    monkeypatch.setattr(checkpointing, "_process", own)
    return own


@pytest.fixture
def engine(tmp_path: Path, process: checkpointing.Checkpointing) -> Iterator[Any]:
    model = Model(checkpointing.checkpoint)
    with infinity.initialize(model=model, config=config(tmp_path))[0] as engine:
        yield engine


def store_of(process: checkpointing.Checkpointing) -> ActivationStore:
    assert process.store is not None
    return process.store


@pytest.mark.parametrize("inner", [checkpointing.checkpoint, reentrant], ids=["nested", "reentrant inside"])
@pytest.mark.parametrize("device", ["none", "nvme"])
def test_the_bits_are_those_of_inputs_in_memory(device: str, inner: Callable[..., Any], tmp_path: Path) -> None:
    model = Model(checkpointing.checkpoint, inner)
    with infinity.initialize(model=model, config=config(tmp_path, device=device))[0] as engine:
        train(engine)
        weights = engine.full_state_dict()
    expected = plain()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_inputs_are_written_and_read_and_memory_is_the_budgets(engine: Any, process: Any) -> None:
    store = store_of(process)
    loss = engine(batch(0))
    assert store.num_waiting >= NUM_BLOCKS
    arena_bytes = store._store.client.frame_bytes * store._num_ahead_max * 2  # type: ignore[attr-defined]
    assert arena_bytes <= BUDGET_BYTES // 8 < NUM_BLOCKS * INPUT_BYTES
    engine.backward(loss)
    engine.step()
    del loss
    stats = stats_of(store)
    over = NUM_BLOCKS * INPUT_BYTES - arena_bytes
    assert stats.total.bytes_written[ObjectKind.STAGING] >= over, "what has no frame was written"
    assert stats.total.bytes_read[ObjectKind.STAGING] >= over, "and read"
    assert store.num_waiting == 0


def stats_of(store: ActivationStore) -> TenantStats:
    stats = store._store.tenant_stats()
    assert stats is not None
    return stats


def test_space_is_used_again_and_goes_in_the_end(engine: Any, process: Any, tmp_path: Path) -> None:
    store = store_of(process)
    train(engine, num_steps=1)
    assert store.num_waiting == 0
    first = stats_of(store)
    assert first.swap_bytes >= NUM_BLOCKS * INPUT_BYTES
    train(engine, num_steps=2)
    assert stats_of(store).num_chunks == first.num_chunks, "no step takes more than the first"
    checkpointing.reset()
    assert stats_of(store).num_chunks == 0
    train(engine, num_steps=1)
    assert stats_of(store).swap_bytes == first.swap_bytes
    assert list(tmp_path.iterdir())
    engine.destroy()
    assert not list(tmp_path.iterdir())


def test_a_graph_without_a_backward_leaves_nothing(engine: Any, process: Any) -> None:
    store = store_of(process)
    loss = engine.module(batch(0))
    assert store.num_waiting >= NUM_BLOCKS
    del loss
    assert store.num_waiting == 0


def forward_and_backward(engine: Any, block: Any) -> None:
    loss = engine(batch(9))
    block.fails = True
    engine.backward(loss)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(where: str, engine: Any, process: Any) -> None:
    block = engine.module.blocks[NUM_BLOCKS // 2]
    block.fails = where == "forward"
    with pytest.raises(ValueError, match="a block fails"):
        forward_and_backward(engine, block)
    block.fails = False
    assert store_of(process).num_waiting == 0
    engine.zero_grad()
    train(engine)
    weights, expected = engine.full_state_dict(), plain()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_a_kept_graph_is_gone_through_again(engine: Any) -> None:
    x = batch(0)
    engine.eval()
    loss = engine.module(x)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)


def test_backward_after_the_end_says_so(engine: Any) -> None:
    x = batch(0)
    loss = checkpointing.checkpoint(torch.sin, x).sum()
    engine.destroy()
    with pytest.raises(EngineStateError, match=r"before destroy\(\)"):
        loss.backward()


def test_without_an_engine_inputs_stay_in_memory() -> None:
    x = batch(0)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


def test_what_lies_otherwise_comes_back_as_it_lay(engine: Any, process: Any) -> None:
    image = torch.randn(2, 8, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    half = torch.randn(64, 64, dtype=torch.bfloat16).t().requires_grad_()
    holes = torch.randn(64, 128, requires_grad=True)
    seen: list[tuple[Any, ...]] = []

    def look(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        seen.append((x.stride(), y.stride(), z.stride(), x.dtype, y.dtype))
        return x.sum() + y.float().square().sum() + z.sum()

    loss = checkpointing.checkpoint(look, image, half, holes[:, ::2])
    assert store_of(process).num_waiting == 2, "the one with holes stays"
    loss.backward()
    assert seen[0] == seen[1]
    assert half.grad is not None
    assert torch.equal(half.grad, half.detach() * 2)


def test_what_cannot_be_is_refused_by_key(tmp_path: Path) -> None:
    nowhere = config(tmp_path)
    del nowhere["io_daemon"]["swap_dirs"]
    with pytest.raises(ConfigError, match="swap_dirs") as refusal:
        parse_config(nowhere)
    assert refusal.value.key == "io_daemon.activation_checkpoints"
    for name in ("cpu_checkpointing", "contiguous_memory_optimization"):
        section = {name: True, "number_checkpoints": 4}
        with pytest.raises(ConfigError, match="not together") as refusal:
            parse_config(config(tmp_path, activation_checkpointing=section))
        assert refusal.value.key == f"activation_checkpointing.{name}"


def test_on_two_ranks(tmp_path: Path) -> None:
    code = f"""
    import json, torch
    from tests.infinity.tiers.test_activations import Model, config, plain, train
    import infinity
    from infinity import checkpointing
    model = Model(checkpointing.checkpoint)
    engine = infinity.initialize(model=model, config=config({str(tmp_path)!r}, device="nvme"))[0]
    store = checkpointing._process.store
    train(engine)
    weights, expected, waiting = engine.full_state_dict(), plain(), store.num_waiting
    engine.destroy()
    print(json.dumps([n for n in expected if not torch.equal(weights[n], expected[n])] + [waiting]))
    """
    assert [rank.answer for rank in run_ranks(code, tmp_path, num_ranks=2)] == [[0], [0]]
