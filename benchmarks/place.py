"""Where a benchmark leaves its files for a while."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def add_directory(parser: argparse.ArgumentParser, option: str = "--swap-dir") -> None:
    """An option for a directory that is there; by default that for temporary files."""
    parser.add_argument(
        option,
        type=_existing,
        default=Path(tempfile.gettempdir()),
        help="on the disk to measure",
    )


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():  # made here, it would lie on whatever disk is mounted there
        raise argparse.ArgumentTypeError(f"{text} is no directory: create it on the disk that is to be measured")
    return path
