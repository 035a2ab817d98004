"""Programs of some lines return here what they returned under a real DeepSpeed 0.19.8, whose answers are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.infinity.deepspeed.differential.decided import DECIDED, stale, undecided
from tests.infinity.deepspeed.differential.facts import read
from tests.support.ranks import REPOSITORY, quiet_environment

SAMPLE = 32
"""One case of so many is run by every change; the slow test runs all."""
RUN_BY_PLAIN_TORCH = 300
"""So many cases at least have a program that an engine of plain torch can run."""


def _run(module: str, *words: str) -> str:
    place = f"tests.infinity.deepspeed.differential.{module}"
    ended = subprocess.run(
        [sys.executable, "-m", "infinity", "as-deepspeed", sys.executable, "-m", place, *words],
        cwd=REPOSITORY, env=quiet_environment(), capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def _differing(names: Sequence[str], directory: Path, *words: str) -> dict[str, dict[str, list[str]]]:
    """Of each case, where it differs from the real one, and from plain torch where that can run it, given ``words``."""
    plain, ours = str(directory / "plain.json"), str(directory / "ours.json")
    _run("run", "--exact", "--quiet", "--out", ours, *names)
    _run("run", "--exact", "--quiet", "--plain", *words, "--out", plain, *names)
    answers: dict[str, dict[str, list[str]]] = {
        of: json.loads(_run("facts", *question, "--json").splitlines()[-1])
        for of, question in {"real": ("compare", ours), "plain": ("against", plain, ours)}.items()
    }
    assert sorted(answers["real"]) == sorted(names)
    return answers


def _open(answers: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: rest for name, lines in answers.items() if (rest := undecided(name, lines))}


@pytest.mark.timeout(900)
def test_a_sample_answers_as_the_real_one_and_has_the_bits_of_plain_torch(tmp_path: Path) -> None:
    answers = _differing(sorted(read())[::SAMPLE], tmp_path, "--ranks", "1")
    assert _open(answers["real"]) == {}
    assert len(answers["plain"]) >= RUN_BY_PLAIN_TORCH // SAMPLE // 2
    assert {name: lines for name, lines in answers["plain"].items() if lines} == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_answer_as_the_real_one_and_have_the_bits_of_plain_torch(tmp_path: Path) -> None:
    answers = _differing(sorted(read()), tmp_path)
    assert _open(answers["real"]) == {}
    assert stale(answers["real"]) == []
    assert len(answers["plain"]) >= RUN_BY_PLAIN_TORCH
    assert {name: lines for name, lines in answers["plain"].items() if lines} == {}


def test_what_may_differ_is_of_cases_that_there_are() -> None:
    facts = read()
    assert [name for decision in DECIDED for name in decision.cases if name not in facts] == []


def test_a_decision_excuses_what_it_speaks_of_alone() -> None:
    name = "training.unused_parameters[2]"
    told = ["[0][1].unused.bias: 0.130674793 != 0.13087104726582766"]
    others = ["[0][1].head.bias: 0.1 != 0.2", "[0][0][1]: 1.0 != 1.5", "raised: RuntimeError: broken"]
    assert undecided(name, [*told, *others]) == others
    assert undecided("training.tied_weights[2]", told) == told
    name = "backwards.gradients_of_inputs_asked_for_apart[3-2]"
    assert undecided(name, ["[0][0]: 0.5 != 1.0", "[0][1]: 0.5 != 1.1"]) == ["[0][1]: 0.5 != 1.1"]


def test_the_real_one_divides_fp16_by_a_scale_at_stage_0_that_it_never_multiplied_with() -> None:
    """Why its losses are others there: plain torch that does so has them; Adam's eps is no longer small then."""
    torch.manual_seed(7)
    first, second, head = nn.Linear(12, 12).half(), nn.Linear(12, 12).half(), nn.Linear(12, 3).half()
    params = [*first.parameters(), *second.parameters(), *head.parameters()]
    masters = [param.detach().float() for param in params]
    generator = torch.Generator().manual_seed(100)
    losses = []
    for number in range(1, 9):
        x, y = torch.randn(4, 12, generator=generator).half(), torch.randint(3, (4,), generator=generator)
        loss = nn.functional.cross_entropy(head(torch.tanh(second(torch.tanh(first(x))))).float(), y)
        (loss / 6).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for param, master in zip(params, masters, strict=True) if number == 6 else ():
            assert param.grad is not None
            gradient = param.grad.float() / 2**16
            master -= 3e-3 * 0.1 * gradient / ((0.001 * gradient.square()).sqrt() + 1e-8)
            param.data.copy_(master)
    assert losses == pytest.approx(read()["found.in_16_bits[bert]"][0], rel=1e-8)
