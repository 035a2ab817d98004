"""What only a second timeline can get wrong: copies beside the computation, memory that both use, and streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.tiers import daemon
from tests.support.device import USED, be_deterministic
from tests.support.reference import differing_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

WIDTH = 512
NUM_LAYERS = 6
LAYER_NUMEL = 2 * WIDTH * WIDTH
LEARNING_RATE = 1e-2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        widened: Tensor = self.up(x)
        out: Tensor = x + self.down(torch.tanh(widened))
        return out


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))


def inputs(step: int, rows: int = 256) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).to(USED, torch.bfloat16)


def config(tier: str, directory: Path, **changes: Any) -> dict[str, Any]:
    offload = {"device": tier, **({"nvme_path": str(directory)} if tier == "nvme" else {})}
    zero = {
        "stage": 3,
        "sub_group_size": 200_000,
        "stage3_prefetch_bucket_size": LAYER_NUMEL,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 2 * LAYER_NUMEL,
        "stage3_max_reuse_distance": 0,
        "offload_param": offload,
        "offload_optimizer": offload,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        "zero_optimization": zero,
        "io_daemon": {"host_budget_bytes": 128 << 20} if tier != "none" else {},
        **changes,
    }


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    be_deterministic()
    yield
    torch.use_deterministic_algorithms(False)


def engine_of(tier: str, directory: Path, **changes: Any) -> Engine:
    return infinity.initialize(model=build(), config=config(tier, directory, **changes))[0]


def trained_plainly(num_steps: int, *, masters_on: torch.device, accumulation: int = 1) -> list[Tensor]:
    """The weights that torch's own loop gives: the model on the GPU, its masters and their update where they are."""
    model = build().to(USED)
    masters = [param.detach().clone().to(masters_on) for param in model.parameters()]
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for step in range(num_steps):
        for micro in range(accumulation):
            loss = model(inputs(step * accumulation + micro)).float().square().mean() / accumulation
            loss.backward()
            for param, master in zip(model.parameters(), masters, strict=True):
                assert param.grad is not None
                gradient = param.grad.float().to(master.device)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                param.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    return [param.detach().cpu() for param in model.parameters()]


def train(engine: Engine, num_steps: int, accumulation: int = 1) -> list[Tensor]:
    for number in range(num_steps * accumulation):
        loss = engine(inputs(number)).float().square().mean()
        engine.backward(loss)
        engine.step()
    weights = engine.full_state_dict()
    return [weights[name].cpu() for name, _ in engine.module.named_parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert sum(differing_bits(a, b) for a, b in zip(found, expected, strict=True)) == 0


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_copies_beside_the_computation_change_no_bit(tier: str, accumulation: int, tmp_path: Path) -> None:
    engine = engine_of(tier, tmp_path, gradient_accumulation_steps=accumulation)
    found = train(engine, 12, accumulation)
    engine.destroy()
    masters_on = USED if tier == "none" else torch.device("cpu")
    assert_same(found, trained_plainly(12, masters_on=masters_on, accumulation=accumulation))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the engine holds them
def test_a_script_that_computes_in_a_stream_of_its_own(tmp_path: Path) -> None:
    engine, stream = engine_of("cpu", tmp_path), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = train(engine, 8)
    torch.cuda.current_stream().wait_stream(stream)
    engine.destroy()
    assert_same(found, trained_plainly(8, masters_on=torch.device("cpu")))


def test_streams_that_take_turns_see_the_same_weights(tmp_path: Path) -> None:
    """What one stream still reads is nobody else's memory, whichever stream the next use comes from."""
    engine = engine_of("cpu", tmp_path)
    engine.eval()
    with torch.no_grad():
        expected = engine(inputs(0, 4096)).clone()
        outputs = []
        for _ in range(10):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs.append(engine(inputs(0, 4096)))
        torch.cuda.synchronize()
    for output in outputs:
        assert torch.equal(output, expected)
    engine.destroy()


def test_a_copy_lies_in_one_piece_of_what_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses one that goes beyond."""
    monkeypatch.setattr(daemon, "CUDA_REGISTER_BYTES_MAX", 1_000_000)
    engine = engine_of("cpu", tmp_path)
    found = train(engine, 2)
    engine.destroy()
    assert_same(found, trained_plainly(2, masters_on=torch.device("cpu")))


def test_the_device_holds_few_layers_at_a_time(tmp_path: Path) -> None:
    """Weights that stream: the live ones, one layer that is still computed with, and one that comes."""
    engine = engine_of("cpu", tmp_path)
    train(engine, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.eval()
    with torch.no_grad():
        for step in range(5):
            engine(inputs(step, 8))
    layers = (torch.cuda.max_memory_allocated() - before) / (LAYER_NUMEL * 2)
    engine.destroy()
    assert layers < 5, f"{layers:.1f} of {NUM_LAYERS} layers"
