"""The command line as a user meets it: help, output, exit codes, and what a kill leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from io_daemon.__main__ import main
from io_daemon.bench import cli, sweep
from io_daemon.bench.result import Report, Verification
from io_daemon.bench.run import run_io
from io_daemon.bench.settings import IoSettings
from io_daemon.command.cli import with_default_command
from io_daemon.config import UNLIMITED_BYTES
from io_daemon.disk.swap_file import SwapHeader
from io_daemon.machine.tuning import recall
from io_daemon.policy.step_trace import save
from tests.support.signals import heed_signals
from tests.support.small_step import small_step

QUICK = ("--size", "8M", "--quiet")
SHORT = (*QUICK, "--bs", "64K", "--iodepth", "4", "--runtime", "0.3", "--ramp-time", "0.1", "--engine", "posix")


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("words", [(), ("io",), ("sweep",), ("compare",), ("step",)])
def test_every_sub_command_explains_itself(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "bench", *words, "--help")
    assert code == 0
    assert "usage: io-daemon bench" in output
    assert len(output.splitlines()) > 8


def test_a_directory_alone_means_sweep() -> None:
    assert with_default_command(["bench", "/nvme0", "--json"]) == ["bench", "sweep", "/nvme0", "--json"]
    assert with_default_command(["bench", "io", "/nvme0"]) == ["bench", "io", "/nvme0"]
    assert with_default_command(["bench", "--help"]) == ["bench", "--help"]
    assert with_default_command(["serve", "--swap-dir", "/nvme0"]) == ["serve", "--swap-dir", "/nvme0"]


def test_the_table_ends_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "bench", "io", tmp_path, *SHORT)
    assert code == 0
    last_paragraph = " ".join(output.strip().split("\n\n")[-1].split())
    assert "a step of a 7B-parameter model" in last_paragraph
    assert last_paragraph.endswith(".")


def test_output_that_knows_ascii_alone_or_is_full(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "io_daemon", "bench", "io", str(tmp_path), *SHORT]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "read lat" in done.stdout
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "io-daemon: [Errno 28] No space left on device\n"


def test_json_is_the_documented_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "bench", "io", tmp_path, *SHORT, "--rw", "read", "--json")
    assert code == 0
    report = Report.model_validate_json(output)
    assert (report.kind, report.settings["bs"], report.settings["rw"]) == ("io", 65536, "read")
    assert report.machine
    assert list(tmp_path.iterdir()) == []


def test_words_that_are_no_text_are_found_before_or_told_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when all is measured, and nothing of it is left."""
    monkeypatch.setattr(sys, "argv", ["io-daemon", "bench", "io", "--html", "\udcff.html"])
    code, output, _ = run(capsys, "bench", "io", tmp_path, *SHORT, "--json")
    assert code == 0
    assert json.loads(output)["command"][-1] == "\\xff.html"


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    directory = tmp_path / "swap"
    directory.mkdir()
    code, _, _ = run(capsys, "bench", "io", directory, *SHORT, "--html", page)
    assert code == 0
    assert "<svg" in page.read_text()


def test_a_regression_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = run(capsys, "bench", "io", tmp_path, *SHORT, "--rw", "read", "--json")
    values = json.loads(output)
    words = ("bench", "io", tmp_path, *SHORT, "--rw", "read", "--baseline")
    slow, fast = tmp_path.parent / f"{tmp_path.name}-slow.json", tmp_path.parent / f"{tmp_path.name}-fast.json"
    slow.write_text(json.dumps(_with_rate(values, 1e-3)))
    fast.write_text(json.dumps(_with_rate(values, 1e3)))
    assert run(capsys, *words, slow)[0] == 0
    code, _, errors = run(capsys, *words, fast, "--max-regression", "20%")
    assert code == 4
    assert "regression" in errors
    code, _, errors = run(capsys, "bench", "io", tmp_path, *SHORT, "--rw", "write", "--baseline", slow)
    assert code == 2
    assert "rw" in errors


def _with_rate(values: dict[str, Any], factor: float) -> dict[str, Any]:
    read = dict(values["result"]["read"])
    for name in ("bw_bytes", "iops"):
        read[name] *= factor
    for stage in ("slat", "clat", "lat"):
        read[stage] = {
            name: value if name == "num_ios" else type(value)(value / factor) for name, value in read[stage].items()
        }
    return {**values, "result": {**values["result"], "read": read}}


