"""The command ``deepspeed``: which ranks it starts where, what they are told, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.commands.cli import main
from infinity.commands.hosts import chosen, first, nodes_of_hostfile
from infinity.errors import ConfigError
from tests.support.ranks import TIMEOUT_S, free_port, quiet_environment

NODES = {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}
TELL = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE TOLD".split()
told = {name: os.environ.get(name) for name in names}
with open(f"{os.environ['OUT']}/{told['RANK']}.json", "w") as file:
    json.dump({**told, "argv": sys.argv[1:]}, file)
"""


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", NODES),
        ("b@a:0,2", "", {"a": [0, 2], "b": [0, 1]}),
        ("a:1-3", "", {"a": [1, 2, 3]}),
        ("a:2@a:0", "", {"a": [0, 2]}),
        ("", "c", {"a": [0, 1, 2, 3], "b": [0, 1]}),
        ("", "a:0,1@b:1", {"a": [2, 3], "b": [0], "c": [0]}),
    ],
)
def test_nodes_and_devices_are_chosen(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    assert chosen(NODES, include=include, exclude=exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("a", "b", "cannot stand beside"),
        ("d", "", "there is no node 'd'"),
        ("c:1", "", "has no slot 1"),
        ("a:x", "", "is no number"),
        ("", "a@b@c", "leaves nothing"),
    ],
)
def test_filters_that_cannot_work_are_refused(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(NODES, include=include, exclude=exclude)


def test_the_first_nodes_and_devices() -> None:
    assert first(NODES, num_nodes=2, num_devices=1) == {"a": [0], "b": [0]}
    assert first(NODES, num_nodes=-1, num_devices=-1) == first(NODES, num_nodes=0, num_devices=0) == NODES
    with pytest.raises(ConfigError, match="there are 3"):
        first(NODES, num_nodes=4, num_devices=-1)
    with pytest.raises(ConfigError, match="c has 1"):
        first(NODES, num_nodes=-1, num_devices=2)


def test_a_hostfile_is_read_or_refused_by_its_line() -> None:
    lines = ["# two nodes", "", "worker-0 slots=2  # fast", "worker-1 slots=1"]
    assert nodes_of_hostfile(lines, "hosts") == {"worker-0": [0, 1], "worker-1": [0]}
    for line, said in (("worker-0", "slots=4"), ("worker-0 slots=x", "slots=4"), ("worker-1 slots=2", "twice")):
        with pytest.raises(ConfigError, match=said):
            nodes_of_hostfile([*lines, line], "hosts")
    with pytest.raises(ConfigError, match="names no node"):
        nodes_of_hostfile([], "hosts")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--autotuning", "run"], "there is no autotuner"),
        (["--elastic_training"], "the world size is fixed"),
        (["--bind_cores_to_rank"], "numactl"),
        (["--launcher", "slurm"], "srun"),
        (["--launcher_args=-x"], "ssh"),
        (["--venv_script", "x"], "same path"),
        (["--hostfile", "/nowhere"], "is not there"),
        (["--num_nodes", "2"], "hostfile"),
        (["--module", "--no_python"], "not both"),
        (["--num_gpus", "1", "--include", "localhost:0"], "--include"),
        (["--no_ssh"], "--node_rank"),
    ],
)
def test_what_cannot_work_is_refused_by_name(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepspeed", *words, "train.py"]) == 2
    assert said in capsys.readouterr().err


def _run(tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    return subprocess.run(
        [sys.executable, "-P", "-m", "infinity", "deepspeed", *words, str(script), "--x", "1"],
        cwd=tmp_path,
        env=quiet_environment(OUT=str(tmp_path), OMP_NUM_THREADS="1", **variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_ranks_are_told_their_places(tmp_path: Path) -> None:
    ended = _run(tmp_path, "--num_gpus", "2")
    assert ended.returncode == 0, ended.stderr
    for rank in ("0", "1"):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0",
            "CROSS_SIZE": "1", "TOLD": None, "argv": [f"--local_rank={rank}", "--x", "1"],
        }  # fmt: skip


def test_other_nodes_are_reached_by_ssh_with_what_they_need(tmp_path: Path) -> None:
    """A stand-in for ssh runs the command here, as the node's shell would."""
    commands = tmp_path / "bin"
    commands.mkdir()
    ssh = commands / "ssh"
    options = 'while [ "${1#-}" != "$1" ]; do shift 2; done; shift'
    ssh.write_text(f'#!/bin/sh\n{options}\nexec env -i PATH="$PATH" sh -c "$*"\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=2\n")
    (tmp_path / ".deepspeed_env").write_text(f"# for all nodes\nTOLD=yes\nOUT={tmp_path}\n")
    path = f"{commands}:{quiet_environment()['PATH']}"
    words = ("--hostfile", "hosts", "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    ended = _run(tmp_path, *words, "--no_local_rank", "--include", "one@two:0", PATH=path)
    assert ended.returncode == 0, ended.stderr
    for rank in ("0", "1"):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == {
            "RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1", "CROSS_RANK": rank,
            "CROSS_SIZE": "2", "TOLD": "yes", "argv": ["--x", "1"],
        }  # fmt: skip


def test_a_rank_that_fails_fails_the_command(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit(3)")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "infinity", "deepspeed", str(script)],
        env=quiet_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
