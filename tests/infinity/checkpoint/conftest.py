"""One thread computes in every test here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """In this directory it need not be asked for."""
