"""Whether a daemon is there already, for a job that would else start one of its own."""

from __future__ import annotations

from pathlib import Path

from infinity.tiers.connection import _answers
from tests.support.busy_socket import busy_socket


def test_one_that_has_no_time_is_there(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    with busy_socket(path):
        assert _answers(str(path))
    assert not _answers(str(path))
