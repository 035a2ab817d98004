"""Errors go from process to process: a pool's worker, a spawned rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import infinity.zero.tiling
from infinity import errors
from infinity.deepspeed.asserted import asserted
from io_daemon.bench.run import NothingMeasured
from io_daemon.errors import Portable

IO = {"errno": 5, "path": "/x", "offset": 4096}
MADE: list[BaseException] = [
    errors.ConfigError("a.b", [1], "write 2"),
    errors.ConfigError("a.b", lambda: None, "write 2"),
    NothingMeasured("runtime", 0.01, "measure for longer"),
    errors.LimitError(errno=24, operation="start", limit="-n", value=5, remedy="to 1024 or more"),
    errors.CombinedConfigError([errors.ConfigError("a", 1, "write 2"), errors.ConfigError("b", 3, "write 4")]),
    errors.DeviceIOError(**IO, expected_bytes=2, actual_bytes=1, operation="read"),  # type: ignore[arg-type]
    errors.IntegrityError(path="/x", offset=0, expected_checksum=1, actual_checksum=2),
    errors.SwapSpaceError(path="/x", needed_bytes=2, free_bytes=1),
    errors.SwapBusyError(path="/x", owner_pid=1, timeout_s=2.0),
    errors.BudgetError(key="k", budget_bytes=1, smallest_bytes=2, reason="small"),
    errors.DaemonLostError("lost"),
    errors.ProtocolError("odd"),
    errors.WorldError("world"),
    errors.EngineStateError("not now"),
    errors.WeightsError("p", "is sharded", "gather it"),
    errors.LossScaleError(1.0),
    errors.WeightsFileError("/x", "is cut", "copy it again"),
    errors.MismatchedWeightsError("/x", missing=["a"], unexpected=[], unfit=[]),
    errors.CheckpointError("/x", "is no checkpoint", "name one"),
    infinity.zero.tiling.TilesError("in_splits", 9, "at most 4"),
]


def kinds(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        if each.__module__.startswith(("infinity", "io_daemon")):
            yield each
            yield from kinds(each)


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_arrives_with_what_it_holds(error: BaseException) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    for name, value in vars(error).items():
        found = getattr(arrived, name)
        assert found == value or str(found) == str(value) or repr(value) == found


def test_every_kind_of_error_is_among_them() -> None:
    known = {type(error).__name__ for error in MADE}
    assert {kind.__name__ for kind in kinds(Portable)} <= known


def test_an_error_that_scripts_catch_as_an_assertion_arrives_as_one() -> None:
    def fail() -> None:
        raise errors.EngineStateError("not now")

    with pytest.raises(AssertionError) as raised:
        asserted(fail)()
    arrived = pickle.loads(pickle.dumps(raised.value))
    assert type(arrived) is type(raised.value)
    assert isinstance(arrived, errors.EngineStateError)
    assert arrived.args == raised.value.args
