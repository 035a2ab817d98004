"""A minute of the soak that `make soak` runs for half an hour; and that it sees what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import Result, soak

pytestmark = pytest.mark.slow


def test_a_minute_of_lives_and_deaths_leaves_nothing(tmp_path: Path) -> None:
    result = soak(Result(minutes=1.0, seed=1, tenants=3), tmp_path)
    assert result.problems() == []
    assert result.leases > 100
    assert result.bytes_read > 0


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    options = ["--no-verify-checksums", *(f"--inject-fault=flip_read:{block}:64" for block in range(64))]
    result = soak(Result(minutes=0.2, seed=1, tenants=2), tmp_path, *options)
    assert result.wrong_bytes > 0
    assert "wrong bytes" in "".join(result.problems())
