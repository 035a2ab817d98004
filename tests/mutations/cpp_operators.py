"""Mutants of C++ sources: textual patterns, applied outside of comments, strings and preprocessor lines.

Numbers that are chosen and named (``constexpr std::size_t kBatchMax = 64;``) are left alone: another is as good."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tests.mutations.mutant import Mutant

SWAPS: Final[dict[str, str]] = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    " - ": " + ",
    " * ": " / ",
    " / ": " * ",
    " % ": " * ",
    " += ": " -= ",
    "++": "--",
    "true": "false",
    "false": "true",
    "std::min": "std::max",
    "std::max": "std::min",
    "push_front": "push_back",
    "kReadOnly": "kWritable",
}
SWAP: Final = re.compile("|".join(re.escape(text) for text in sorted(SWAPS, key=len, reverse=True)))
NOT: Final = re.compile(r"!(?=[\w(])")
NUMBER: Final = re.compile(r"(?<![\w.'])\d+(?![\w.'])")
CONDITION: Final = re.compile(r"\bif \((?P<test>.*)\)(?= [{\w])")
STATEMENT: Final = re.compile(r"^\s+(?P<call>[\w:.>\-]+(\(.*\))?( = .*)?;|--\w+;|\+\+[\w.\->]+;)$")
KEPT: Final = re.compile(r"^\s*(return \w*;|using |static_|case |default:|const |constexpr |auto |\w+\.reserve\()")
"""A vector grows by itself: how much it was told beforehand is time, not behaviour."""
DELETED: Final = "= delete;"
"""What would call it does not compile: there is nothing to be seen."""
CHOSEN: Final = re.compile(r"^\s*(inline |static )*constexpr [\w:]+ k\w+ = [\w:{}()<~* ']*;")
TEXT: Final = re.compile(r'//.*$|"(\\.|[^"\\])*"')


def cpp_mutants(path: str, source: bytes) -> Iterator[Mutant]:
    start = 0
    directive = False
    for raw in source.decode().splitlines(keepends=True):
        line = raw.rstrip("\n")
        continued, directive = directive, (directive or line.startswith("#")) and line.endswith("\\")
        if line and not (continued or line.startswith("#")) and "static_assert" not in line and not CHOSEN.match(line):
            code = TEXT.sub(lambda found: " " * len(found[0]), line)  # places stay as they are
            for begin, end, text, what in _changes(code):
                yield Mutant(path, start + begin, start + end, text, what)
        start += len(raw.encode())


def _changes(code: str) -> Iterator[tuple[int, int, str, str]]:
    for found in SWAP.finditer(code):
        yield *found.span(), SWAPS[found[0]], "swap"
    for found in NOT.finditer(code):
        yield *found.span(), "", "dropped not"
    for found in NUMBER.finditer(code):
        yield *found.span(), str(int(found[0]) + 1), "constant"
        if int(found[0]) > 0:
            yield *found.span(), str(int(found[0]) - 1), "constant"
    if (condition := CONDITION.search(code)) is not None and ";" not in condition["test"]:
        yield *condition.span("test"), f"!({condition['test']})", "swapped branches"
    if (statement := STATEMENT.match(code)) is not None and not KEPT.match(code) and DELETED not in code:
        yield *statement.span("call"), ";", "removed statement"
