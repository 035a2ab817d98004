"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from infinity.weights import heap


class Library:
    def __init__(self) -> None:
        self.kept: list[int] = []

    def malloc_trim(self, kept_bytes: int) -> int:
        self.kept.append(kept_bytes)
        return 1


def test_all_that_is_free_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    opened: list[Any] = []

    def open_library(name: str | None) -> Library:
        opened.append(name)
        return library

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    heap.return_freed()
    assert (opened, library.kept) == ([None], [0]), "of this process's C library, down to nothing"


def test_another_c_library_has_nothing_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    heap.return_freed()
