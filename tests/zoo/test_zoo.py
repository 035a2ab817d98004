"""One architecture of Transformers; ``python -m tests.zoo`` judges them all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.ranks import REPOSITORY, TIMEOUT_S

pytest.importorskip("transformers")

CASES = {"deepseek_v3/init", "deepseek_v3/pretrained"}
"""Latent attention, and experts whose buffers stay in fp32."""


def test_an_architecture_has_plain_torchs_bits_however_its_model_comes() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.zoo", "deepseek_v3", "--ways", "init", "pretrained", "--settings", "each-bf16",
         "--jobs", "1", "--json"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S * 3,
    )  # fmt: skip
    verdicts = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert {verdict["script"] for verdict in verdicts} == CASES
    assert [verdict for verdict in verdicts if verdict["outcome"] != "equal"] == [], ended.stderr
    assert ended.returncode == 0, ended.stderr
