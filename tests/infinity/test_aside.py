"""Directories aside belong to whoever holds their lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.files import aside as asides
from infinity.files.aside import held


def test_a_directory_that_is_another_by_the_time_it_is_locked_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    is_free = asides._is_free

    def make() -> Path:
        made.append(tmp_path / str(len(made)))
        made[-1].mkdir()
        return made[-1]

    def swept(descriptor: int) -> bool | None:
        if len(made) == 1:
            made[0].rmdir()
            (tmp_path / "in between").mkdir()
            made[0].mkdir()
        return is_free(descriptor)

    monkeypatch.setattr(asides, "_is_free", swept)
    with held(make) as path:
        assert path == made[1]
