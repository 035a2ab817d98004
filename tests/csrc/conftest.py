from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from io_daemon._native import probe_engine
from tests.support.reactor import Fault, ReactorBench

MakeBench = Callable[..., ReactorBench]


@pytest.fixture(params=["io_uring", "libaio", "posix"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if (why_not := probe_engine(name)) is not None:
        pytest.skip(why_not)
    return name


@pytest.fixture
def make_bench(engine: str, tmp_path: Path) -> Iterator[MakeBench]:
    """Reactors over one file, with this test's engine; all are closed after the test."""
    with ExitStack() as stack:

        def make(*, direct: bool = False, faults: Sequence[Fault] = (), path: Path | None = None) -> ReactorBench:
            bench = ReactorBench(path or tmp_path / "file", engine, direct=direct, faults=faults)
            return stack.enter_context(bench)

        yield make
