"""One thread computes in every test here, and most of them save what one engine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.resumed import config_of, started, train


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """In this directory it need not be asked for."""


@pytest.fixture
def engine() -> Iterator[Any]:
    """One that has taken a step."""
    made = started(config_of())
    train(made, 1)
    yield made
    made.destroy()