def test_bad_data_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "bench", "io", tmp_path, *SHORT, "--rw", "read", "--inject-fault", "flip_write:1:9")
    assert code == 5
    assert "Do not train on this" in output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("{}/none",), 2, "directory = '{}/none': does not exist"),
        (("io", "{}/none"), 2, "directory = '{}/none': does not exist"),
        (("step", "/dev/null", "--trace", "gpt-168m"), 2, "directory = '/dev/null': is no directory"),
        (("compare", "/dev/null"), 2, "directory = '/dev/null': is no directory"),
        (("io", ""), 2, "is empty"),
        (("io", "{}", "{}/."), 2, "directory = '{}': the same directory is named twice"),
        (("sweep", "{}", "{}"), 2, "directory = '{}': the same directory is named twice"),
        (("step", "{}", "{}", "--trace", "gpt-168m"), 2, "directory = '{}': the same directory is named twice"),
        (("io", "{}", "--bs", "5K"), 2, "--bs = 5120: is no multiple of 4096"),
        (("io", "{}", "--bs", "3"), 2, "--bs = 3: should be a multiple of 512"),
        (("io", "{}", "--iodepth", "0"), 2, "--iodepth = 0: should be greater than or equal to 1"),
        (("io", "{}", "--numjobs", "-1"), 2, "--numjobs = -1: should be"),
        (("io", "{}", "--rwmixread", "101"), 2, "--rwmixread = 101: should be"),
        (("io", "{}", "--runtime", "0.001"), 2, "--runtime = 0.001: should be"),
        (("io", "{}", "--ramp-time", "nan"), 2, "--ramp-time = nan: should be"),
        (("io", "{}", "--size", "1"), 2, "--size = 1: should be"),
        (("io", "{}", "--seed", "-1"), 2, "--seed = -1: should be"),
        (("io", "{}", "--memory", "gpu", "--engine", "posix"), 2, "--memory = 'gpu': posix only knows host memory"),
        (("io", "{}", "--write-limit", "1K"), 2, "--write-limit = 1024: laying out"),
        (("io", "{}", "--write-limit", "1K", "--yes"), 2, "--yes: not allowed with argument --write-limit"),
        (("io", "{}", "--html", "{}/none/page.html"), 2, "--html = "),
        (("io", "{}", "--html", "/proc/page.html"), 2, "--html = '/proc/page.html': cannot be written"),
        (("io", "{}", "--html", "/proc/self/fd/0"), 2, "it is no regular file"),
        (("sweep", "{}", "--png", "{}"), 2, "--png = '{}': cannot be written (it is no regular file)"),
        (("sweep", "{}", "--cell-time", "0"), 2, "--cell-time = 0.0: should be"),
        (("sweep", "{}", "--confirm-time", "-1"), 2, "--confirm-time = -1.0: should be"),
        (("compare", "{}", "--rw", "read,foo"), 2, "--rw = 'foo': should be 'read'"),
        (("compare", "{}", "--bs", "1M,0"), 2, "--bs = 0: should be"),
        (("compare", "{}", "--iodepth", "0"), 2, "--iodepth = 0: should be"),
        (("compare", "{}", "--pairs", "0"), 2, "--pairs = 0: should be"),
        (("step", "{}", "--trace", "none"), 2, "--trace = 'none': is no file"),
        (("step", "{}", "--trace", "gpt-168m", "--steps", "1"), 2, "--steps = 1: should be"),
        (("step", "{}", "--trace", "gpt-168m", "--tbw", "-1"), 2, "--tbw = -1.0: should be"),
        (
            ("step", "{}", "--trace", "gpt-168m", "--host-budget-bytes", "1M"),
            2,
            "--host-budget-bytes = 1048576: is too small: ",
        ),
        (("step", "{}", "--trace", "gpt-168m", "--write-limit", "1M"), 2, "--write-limit = 1048576: "),
        (("io", "{}", "--baseline", "/dev/null"), 2, "--baseline = '/dev/null'"),
        (("compare", "{}", "--engines", "posix"), 2, "--engines = 'posix': should be 'io_uring'"),
        (("io", "{}", "--size", "2T"), 2, "--yes"),
        (("io", "{}", "--size", "900T", "--yes"), 1, "stay free"),
        (("io", "{}", "--engine", "warp"), 2, "invalid choice"),
        (("sweep", "{}", "--engines", "warp"), 2, "--engines = 'warp': should be 'io_uring'"),
        (("io", "{}", "--baseline", "{}/none.json"), 2, "--baseline = "),
        (("step", "{}", "--trace", "\udcff"), 2, "--trace = "),
        (("io", "{}", *SHORT, "--inject-fault", "errno_read:0:5"), 1, "errno 5"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, errors = run(capsys, "bench", *(word.replace("{}", str(tmp_path)) for word in words))
    assert found == code
    assert said.replace("{}", str(tmp_path)) in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "config: EOF while parsing"),
        ("[" + "0, " * 200 + "0]", "config: should be an object"),
        (json.dumps({"hidden_size": 2048, "layers": list(range(200))}), "kind: Field required"),
    ],
)
def test_a_baseline_that_is_no_report_is_refused_shortly(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its contents, which may be long, are left out."""
    path = tmp_path / "earlier.json"
    path.write_text(text)
    code, _, errors = run(capsys, "bench", "io", tmp_path, *SHORT, "--baseline", path)
    assert (code, errors.count("\n")) == (2, 1)
    assert f"--baseline = '{path}': is no report of this version ({why}" in errors
    assert errors.endswith("): write one with --json\n")
    assert len(errors) < 200 + len(str(path))


def test_a_sweep_is_remembered_and_its_section_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, state = tmp_path / "swap", tmp_path / "state"
    directory.mkdir()
    monkeypatch.setenv("INFINITY_STATE_DIR", str(state))
    picture = tmp_path / "map.png"
    code, output, _ = run(
        capsys,
        *("bench", "sweep", directory, "--size", "64M", "--quiet", "--engines", "posix", "--json", "--png", picture),
        *("--cell-time", "0.1", "--confirm-time", "0.3"),
    )
    assert code == 0
    report = Report.model_validate_json(output)
    chosen = report.result.model_dump()["chosen"]
    tuning = recall([directory])
    if tuning is None:
        raise AssertionError(state)
    assert (tuning.engine, tuning.block_bytes, tuning.queue_depth) == ("posix", chosen["bs"], chosen["iodepth"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    process = _start(tmp_path)
    _wait_for_file(tmp_path, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert list(tmp_path.iterdir()) == []


IMPORTS_WHILE_MEASURING = """
import sys
import io_daemon.bench.cli as cli
from io_daemon.__main__ import main

def watched(run):
    def measure(settings, observer):
        before = set(sys.modules)
        result = run(settings, observer)
        print("imported while there were files:", sorted(set(sys.modules) - before))
        return result
    return measure

cli.run_io, cli.run_step = watched(cli.run_io), watched(cli.run_step)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["io", "step"])
def test_nothing_is_imported_while_a_signal_has_files_to_remove(kind: str, tmp_path: Path) -> None:
    """Some compiled modules drop what a signal raises while they are imported: Ctrl-C there was never heard of."""
    trace = tmp_path / "small.json.gz"
    save(small_step(), trace)
    words = {
        "io": (*SHORT, "--rw", "randrw", "--verify", "1"),
        "step": ("--trace", str(trace), "--steps", "3", "--quiet", "--engine", "posix"),
    }
    command = [sys.executable, "-c", IMPORTS_WHILE_MEASURING, "bench", kind, str(tmp_path), *words[kind]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "imported while there were files: []" in done.stdout


def test_what_a_kill_leaves_is_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = _start(tmp_path)
    path = _wait_for_file(tmp_path, process)
    assert run(capsys, "gc", "--swap-dir", tmp_path)[0] == 0
    assert path.exists()  # its owner lives
    process.kill()
    process.communicate(timeout=60)
    assert path.exists()
    code, output, _ = run(capsys, "gc", "--swap-dir", tmp_path)
    assert (code, output.strip()) == (0, str(path))
    assert list(tmp_path.iterdir()) == []


def _start(directory: Path) -> subprocess.Popen[str]:
    words = ["bench", "io", str(directory), "--size", "64M", "--runtime", "600", "--engine", "posix", "--yes"]
    return subprocess.Popen(
        [sys.executable, "-m", "io_daemon", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def _wait_for_file(directory: Path, process: subprocess.Popen[str]) -> Path:
    """Until the target has its header and all of its space."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        for path in directory.glob("*.swap"):
            with path.open("rb") as file:
                header = SwapHeader.unpack(file.read(4096))
            if header is not None and header.file_bytes > 64 << 20:
                return path
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def test_a_sweep_that_finds_bad_data_ends_with_the_exit_code_for_it_and_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "swap"
    directory.mkdir()
    monkeypatch.setenv("INFINITY_STATE_DIR", str(tmp_path / "state"))
    bad = Verification(num_blocks=4, num_bad_blocks=1, seconds=0.1, bad=["x"])
    monkeypatch.setattr(sweep, "_measure", lambda *_: (1e9, 0))
    monkeypatch.setattr(sweep, "run_io", lambda *words: run_io(*words).model_copy(update={"verification": bad}))
    words = ("--size", "64M", "--quiet", "--engines", "posix", "--cell-time", "0.1", "--confirm-time", "0.3")
    code, _, _ = run(capsys, "bench", "sweep", directory, *words)
    assert code == cli.EXIT_BAD_DATA
    assert recall([directory]) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "may"),
    [
        (Terminal(""), False),
        (Terminal("\n"), False),
        (Terminal("n\n"), False),
        (Terminal("what\n"), False),
        (Terminal("y\n"), True),
        (io.StringIO("y\n"), False),
    ],
    ids=["end", "nothing", "no", "what", "yes", "script"],
)
def test_only_a_yes_at_a_terminal_is_leave_to_write(
    stdin: io.StringIO, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stderr", Terminal())
    settings = IoSettings.model_validate(
        {"directories": (tmp_path,), "size": 64 << 20, "iodepth": 4, "write_limit_bytes": 1}
    )
    assert cli._with_leave_to_write(settings, 1) is settings
    assert cli._with_leave_to_write(settings, 2).write_limit_bytes == (UNLIMITED_BYTES if may else 1)
