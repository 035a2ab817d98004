"""Everything here needs a GPU: `make test-gpu`."""

from __future__ import annotations

import pytest

from tests.support.device import CPU, USED


@pytest.fixture(autouse=True)
def gpu() -> None:
    if USED == CPU:
        pytest.skip("no GPU to train on: `make test-gpu` on a machine that has one")
