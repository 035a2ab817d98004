"""The ``infinity`` command: exit codes, what it prints, and that ``run`` leaves neither ranks nor daemon behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from infinity.commands.cli import main
from infinity.commands.run_command import split_run_words
from tests.support.signals import heed_signals

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120.0
GOOD: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "overlap_comm": True}}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOOD))
    return file


# --- help and usage


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model-params", "nan"], "nan is not a number above 0"),
        (["--model-params", "inf"], "inf is not a number above 0"),
        (["--model-params", "7b"], "7b is not a number above 0"),
        (["--model-params", "1e9", "--host-budget-bytes", "1e400"], "'1e400' is no number of bytes"),
        (["--model-params", "1e9", "--sequence", "4k"], "4k is not a whole number of at least 1"),
    ],
)
def test_numbers_that_are_none_are_told_by_option(
    words: list[str], says: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "--config", str(config_file), *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", ["doctor", "run train.py", "demo --steps 1", "config check ds.json"])
def test_a_working_directory_that_is_gone_is_told_before_torch_meets_it(
    words: str, gone_directory: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert "working directory = '.': the current directory is gone: cd to one that is there" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--swap-dir", "/no/such/directory"], ["--out", "/dev/null/picture.png"]])
def test_a_demo_that_has_no_place_says_so_at_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *words]) == 2
    assert words[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["doctor", "--help"], ["config", "--help"], ["config", "check", "--help"],
              ["config", "keys", "--help"], ["config", "schema", "--help"], ["demo", "--help"]],
    ids=" ".join,
)  # fmt: skip
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "usage: infinity" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["unheard-of"],
        ["config"],
        ["config", "check"],
        ["config", "check", "x.json", "--world-size", "0"],
        ["run"],
        ["run", "--swap-dir", "/tmp"],
        ["run", "--queue-depth", "8", "script.py"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: infinity" in capsys.readouterr().err


# --- config


def test_config_check_says_what_it_found(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(config_file), "--world-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "8 samples = 4 x 1 micro-batches x 2 ranks" in shown
    assert "zero_optimization.overlap_comm needs no setting" in shown


def test_config_check_prints_the_resolved_configuration(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(config_file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["train_micro_batch_size_per_gpu"] == 8
    assert shown["config"]["zero_optimization"]["sub_group_size"] == 10**9
    assert shown["origins"]["train_batch_size"] == {"origin": "given"}
    assert shown["origins"]["train_micro_batch_size_per_gpu"]["origin"] == "derived"
    assert set(shown["subsumed"]) == {"zero_optimization.overlap_comm"}


def test_config_check_tells_where_each_value_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    zero = {"stage": 3, "cpu_offload": True, "sub_group_size": "auto"}
    file.write_text(json.dumps({**GOOD, "zero_optimization": zero, "gradient_clipping": 1.0}))
    assert main(["config", "check", str(file), "--world-size", "2"]) == 0
    lines = {tuple(re.split(" {2,}", line.strip())) for line in capsys.readouterr().out.splitlines()}
    assert {
        ("gradient_clipping = 1.0", "given"),
        ("steps_per_print = 10", "default"),
        ("zero_optimization.sub_group_size = 1000000000", 'default, "auto"'),
        ("train_micro_batch_size_per_gpu = 4", "derived from train_batch_size, world size 2"),
        ('zero_optimization.offload_optimizer.device = "cpu"', "mapped from zero_optimization.cpu_offload"),
        ("zero_optimization.cpu_offload is an old name: write offload_optimizer: {device: cpu}",),
    } <= lines


def test_config_check_prints_all_complaints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**GOOD, "gradient_clipping": "1.0", "zero_optimization": {"stage": 4}}))
    assert main(["config", "check", str(file)]) == 2
    assert "2 settings cannot work" in capsys.readouterr().err
    assert main(["config", "check", str(file), "--json"]) == 2
    shown = json.loads(capsys.readouterr().out)
    assert [(each["key"], each["value"]) for each in shown["complaints"]] == [
        ("gradient_clipping", "1.0"),
        ("zero_optimization.stage", 4),
    ]
    assert all(each["remedy"] for each in shown["complaints"])


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["additionalProperties"] is False


def test_config_check_refuses_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**GOOD, "gradient_cliping": 1.0}))
    assert main(["config", "check", str(file)]) == 2
    assert "did you mean gradient_clipping?" in capsys.readouterr().err


def test_config_check_can_leave_this_machine_out(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": "/not/on/this/machine"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**GOOD, "zero_optimization": {"stage": 3, "offload_param": offload}}))
    assert main(["config", "check", str(file)]) == 2
    assert main(["config", "check", str(file), "--skip-paths"]) == 0


def test_config_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "keys"]) == 0
    assert "| `io_daemon.host_budget_bytes` | works |" in capsys.readouterr().out
    assert main(["config", "keys", "--json"]) == 0
    assert {row["standing"] for row in json.loads(capsys.readouterr().out)} == {"works", "subsumed", "refused"}


# --- run


@pytest.mark.parametrize(
    ("words", "own", "rest"),
    [
        (["train.py", "--swap-dir", "x"], [], ["train.py", "--swap-dir", "x"]),
        (["--swap-dir", "/a", "--swap-dir=/b", "t.py"], ["--swap-dir", "/a", "--swap-dir=/b"], ["t.py"]),
        (["--no-verify-checksums", "--nnodes", "2", "t.py"], ["--no-verify-checksums"], ["--nnodes", "2", "t.py"]),
        (["--nproc-per-node", "2", "--engine", "e", "t.py"], [], ["--nproc-per-node", "2", "--engine", "e", "t.py"]),
        (["--swap-dir"], ["--swap-dir"], []),
    ],
)
def test_torchrun_gets_everything_from_the_first_foreign_word(
    words: list[str], own: list[str], rest: list[str]
) -> None:
    assert split_run_words(words) == (own, rest)


def test_run_refuses_a_swap_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--swap-dir", str(tmp_path / "missing"), "train.py"]) == 2
    assert "does not exist: mkdir -p" in capsys.readouterr().err


def _script(tmp_path: Path, code: str) -> Path:
    script = tmp_path / "train.py"
    script.write_text("import json, os, signal, socket, sys\n" + textwrap.dedent(code))
    return script


def _infinity(*words: str | Path, torchrun: bool = False) -> subprocess.Popen[str]:
    """``infinity`` in a process of its own; without ``torchrun`` the script runs directly, which is quicker."""
    code = "import sys; from infinity.commands import cli, running\n"
    if not torchrun:
        code += "running.TORCHRUN_COMMAND = (sys.executable,)\n"
    code += "sys.exit(cli.main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )


CONNECTS = """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(os.environ["INFINITY_IO_SOCKET"])
"""


def test_run_starts_a_daemon_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    script = _script(
        tmp_path,
        CONNECTS
        + f"""
    with open({str(tmp_path)!r} + "/rank" + os.environ["RANK"], "w") as file:
        json.dump([os.environ["INFINITY_IO_SOCKET"], sys.argv[1:]], file)
    """,
    )
    swap_dir = tmp_path / "swap"
    swap_dir.mkdir()
    words = ["--swap-dir", str(swap_dir), "--queue-depth", "8", "--nproc-per-node", "2", str(script), "--engine", "x"]
    run = _infinity("run", *words, torchrun=True)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    reports = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert reports[0] == reports[1]
    socket_path, arguments = reports[0]
    assert arguments == ["--engine", "x"]
    assert not Path(socket_path).parent.exists()
    assert [*swap_dir.iterdir(), *temporary.iterdir()] == []


def test_logs_that_were_asked_for_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = _infinity("run", "--redirects", "1", _script(tmp_path, "print('kept')"), torchrun=True)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    assert [log.read_text() for log in tmp_path.glob("torchelastic_*/**/stdout.log")] == ["kept\n"]


def test_ranks_that_are_started_again_meet_again(tmp_path: Path) -> None:
    """Torch's own store would have the addresses of the ranks before them."""
    script = _script(
        tmp_path,
        f"""
        import torch, torch.distributed
        torch.distributed.init_process_group("gloo")
        torch.distributed.all_reduce(torch.ones(1))
        torch.distributed.destroy_process_group()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
        open({str(tmp_path)!r} + "/rank" + os.environ["RANK"], "w").close()
        """,
    )
    run = _infinity("run", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1", script, torchrun=True)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


@pytest.mark.parametrize("swap_dir", [True, False])
def test_run_passes_the_exit_code_on(swap_dir: bool, tmp_path: Path) -> None:
    script = _script(tmp_path, "sys.exit(7)")
    run = _infinity("run", *(["--swap-dir", str(tmp_path)] if swap_dir else []), script)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 7, errors


def test_run_counts_a_signal_as_a_shell_does(tmp_path: Path) -> None:
    run = _infinity("run", _script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 128 + signal.SIGKILL


WAITS = """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(os.environ["INFINITY_IO_SOCKET"])
    print(os.getpid(), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_go_on_to_the_ranks_and_end_everything(number: signal.Signals, tmp_path: Path) -> None:
    run = _infinity("run", "--swap-dir", tmp_path, "--socket", tmp_path / "io.sock", _script(tmp_path, WAITS))
    assert run.stdout is not None
    rank_pid = int(run.stdout.readline())
    run.send_signal(number)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    # Python turns SIGINT into a KeyboardInterrupt, ends itself by the signal, and is seen as ended by it
    assert run.returncode == 128 + number, errors
    assert _gone(rank_pid)
    assert not (tmp_path / "io.sock").exists()


def test_run_fails_if_the_daemon_ends_first(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        """
    from io_daemon.config import default_socket_path
    from io_daemon.shared.control import Status, StatusRequest
    from io_daemon.rank.connection import Connection
    connection, _ = Connection.open(str(default_socket_path()), timeout_s=10.0)
    answer, _ = connection.request(StatusRequest(), Status, timeout_s=10.0)
    pidfd = os.pidfd_open(answer.daemon.pid)
    os.kill(answer.daemon.pid, signal.SIGKILL)
    import select
    select.select([pidfd], [], [])
    """,
    )
    run = _infinity("run", "--swap-dir", tmp_path, script)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    assert "ended before the ranks did, with status -9" in errors


def _gone(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], 30.0)[0])
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("option", ["--swap-dir", "--as-deepspeed", "--swap-dir=/tmp"])
def test_options_of_ours_behind_torchruns_are_told_where_they_belong(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--nproc-per-node", "1", option, "/tmp", "train.py", "--swap-dir", "its-own"])
    assert ended.value.code == 2
    assert f"{option} is infinity's own: write it before torchrun's options" in capsys.readouterr().err
