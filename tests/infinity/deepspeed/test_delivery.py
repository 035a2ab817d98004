"""Unmodified scripts get infinity where they ask for it, by any launcher, and nowhere else; their bits are torch's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.deepspeed_venv import prepare_venv
from infinity.commands.doctor import Verdict, examine
from infinity.commands.running import environment_of
from infinity.deepspeed.delivery import COMMANDS, DIRECTORY, find
from infinity.deepspeed.version import DIALECT
from tests.support.ranks import TIMEOUT_S, quiet_environment, run_ranks

SCRIPT = Path(__file__).with_name("script.py")
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
PLAIN = Path(__file__).with_name("plain_script.py").read_text()


def _infinity(*words: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "infinity", *map(str, words)],
        cwd=cwd,
        env=quiet_environment(OMP_NUM_THREADS="1", **variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("deepspeed.launcher.runner", "--help"), "--num_gpus"),
        (("deepspeed.utils.zero_to_fp32", "--help"), "--exclude_frozen_parameters"),
        (("deepspeed.env_report",), "infinity doctor"),
    ],
)
def test_modules_run_as_programs(words: tuple[str, ...], printed: str) -> None:
    ran = _infinity("as-deepspeed", "python", "-m", *words)
    assert printed in ran.stdout, ran.stderr


def test_a_module_that_is_no_program_says_so() -> None:
    ran = _infinity("as-deepspeed", "python", "-m", "deepspeed.runtime.zero")
    assert ran.returncode != 0
    assert "cannot be directly executed" in ran.stderr


def _plain_weights(tmp_path: Path, world_size: int) -> dict[str, Tensor]:
    for ended in run_ranks(PLAIN, tmp_path, num_ranks=world_size, words=["--out", str(tmp_path)]):
        assert ended.code == 0, ended.errors
    weights: dict[str, Tensor] = torch.load(tmp_path / "plain-0.pt")
    return weights


def _assert_trained_as_torch(out: Path, tmp_path: Path, world_size: int) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = [
        json.loads((out / f"report-{rank}.json").read_text()) for rank in range(world_size)
    ]
    expected = _plain_weights(tmp_path, world_size)
    for rank, report in enumerate(reports):
        assert report["resumed"] == report["losses"][4:]
        assert report["epoch"] == 7
        assert report["version"] == DIALECT
        assert Path(report["file"]).is_relative_to(DIRECTORY)
        assert report["latest"] == "global_step4"
        weights = torch.load(out / f"weights-{rank}.pt")
        assert {name for name in expected if not torch.equal(expected[name], weights[name])} == set()
    assert (out / "global_step4").is_dir()
    return reports


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize(
    "launcher",
    [("as-deepspeed", "python"), ("run", "--as-deepspeed", "--nproc-per-node", "1")],
    ids=["python", "run"],
)
def test_a_script_trains_with_the_bits_of_plain_torch(launcher: tuple[str, ...], config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    ended = _infinity(*launcher, SCRIPT, "--out", out, "--deepspeed_config", config)
    assert ended.returncode == 0, ended.stderr
    (report,) = _assert_trained_as_torch(out, tmp_path, 1)
    assert report["local_rank"] == 0


def test_two_ranks_by_the_command_deepspeed_have_the_bits_of_ddp(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = ("deepspeed", "--num_gpus", "2", SCRIPT, "--out", out, "--deepspeed", "--deepspeed_config", config)
    ended = _infinity("as-deepspeed", *words)
    assert ended.returncode == 0, ended.stderr
    reports = _assert_trained_as_torch(out, tmp_path, 2)
    assert [report["local_rank"] for report in reports] == [0, 1]


def test_children_of_children_get_it_first_on_both_paths() -> None:
    variables = environment_of({"PYTHONPATH": f"/else:{DIRECTORY}", "PATH": "/bin"}, as_deepspeed=True)
    assert variables["PYTHONPATH"].split(":") == [str(DIRECTORY), "/else"]
    assert variables["PATH"].split(":")[:2] == [str(COMMANDS), str(Path(sys.executable).parent)]
    innermost = "import deepspeed; print(deepspeed.__file__)"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {innermost!r}])"
    ended = _infinity("as-deepspeed", "python", "-c", inner)
    assert Path(ended.stdout.strip()).is_relative_to(DIRECTORY)


def test_others_find_it_installed_with_the_dialects_version() -> None:
    code = (
        "import importlib.util, importlib.metadata as m\n"
        "print(importlib.util.find_spec('deepspeed').origin, m.metadata('deepspeed')['Version'])"
    )
    origin, version = _infinity("as-deepspeed", "python", "-c", code).stdout.split()
    assert Path(origin).is_relative_to(DIRECTORY)
    assert version == DIALECT


def test_unasked_nobody_finds_it() -> None:
    assert find([place for place in sys.path if place]) is None
    code = "import importlib.util; print(importlib.util.find_spec('deepspeed'))"
    ended = subprocess.run(
        [sys.executable, "-c", f"import infinity, infinity.deepspeed; {code}"],
        env=quiet_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    assert ended.stdout.strip() == "None"


def test_exit_codes_are_the_commands(tmp_path: Path) -> None:
    assert _infinity("as-deepspeed", "python", "-c", "raise SystemExit(7)").returncode == 7
    assert _infinity("as-deepspeed", "python", "-c", "import os; os.kill(os.getpid(), 9)").returncode == 137
    missing = _infinity("as-deepspeed", "no-such-command")
    assert missing.returncode == 127
    assert "no-such-command" in missing.stderr
    assert _infinity("as-deepspeed").returncode == 2


INSTALL = "import infinity.deepspeed\ninfinity.deepspeed.install()\n"
LOAD = "import sys, types; sys.modules['{name}'] = types.ModuleType('{name}')\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (INSTALL + INSTALL + "import deepspeed; print(deepspeed.zero.Init.__name__)", "Init"),
        (INSTALL + "from importlib.metadata import version; print(version('deepspeed'))", DIALECT),
        (
            LOAD.format(name="transformers") + INSTALL,
            "transformers looked for",
        ),
        (LOAD.format(name="accelerate") + INSTALL, "accelerate looked for"),
        (
            LOAD.format(name="deepspeed") + INSTALL,
            "a DeepSpeed is loaded already",
        ),
    ],
    ids=["twice", "metadata", "after transformers", "after accelerate", "after another"],
)
def test_install(code: str, said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=quiet_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert said in (ended.stdout if ended.returncode == 0 else ended.stderr.splitlines()[-1])


def _fake_deepspeed(directory: Path) -> None:
    (directory / "deepspeed").mkdir()
    (directory / "deepspeed" / "__init__.py").write_text("__version__ = '0.16.2'\n")
    info = directory / "deepspeed-0.16.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.2\n")


def test_the_doctor_says_which_one_a_script_would_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> tuple[Verdict, str]:
        finding = next(each for each in examine([]) if each.subject == "import deepspeed")
        return finding.verdict, finding.value

    assert said() == (Verdict.ABSENT, "nothing of that name")
    _fake_deepspeed(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said() == (Verdict.ABSENT, f"DeepSpeed 0.16.2: {tmp_path}/deepspeed/__init__.py")
    monkeypatch.syspath_prepend(str(DIRECTORY))
    assert said() == (Verdict.OK, f"infinity, as DeepSpeed {DIALECT}: {DIRECTORY}/deepspeed/__init__.py")


def test_one_that_is_installed_is_shadowed_where_that_is_asked_for_alone(tmp_path: Path) -> None:
    _fake_deepspeed(tmp_path)
    code = "import deepspeed, infinity; print(deepspeed.__version__)"
    plain = subprocess.run(
        [sys.executable, "-c", code],
        env=quiet_environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    assert plain.stdout.strip() == "0.16.2"
    asked = _infinity("as-deepspeed", "python", "-c", code, PYTHONPATH=str(tmp_path))
    assert asked.stdout.strip() == DIALECT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_our_wheel_beside_a_real_deepspeed(config: Path, tmp_path: Path) -> None:
    """Both are installed and both work; neither is in the other's way unasked. Takes a network and ten minutes."""
    python = prepare_venv(tmp_path / "venv", compiled=False)
    root = Path(__file__).resolve().parents[3]
    pip = [python, "-P", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, str(root)], check=True, timeout=900)
    theirs = next((tmp_path / "venv" / "lib").glob("python*/site-packages/deepspeed"))

    def run(*words: str) -> str:
        environment = {name: value for name, value in quiet_environment().items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            [python, "-P", *words],
            env={**environment, "DS_ACCELERATOR": "cpu"},
            cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
        return ended.stdout.splitlines()[-1] if ended.stdout else ""

    where = "import deepspeed, infinity; print(deepspeed.__file__)"
    assert Path(run("-c", where)) == theirs / "__init__.py"
    asked = Path(run("-m", "infinity", "as-deepspeed", "python", "-c", where))
    assert asked.parts[-3:] == ("as_deepspeed", "deepspeed", "__init__.py")
    out = tmp_path / "out"
    out.mkdir()
    run("-m", "infinity", "as-deepspeed", "python", str(SCRIPT), "--out", str(out), "--deepspeed_config", str(config))
    report = json.loads((out / "report-0.json").read_text())
    assert report["version"] == DIALECT
    assert report["resumed"] == report["losses"][4:]
    assert Path(run("-c", where)) == theirs / "__init__.py"
    subprocess.run([python, "-P", "-m", "pip", "uninstall", "--quiet", "-y", "infinity"], check=True, timeout=300)
    assert Path(run("-c", "import deepspeed; print(deepspeed.__file__)")) == theirs / "__init__.py"
