"""Tiny models that hold every way of using a parameter that has broken a sharding engine.

A ``Part`` maps ``(rows, WIDTH)`` to the same shape; each holds one hazard. ``Tower`` stacks parts between a tied token
embedding and its head. Sizes are odd or prime on purpose: no parameter is a multiple of a chunk, a page or a vector.
A batch is a dict ``{"tokens": (rows, LENGTH + 1) int64, "use_expert": bool, "use_gate": bool}``; outputs differ in
kind, ``loss_of`` reads the scalar loss out of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.device import USED

WIDTH = 211
VOCABULARY = 509
LENGTH = 7
ROWS = 5

Batch = dict[str, Any]


class Scored(NamedTuple):
    """What a part that also contributes to the loss returns."""

    hidden: Tensor
    penalty: Tensor


def as_tensor(value: object) -> Tensor:
    """``value``, which calls into torch type as Any or object, as the tensor that it is."""
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor, not {type(value).__name__}")
    return value


class PlainPart(nn.Module):
    """Two linears of 211×307 and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 307)
        self.contract = nn.Linear(307, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + as_tensor(self.contract(F.gelu(self.expand(self.norm(x)))))


class TwicePart(nn.Module):
    """One module called twice in one forward: its gradient is whole only after the second of two backward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = PlainPart()

    def forward(self, x: Tensor) -> Tensor:
        return as_tensor(self.shared(torch.tanh(self.shared(x))))


class OddTablePart(nn.Module):
    """A 1-D parameter of 100,003 elements (a prime), which ends in the middle of a vector, a page and a chunk."""

    NUMEL = 100_003

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(self.NUMEL) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        phase = torch.linspace(0, 60, self.NUMEL, device=x.device).cos().to(x.dtype)
        return x * (1 + (self.table * phase).mean())


class CheckpointedPart(nn.Module):
    """Activation checkpointing: forward runs again inside backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inner = PlainPart()

    def forward(self, x: Tensor) -> Tensor:
        return as_tensor(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


class BorrowingPart(nn.Module):
    """The parent uses ``self.child.weight`` itself; the child is never called, so its hooks never run."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.sin(x), self.child.weight, self.child.bias)


class LowRankPart(nn.Module):
    """A frozen base with a trained low-rank update (LoRA): frozen parameters have weights but no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 13, bias=False)
        self.up = nn.Linear(13, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + as_tensor(self.base(x) + self.up(self.down(x)))


class NormedPart(nn.Module):
    """Batch norm: floating and integer buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + as_tensor(self.norm(self.mix(x)))


class ScoredPart(nn.Module):
    """Returns a NamedTuple, so the engine must find the tensors inside a module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Scored:
        hidden = self.inner(x)
        return Scored(x + hidden, hidden.square().mean() * 1e-3)


class ExpertPart(nn.Module):
    """A module that a batch may skip, on all ranks alike, and a vector that it may skip on one rank alone.

    Unused on all ranks: no gradient, no decay, no step counted. Unused on one: its gradient there counts as zero.
    (A module that only some ranks call cannot be gathered by any sharding engine; small parameters are never
    resharded, so ranks may differ in using them.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.expert = PlainPart()
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch["use_gate"]:
            x = x * self.gate
        return as_tensor(self.expert(x)) if batch["use_expert"] else x


class ExplosionError(Exception):
    """Raised by an armed ``BombPart``."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ExplosionError("backward")


class BombPart(nn.Module):
    """Raises in the middle of the pass that it is ``armed`` for: "forward" or "backward"."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PlainPart()
        self.armed = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.armed == "forward":
            raise ExplosionError("forward")
        if self.armed == "backward":
            return as_tensor(_RaiseInBackward.apply(x))  # type: ignore[no-untyped-call]
        return x


class Tower(nn.Module):
    """Tied embedding → parts → head. Returns the loss alone, a dict, or a NamedTuple within a dict."""

    def __init__(self, parts: Sequence[nn.Module], *, output: str = "loss") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.05)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.output = output

    def forward(self, batch: Batch) -> Any:
        tokens = batch["tokens"]
        x = self.tokens(tokens[:, :-1]).flatten(0, 1)
        penalty = x.new_zeros(())
        for part in self.parts:
            result = part(x, batch) if isinstance(part, ExpertPart) else part(x)
            x = result.hidden if isinstance(result, Scored) else result
            penalty = penalty + result.penalty if isinstance(result, Scored) else penalty
        logits = self.head(x).float()
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten()) + penalty.float()
        match self.output:
            case "dict":
                return {"loss": loss, "logits": logits}
            case "nested":
                return {"scored": Scored(logits, loss), "batch_rows": len(tokens)}
            case _:
                return loss


def loss_of(output: Any) -> Tensor:
    """The scalar loss inside whatever a ``Tower`` returned."""
    if isinstance(output, Mapping):
        output = output["loss"] if "loss" in output else output["scored"].penalty
    return as_tensor(output)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    ddp: bool = True
    """Whether torch's DDP can train it (it refuses re-entrant checkpointing with unused parameters)."""


def everything() -> nn.Module:
    """All hazards in one model of 914,214 parameters: what the parity matrix trains."""
    return Tower(
        [PlainPart(), TwicePart(), OddTablePart(), CheckpointedPart(use_reentrant=False), BorrowingPart(),
         LowRankPart(), NormedPart(), ScoredPart(), ExpertPart()],
        output="nested",
    )  # fmt: skip


CASES = (
    Case("plain", lambda: Tower([PlainPart(), PlainPart()])),
    Case("twice", lambda: Tower([TwicePart()])),
    Case("odd_table", lambda: Tower([OddTablePart(), PlainPart()])),
    Case("checkpoint", lambda: Tower([CheckpointedPart(use_reentrant=False), PlainPart()])),
    Case("checkpoint_reentrant", lambda: Tower([CheckpointedPart(use_reentrant=True), PlainPart()]), ddp=False),
    Case("borrowing", lambda: Tower([BorrowingPart(), PlainPart()])),
    Case("low_rank", lambda: Tower([LowRankPart(), PlainPart()])),
    Case("normed", lambda: Tower([NormedPart(), PlainPart()])),
    Case("scored", lambda: Tower([ScoredPart(), PlainPart()], output="dict")),
    Case("expert", lambda: Tower([ExpertPart(), PlainPart()])),
    Case("everything", everything),
)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model with the same initial values for the same seed; the caller's generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def batches(num_batches: int, *, rank: int = 0, seed: int = 0) -> list[Batch]:
    """Micro-batches of one rank. The expert is skipped by all ranks in some, the gate by one rank alone in others."""
    generator = torch.Generator().manual_seed(seed * 1_009 + rank)
    made = []
    for index in range(num_batches):
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator).to(USED)
        use_gate = index % 4 != 2 and (index + rank) % 3 != 1
        made.append({"tokens": tokens, "use_expert": index % 5 not in (0, 3), "use_gate": use_gate})
    return made


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups of different weight decay: matrices decay, vectors do not; frozen parameters in neither."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
