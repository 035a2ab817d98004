"""One small change to one source file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    path: str
    start: int
    end: int
    """Bytes of the file that are replaced."""
    text: str
    what: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def line(self, source: bytes) -> int:
        return source.count(b"\n", 0, self.start) + 1

    def diff(self, source: bytes) -> tuple[str, str]:
        """The lines that differ, before and after."""
        begin = source.rfind(b"\n", 0, self.start) + 1
        end = source.find(b"\n", self.end)
        end = len(source) if end < 0 else end
        before = source[begin:end].decode()
        after = (source[begin : self.start] + self.text.encode() + source[self.end : end]).decode()
        return before.strip(), after.strip()


@dataclass(frozen=True)
class Equivalent:
    """A mutant that no test can tell from the original, with the reason. Lines are compared stripped, so that the entry
    survives edits elsewhere in the file."""

    path: str
    before: str
    after: str
    reason: str


def read_equivalents(path: Path) -> dict[tuple[str, str, str], str]:
    entries = [Equivalent(**entry) for entry in tomllib.loads(path.read_text()).get("mutant", [])]
    return {(entry.path, entry.before.strip(), entry.after.strip()): entry.reason for entry in entries}
