"""The typed errors a caller of infinity meets; most are defined once, beside the daemon that raises them."""

from __future__ import annotations

from collections.abc import Sequence

from io_daemon.errors import (
    BudgetError,
    ConfigError,
    DaemonLostError,
    DeviceIOError,
    IntegrityError,
    ProtocolError,
    SwapSpaceError,
    WorldError,
)

__all__ = [
    "BudgetError",
    "CombinedConfigError",
    "ConfigError",
    "DaemonLostError",
    "DeviceIOError",
    "EngineStateError",
    "IntegrityError",
    "LossScaleError",
    "ProtocolError",
    "SwapSpaceError",
    "WeightsError",
    "WorldError",
]


class CombinedConfigError(ConfigError):
    """Several settings that cannot work. Key, value and remedy are those of the first; all are in ``complaints``."""

    def __init__(self, complaints: Sequence[ConfigError]) -> None:
        first = complaints[0]
        super().__init__(first.key, first.value, first.remedy)
        self.complaints = tuple(complaints)
        self.args = ("\n".join([f"{len(complaints)} settings cannot work:", *(f"  {each}" for each in complaints)]),)


class EngineStateError(RuntimeError):
    """A call that the engine cannot serve where it stands; the text says where, and what can be called instead."""


class WeightsError(RuntimeError):
    """A use of weights that sharded ones cannot serve. ``name`` is the parameter or module, ``remedy`` what to do."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        self.name, self.problem, self.remedy = name, problem, remedy
        super().__init__(f"{name} {problem}: {remedy}")


class LossScaleError(RuntimeError):
    """A gradient overflowed at the least loss scale: no smaller one is allowed. The step was not applied."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        super().__init__(
            f"a gradient is not finite at the least loss scale, {scale:g}: training has diverged, or the model needs "
            "more range than fp16 has: use bf16, lower the learning rate, or write a smaller fp16.min_loss_scale"
        )
