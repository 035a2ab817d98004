"""The server of judges, started once for a session (and worker)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.cases import Case
from tests.support.forkserver import Judges

Judged = Callable[[str, Case], None]


@pytest.fixture(scope="session")
def judges() -> Iterator[Judges]:
    with Judges() as judges:
        yield judges


@pytest.fixture
def judged(judges: Judges) -> Judged:
    """Judge a case under each of its settings; the test fails with every setting's finding."""

    def judge_all(module: str, case: Case) -> None:
        verdicts = [judges.verdict(module, case, setting) for setting in case.settings]
        failed = [f"{v.setting}: {v.message}" for v in verdicts if v.outcome == "failed"]
        if failed:
            pytest.fail(f"{case.summary}\n" + "\n".join(failed), pytrace=False)

    return judge_all
