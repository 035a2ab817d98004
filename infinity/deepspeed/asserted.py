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
from io_daemon.errors import Portable, made_again

Call = TypeVar("Call", bound=Callable[..., Any])


class ZeRORuntimeException(Exception):  # noqa: N818
    """What DeepSpeed raises where an optimizer or a checkpoint does not go with ZeRO."""


_ALSO: Final[Mapping[type[Exception], tuple[type[Exception], ...]]] = {
    ConfigError: (ZeRORuntimeException, NotImplementedError),
    CombinedConfigError: (ZeRORuntimeException, NotImplementedError),
    EngineStateError: (),
    WeightsError: (),
    CheckpointError: (ValueError,),
    LossScaleError: (),
}
"""What each is caught as beside AssertionError: ValueError is that of a directory without a checkpoint,
NotImplementedError that of dtypes which do not go together."""


def _asserted(kind: type[Exception], *others: type[Exception]) -> type[Exception]:
    """A class of the same name, which is the one that is documented."""
    described = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__reduce__": _reduced}
    return type(kind.__name__, (kind, AssertionError, *others), described)


def _reduced(error: Any) -> tuple[Any, ...]:
    """In another process it is an AssertionError, too."""
    _, given = Portable.__reduce__(error)
    return _again, given


def _again(kind: type[Exception], args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    return made_again(_KINDS[kind], args, fields)


_KINDS: Final = {kind: _asserted(kind, *others) for kind, others in _ALSO.items()}


@contextmanager
def asserting() -> Iterator[None]:
    """Inside, these errors are raised as what they are and as AssertionError."""
    try:
        yield
    except tuple(_KINDS) as error:
        if type(error) not in _KINDS:
            raise
        raised = _again(type(error), error.args, vars(error))
        raise raised.with_traceback(error.__traceback__) from error.__cause__


def asserted(call: Call) -> Call:
    """``call``, run inside ``asserting``."""

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with asserting():
            return call(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
