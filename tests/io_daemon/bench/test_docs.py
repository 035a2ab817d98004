"""docs/bench.md names what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("kind", ["io", "sweep", "step", "compare"])
def test_every_option_is_in_the_docs(kind: str) -> None:
    command = [sys.executable, "-m", "io_daemon", "bench", kind, "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    options = set(re.findall(r"--[a-z][a-z-]+", text))
    assert len(options) > 5
    documented = set(re.findall(r"--[a-z][a-z-]+", (DOCS / "bench.md").read_text()))
    assert options <= documented, "paste the new --help into docs/bench.md"


def test_what_the_docs_link_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (DOCS / "bench.md").read_text())
    assert links
    assert all((DOCS / link).is_file() for link in links)
