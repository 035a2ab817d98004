"""The programs of tests/fuzz/test_fuzz.py, judged in forks of this process, which has imported torch already."""

from __future__ import annotations

from tests.fuzz.judged import judged
from tests.fuzz.program import program

NUM_PROGRAMS = 100


def test_programs() -> None:
    for found, verdict in judged(range(NUM_PROGRAMS), program):
        assert verdict.outcome != "failed", f"{found.source}\n{verdict.message}"
