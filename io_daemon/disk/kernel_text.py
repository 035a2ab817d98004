"""Reads one fact from a file of /proc or /sys: None if it is empty, not there, not ours to read or not told yet."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """The text has no white space at its ends."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def read_integer(path: Path) -> int | None:
    """None also for ``max`` and other words."""
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None
