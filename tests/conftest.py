"""What every test runs under."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What somebody's sweep has found on this machine must not change what is tested."""
    before = os.environ.get("INFINITY_STATE_DIR")
    os.environ["INFINITY_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["INFINITY_STATE_DIR"]
    else:
        os.environ["INFINITY_STATE_DIR"] = before
