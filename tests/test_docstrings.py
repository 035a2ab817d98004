"""Docstrings begin with a sentence: it starts large, ends with a period, and says first what it speaks of.

A text such as "Of the last step." leaves its subject to the name above it, and a reader of the help never sees that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = sorted(
    str(room.relative_to(ROOT))
    for package in ("io_daemon", "infinity")
    for room in (ROOT / package, *(ROOT / package).iterdir())
    if room.is_dir() and any(room.glob("*.py"))
)
PREPOSITIONS = """about above across after against around at because before behind below beneath beside between beyond
    by during for from if in inside into near off on onto out over per since through to toward under unless until up
    upon when with within without"""
"""They may open a sentence if a comma or a colon says where it goes on."""
OPENINGS_OF_FRAGMENTS = """added allocated and as asked based called carried chosen counted created derived filled found
    given held kept left made measured meant moved of opened or owned raised registered reserved sent shared started
    stepped taken that told used whose written"""
PROPER_NAMES = ("aiofiles", "bf16", "dtype", "fio", "fsync", "gloo", "kvikio", "p50", "sockaddr_un")
"""What is spelt small."""


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those behind an assignment included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _problem(text: str) -> str | None:
    opening = text.strip().split("\n\n")[0]
    if opening.rstrip(")")[-1] not in ".:?":
        return "does not end with a period"
    if opening[0].islower() and not opening.startswith(PROPER_NAMES):
        return "begins small"
    sentence = re.split(r"[.?] ", " ".join(opening.split()), maxsplit=1)[0]
    first = sentence.split()[0].strip(":,.").lower()
    goes_on = re.search("[,:] ", sentence) is not None
    if first in OPENINGS_OF_FRAGMENTS.split() or (first in PREPOSITIONS.split() and not goes_on):
        return f"begins with {first!r} and has no subject"
    return None


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_are_sentences(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {problem}: {text.strip().splitlines()[0]}"
        for path in sorted((ROOT / room).glob("*.py"))
        for line, text in _docstrings(ast.parse(path.read_text()))
        if (problem := _problem(text)) is not None
    ]
    assert not wrong, "\n".join(wrong)
