"""Losses that reach a model by other ways than one output, differentiated by the script itself, and by plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity.deepspeed as deepspeed

WIDTH: Final = 24
FP16_SCALE: Final = 4096.0
"""Large enough that no gradient is subnormal, where its bits depend on where it was divided."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Says what lies between, too; ``beside`` is of no use to its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.beside = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Any]:
        between = torch.tanh(self.first(x))
        out = self.head(torch.tanh(self.second(between)))
        return {"loss": out.float().pow(2).mean(), "inside": (out, between)}


Outputs = dict[str, Any]
Losses = Callable[[nn.Module, Outputs], list[Tensor]]


def _of_weights(model: nn.Module) -> Tensor:
    return torch.stack([param.float().pow(2).sum() for param in model.parameters()]).sum() * 1e-2


LOSSES: Final[dict[str, Losses]] = {
    "one output": lambda _, out: [out["loss"]],
    "outputs in a row": lambda _, out: [out["loss"] + out["inside"][0].float().abs().mean()],
    "a regulariser on weights": lambda model, out: [out["loss"] + _of_weights(model)],
    "a regulariser alone": lambda model, _: [_of_weights(model)],
    "between": lambda _, out: [out["loss"] + 0.5 * out["inside"][1].float().pow(2).mean()],
    "two in turn": lambda model, out: [out["loss"] + _of_weights(model), out["inside"][1].float().abs().mean()],
}


def micro_batches(count: int, dtype: torch.dtype, rank: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5 + rank)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator).to(dtype)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def started(stage: int, kind: str, accumulation: int) -> Any:
    """An engine; micro-batches until a step: ``accumulation``."""
    sections: dict[str, dict[str, Any]] = {
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": FP16_SCALE}},
    }
    return deepspeed.initialize(
        model=net(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **sections.get(kind, {}),
        },
    )[0]


def gradients(engine: Any, kind: str, losses: Losses, *, by_engine: bool) -> list[Tensor | None]:
    """Those of one step, which is dropped: by ``loss.backward()``, or by ``engine.backward(loss)``."""
    accumulation = engine.gradient_accumulation_steps()
    for number, x in enumerate(micro_batches(accumulation, DTYPES[kind], dist.get_rank()), 1):
        each = losses(engine.module, engine(x))
        for index, loss in enumerate(each, 1):
            if by_engine:
                engine.backward(loss, retain_graph=index < len(each))
            else:
                engine.scale(loss).backward(retain_graph=index < len(each))
        if number < accumulation:
            engine.step()
    found = [deepspeed.utils.safe_get_full_grad(param) for param in engine.module.parameters()]
    engine.zero_grad()
    return found


def plain_gradients(kind: str, accumulation: int, losses: Losses) -> list[Tensor | None]:
    """Plain torch's: those of ``loss / accumulation``, added up in fp32."""
    model = net().to(DTYPES[kind])
    total: dict[nn.Parameter, Tensor] = {}
    for x in micro_batches(accumulation, DTYPES[kind]):
        each = losses(model, model(x))
        for index, loss in enumerate(each, 1):
            scaled = loss / accumulation * (FP16_SCALE if kind == "fp16" else 1.0)
            torch.autograd.backward(scaled, retain_graph=index < len(each))
            for param in model.parameters():
                if param.grad is not None:
                    total[param] = total[param] + param.grad.float() if param in total else param.grad.float()
                    param.grad = None
    return [total.get(param) for param in model.parameters()]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Whether they are, bit for bit, and missing where they are missing."""
    pairs = list(zip(found, expected, strict=True))
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)  # type: ignore[arg-type]
