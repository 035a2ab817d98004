"""What DeepSpeed asserts, scripts catch as AssertionError: here the typed errors are that, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


_ALSO: Final[Mapping[type[Exception], tuple[type[Exception], ...]]] = {
    ConfigError: (ZeRORuntimeException,),
    CombinedConfigError: (ZeRORuntimeException,),
    EngineStateError: (),
    WeightsError: (),
    CheckpointError: (ValueError,),
    LossScaleError: (),
}
"""What each is caught as beside AssertionError; ValueError is that of a directory without a checkpoint."""


def _asserted(kind: type[Exception], *others: type[Exception]) -> type[Exception]:
    """A class of the same name, which is the one that is documented."""
    return type(
        kind.__name__, (kind, AssertionError, *others), {"__doc__": kind.__doc__, "__module__": kind.__module__}
    )


_KINDS: Final = {kind: _asserted(kind, *others) for kind, others in _ALSO.items()}


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
