"""Who looks on: told of forwards and of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from infinity.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step that has been done, as rank 0 knows it."""

    step: int
    """The step's number, counted from 1."""
    samples: int
    """Samples trained on so far, by all ranks."""
    loss: float | None
    """The mean over this rank's micro-batches; None unless an observer asked for it."""
    learning_rates: tuple[float, ...]
    """One an optimizer group."""
    loss_scale: float
    grad_norm: float | None
    """The norm before clipping; None where it was not taken."""
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Observer:
    """One that is told nothing it does not override."""

    wants_loss = False
    """Whether losses are to be kept for ``StepFacts``: reading one waits for the device."""
    wants_times = False
    """Whether a phase is to end where the device has done it, and not where the host has queued it."""

    def around_forward(self, step: int) -> AbstractContextManager[object]:
        """Entered for every forward of the engine; ``step`` is the one it belongs to, counted from 1."""
        return nullcontext()

    def after_step(self, facts: StepFacts) -> None:
        """The optimizer has stepped."""

    def close(self) -> None:
        """The engine ends."""


class Periodic(Observer):
    """One that is told of every ``every``-th step alone; 0 is never."""

    def __init__(self, every: int) -> None:
        self._every = every

    def after_step(self, facts: StepFacts) -> None:
        if self._every and facts.step % self._every == 0:
            self.note(facts)

    def note(self, facts: StepFacts) -> None:
        """The step is one of those."""
        raise NotImplementedError


@contextmanager
def refused_as(key: str, value: object) -> Iterator[None]:
    """Inside, what the file system does not allow is the key's fault."""
    try:
        yield
    except OSError as error:
        raise ConfigError(key, value, f"cannot be written: {error.strerror}") from error


Kind = TypeVar("Kind", bound=Observer)


class Observers(Observer):
    """Several, told in turn."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)
        self.wants_loss = any(observer.wants_loss for observer in observers)
        self.wants_times = any(observer.wants_times for observer in observers)
        self._losses: list[torch.Tensor] = []

    def around_forward(self, step: int) -> AbstractContextManager[object]:
        if not self._observers:
            return nullcontext()
        stack = ExitStack()
        for observer in self._observers:
            stack.enter_context(observer.around_forward(step))
        return stack

    def after_backward(self, loss: torch.Tensor) -> None:
        """The loss of one micro-batch, as the user gave it."""
        if self.wants_loss:
            self._losses.append(loss.detach())

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Those of a kind, in their order."""
        return [observer for observer in self._observers if isinstance(observer, kind)]

    def take_loss(self) -> float | None:
        """The mean of the losses since it was last taken."""
        losses, self._losses = self._losses, []
        return float(sum(float(loss) for loss in losses) / len(losses)) if losses else None

    def drop_losses(self) -> None:
        """The running step was given up."""
        self._losses.clear()

    def after_step(self, facts: StepFacts) -> None:
        for observer in self._observers:
            observer.after_step(facts)

    def close(self) -> None:
        """Each is closed once, whoever says so how often, and whatever becomes of the others."""
        with ExitStack() as closing:
            while self._observers:
                closing.callback(self._observers.pop().close)
