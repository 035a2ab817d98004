"""The typed errors a caller of infinity meets; most are defined once, beside the daemon that raises them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from io_daemon.errors import (
    BudgetError,
    ConfigError,
    DaemonLostError,
    DeviceIOError,
    IntegrityError,
    LimitError,
    Portable,
    ProtocolError,
    SwapBusyError,
    SwapSpaceError,
    WorldError,
)

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CombinedConfigError",
    "ConfigError",
    "DaemonLostError",
    "DeviceIOError",
    "EngineStateError",
    "IntegrityError",
    "LimitError",
    "LossScaleError",
    "MismatchedWeightsError",
    "ProtocolError",
    "SwapBusyError",
    "SwapSpaceError",
    "WeightsError",
    "WeightsFileError",
    "WorldError",
]


class CombinedConfigError(ConfigError):
    """Several settings that cannot work. Key, value and remedy are those of the first; all are in ``complaints``."""

    def __init__(self, complaints: Sequence[ConfigError]) -> None:
        first = complaints[0]
        super().__init__(first.key, first.value, first.remedy)
        self.complaints = tuple(complaints)
        self.args = ("\n".join([f"{len(complaints)} settings cannot work:", *(f"  {each}" for each in complaints)]),)


class EngineStateError(Portable, RuntimeError):
    """A call that the engine cannot serve where it stands; the text says where, and what can be called instead."""


class WeightsError(Portable, RuntimeError):
    """A use of weights that sharded ones cannot serve. ``name`` is the parameter or module, ``remedy`` what to do."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        self.name, self.problem, self.remedy = name, problem, remedy
        super().__init__(f"{name} {problem}: {remedy}")


class LossScaleError(Portable, RuntimeError):
    """A gradient overflowed at the least loss scale: no smaller one is allowed. The step was not applied."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        super().__init__(
            f"a gradient is not finite at the least loss scale, {scale:g}: training has diverged, or the model needs "
            "more range than fp16 has: use bf16, lower the learning rate, or write a smaller fp16.min_loss_scale"
        )


class WeightsFileError(WorldError):
    """A file of weights that cannot be read or written. ``problem`` says why, ``remedy`` what to do, ``errno`` is the
    system's where it has one, else 0."""

    def __init__(self, path: str, problem: str, remedy: str, *, errno: int = 0) -> None:
        self.path, self.problem, self.remedy, self.errno = path, problem, remedy, errno
        super().__init__(f"{path} {problem}: {remedy}")

    @classmethod
    def of(cls, error: OSError, path: str, verb: str) -> WeightsFileError:
        """The system's error, met when the file was to be ``verb``."""
        number = error.errno or 0
        return cls(
            str(error.filename or path),
            f"cannot be {verb}: {os.strerror(number) if number else error} (errno {number})",
            "name a directory that can be, or free space there" if verb == "written" else "check path and permissions",
            errno=number,
        )


class MismatchedWeightsError(Portable, ValueError):
    """Weights of another model than the one they are for; nothing was changed.

    ``missing``: names that the model has and the file lacks, ``unexpected``: the other way round, ``unfit``: what is in
    both and differs in shape or kind, in words.
    """

    LINES_MAX = 50
    """So many of each kind does the text name; the attributes have all."""

    def __init__(self, path: str, *, missing: Sequence[str], unexpected: Sequence[str], unfit: Sequence[str]) -> None:
        self.path = path
        self.missing, self.unexpected, self.unfit = tuple(missing), tuple(unexpected), tuple(unfit)
        lines = [f"{path} does not fit the model, which was left as it is (rename= maps names):"]
        for what, names in (("missing", missing), ("unexpected", unexpected), ("does not fit", unfit)):
            lines += [f"  {what}: {name}" for name in names[: self.LINES_MAX]]
            if len(names) > self.LINES_MAX:
                lines.append(f"  {what}: {len(names) - self.LINES_MAX} more")
        super().__init__("\n".join(lines))


class CheckpointError(WorldError):
    """A checkpoint that cannot be written or read. ``path`` is the file or directory, ``remedy`` what to do, ``errno``
    the system's where it has one, else 0."""

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str, *, errno: int = 0) -> None:
        self.path, self.problem, self.remedy, self.errno = str(path), problem, remedy, errno
        super().__init__(f"{self.path}: {problem}; {remedy}")
