"""The command ``deepspeed``: which ranks it starts where, what they are told, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.commands.cli import main
from infinity.commands.hosts import chosen, first, nodes_of_hostfile
from infinity.errors import ConfigError
from tests.support.daemon import eventually
from tests.support.ranks import TIMEOUT_S, free_port, quiet_environment
from tests.support.signals import heed_signals

NODES = {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}
TELL = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE TOLD".split()
told = {name: os.environ.get(name) for name in names}
with open(f"{os.environ['OUT']}/{told['RANK']}.json", "w") as file:
    json.dump({**told, "argv": sys.argv[1:]}, file)
"""
WAIT = """
import os, time
open(f"{os.environ['OUT']}/{os.environ['RANK']}.{os.getpid()}.pid", "w")
time.sleep(600)
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
        (["--hostfile", "/nowhere"], "is not there: leave it out where"),
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
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_ranks_are_told_their_places(tmp_path: Path) -> None:
    ended = _run(tmp_path, "--hostfile=", "--num_gpus", "2")  # shell scripts pass an empty one for none
    assert ended.returncode == 0, ended.stderr
    for rank in ("0", "1"):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0",
            "CROSS_SIZE": "1", "TOLD": None, "argv": [f"--local_rank={rank}", "--x", "1"],
        }  # fmt: skip


def _as_on_two_nodes(tmp_path: Path) -> tuple[tuple[str, ...], str]:
    """Options for the command and a PATH on which a stand-in for ssh runs its command here, as the node's shell would,
    and where no signal to it reaches that."""
    commands = tmp_path / "bin"
    commands.mkdir()
    ssh = commands / "ssh"
    options = 'while [ "${1#-}" != "$1" ]; do shift 2; done; shift'
    ssh.write_text(f'#!/bin/sh\n{options}\nexec setsid --fork --wait env -i PATH="$PATH" sh -c "$*"\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=2\n")
    words = ("--hostfile", "hosts", "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    return (*words, "--include", "one@two:0"), f"{commands}:{quiet_environment()['PATH']}"


def test_other_nodes_are_reached_by_ssh_with_what_they_need(tmp_path: Path) -> None:
    words, path = _as_on_two_nodes(tmp_path)
    (tmp_path / ".deepspeed_env").write_text(f"# for all nodes\nTOLD=yes\nOUT={tmp_path}\n")
    ended = _run(tmp_path, *words, "--no_local_rank", PATH=path)
    assert ended.returncode == 0, ended.stderr
    for rank in ("0", "1"):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == {
            "RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1", "CROSS_RANK": rank,
            "CROSS_SIZE": "2", "TOLD": "yes", "argv": ["--x", "1"],
        }  # fmt: skip


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_what_stands_on_other_nodes_ends_with_the_command(tmp_path: Path, number: signal.Signals, code: int) -> None:
    words, path = _as_on_two_nodes(tmp_path)
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    (tmp_path / ".deepspeed_env").write_text(f"OUT={tmp_path}\n")
    command = subprocess.Popen(
        [sys.executable, "-P", "-m", "infinity", "deepspeed", *words, str(script)],
        cwd=tmp_path, env=quiet_environment(OMP_NUM_THREADS="1", PATH=path), preexec_fn=heed_signals,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        eventually(lambda: len(list(tmp_path.glob("*.pid"))) == 2, "both ranks run", within_s=TIMEOUT_S)
        pids = [int(each.suffixes[0][1:]) for each in tmp_path.glob("*.pid")]
        command.send_signal(number)
        assert command.wait(TIMEOUT_S) == code
    finally:
        command.kill()
    if number != signal.SIGKILL:
        assert not any(map(_is_running, pids)), "the command ends behind its nodes"
    eventually(lambda: not any(map(_is_running, pids)), "both ranks have ended", within_s=TIMEOUT_S)


def test_a_node_that_is_reached_without_a_standard_input_trains(tmp_path: Path) -> None:
    ended = _run(tmp_path, "--num_gpus", "1", "--no_ssh", "--node_rank", "0", "--ends_with_stdin")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "0.json").exists()


def test_without_ssh_several_nodes_are_refused(tmp_path: Path) -> None:
    words, _ = _as_on_two_nodes(tmp_path)
    ended = _run(tmp_path, *words, PATH=str(tmp_path))
    assert ended.returncode == 2
    assert "install it" in ended.stderr


def test_a_rank_that_fails_fails_the_command(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit(3)")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "infinity", "deepspeed", str(script)],
        env=quiet_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
