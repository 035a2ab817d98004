"""What DeepSpeed asserts, scripts catch as AssertionError: here the typed errors are that, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeVar

from infinity.errors import (
    CheckpointError,
    CombinedConfigError,
    ConfigError,
    EngineStateError,
    LossScaleError,
    WeightsError,
)

Call = TypeVar("Call", bound=Callable[..., Any])


class ZeRORuntimeException(Exception):  # noqa: N818
    """What DeepSpeed raises where an optimizer or a checkpoint does not go with ZeRO."""


class AssertedConfigError(ConfigError, AssertionError, ZeRORuntimeException):
    """A ConfigError that is caught as AssertionError."""


class AssertedCombinedConfigError(CombinedConfigError, AssertionError, ZeRORuntimeException):
    """A CombinedConfigError that is caught as AssertionError."""


class AssertedStateError(EngineStateError, AssertionError):
    """An EngineStateError that is caught as AssertionError."""


class AssertedWeightsError(WeightsError, AssertionError):
    """A WeightsError that is caught as AssertionError."""


class AssertedLossScaleError(LossScaleError, AssertionError):
    """A LossScaleError that is caught as AssertionError."""


class AssertedCheckpointError(CheckpointError, AssertionError, ValueError):
    """A CheckpointError that is caught as AssertionError, or as the ValueError of a directory without a checkpoint."""


_KINDS: Final[dict[type[Exception], type[Exception]]] = {
    ConfigError: AssertedConfigError,
    CombinedConfigError: AssertedCombinedConfigError,
    EngineStateError: AssertedStateError,
    WeightsError: AssertedWeightsError,
    CheckpointError: AssertedCheckpointError,
    LossScaleError: AssertedLossScaleError,
}


for _plain, _asserted in _KINDS.items():  # what users read is the name that is documented
    _asserted.__name__ = _asserted.__qualname__ = _plain.__name__
    _asserted.__module__ = _plain.__module__


@contextmanager
def asserting() -> Iterator[None]:
    """Inside, these errors are raised as what they are and as AssertionError."""
    try:
        yield
    except tuple(_KINDS) as error:
        kind = _KINDS.get(type(error))
        if kind is None:
            raise
        raised = kind.__new__(kind)
        raised.args = error.args
        vars(raised).update(vars(error))
        raise raised.with_traceback(error.__traceback__) from error.__cause__


def asserted(call: Call) -> Call:
    """``call``, run inside ``asserting``."""

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with asserting():
            return call(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
