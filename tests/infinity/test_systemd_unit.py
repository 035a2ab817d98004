"""The unit that clusters install is one that systemd accepts."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "packaging" / "io-daemon.service"


def test_systemd_accepts_the_unit() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    result = subprocess.run([analyze, "verify", str(UNIT)], capture_output=True, text=True, timeout=60, check=False)
    if "No such file or directory" in result.stderr and not os.path.isdir("/run"):
        pytest.skip(f"systemd-analyze does not run here: {result.stderr.strip()}")
    assert (result.returncode, result.stderr.strip()) == (0, "")


def test_the_unit_waits_for_ready_and_lifts_the_memlock_limit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["Restart"] == "on-failure"
    assert "io-daemon serve" in service["ExecStart"]
