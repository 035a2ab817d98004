from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.daemon import ServedDaemon

# how long an example takes says how busy the machine is, not whether the code is right
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

Serve = Callable[..., ServedDaemon]


@pytest.fixture
def swap_dir(tmp_path: Path) -> Path:
    path = tmp_path / "swap"
    path.mkdir()
    return path


@pytest.fixture
def serve(swap_dir: Path) -> Iterator[Serve]:
    """Start daemons, by default over ``swap_dir``; all are gone after the test."""
    daemons: list[ServedDaemon] = []

    def start(*options: str, swap_dirs: list[Path] | None = None, wait_ready: bool = True) -> ServedDaemon:
        daemons.append(ServedDaemon(swap_dirs or [swap_dir], *options, wait_ready=wait_ready))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def daemon(serve: Serve) -> ServedDaemon:
    return serve()
