"""What passes between the core and the libraries below it, seen and disturbed from between (engine_shim.c)."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from io_daemon._native import ENGINES
from tests.support.reactor import ARENA_BYTES, DEADLINE_S

SHIM = Path(__file__).parents[1] / "support" / "engine_shim.c"

NUM_TURNS = 40
MANY_TURNS = """
import sys
from pathlib import Path
from tests.support.reactor import ReactorBench
delays = [("delay", nth, 3_000) for nth in range(0, 40, 7)]  # so that some waits have a timeout
with ReactorBench(Path(sys.argv[1]), sys.argv[2], faults=delays) as bench:
    for turn in range(int(sys.argv[3])):  # each time the thread sleeps, and is woken
        assert bench.write(0, 0, 4096).status == 0
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc")) is None or not {"io_uring", "libaio"} <= set(ENGINES):
        pytest.skip("no C compiler, or no headers of liburing and libaio, for the shim")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-o", str(library), str(SHIM)]
    libraries = ["-Wl,--no-as-needed", "-luring", "-laio"]  # whose own functions are behind those of the shim
    subprocess.run([*command, *libraries], check=True, timeout=DEADLINE_S)
    return library


def run_shimmed(shim: Path, path: Path, engine: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MANY_TURNS, str(path), engine, str(NUM_TURNS)]
    environment = {**os.environ, "LD_PRELOAD": str(shim), **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=DEADLINE_S, check=False)


def test_no_wake_up_is_lost_before_linux_5_11(engine: str, shim: Path, tmp_path: Path) -> None:
    """There liburing takes ~0 for the token of its own time-outs, and swallows the completion."""
    run = run_shimmed(shim, tmp_path / "file", engine, SHIM_NO_EXT_ARG="1")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("error_number", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
@pytest.mark.parametrize("old_kernel", [False, True])
def test_no_wake_up_is_lost_when_its_poll_is_refused(
    shim: Path, tmp_path: Path, error_number: int, old_kernel: bool
) -> None:
    variables = {"SHIM_NO_EXT_ARG": "1"} if old_kernel else {}
    run = run_shimmed(shim, tmp_path / "file", "io_uring", SHIM_REFUSED=f"{error_number}:5", **variables)
    assert (run.returncode, run.stderr) == (0, "")


def test_io_uring_knows_files_and_buffers_ahead(shim: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 2 * ARENA_BYTES:
        pytest.skip("the memlock limit leaves no room for registered buffers")
    log = tmp_path / "log"
    run = run_shimmed(shim, tmp_path / "file", "io_uring", SHIM_LOG=str(log))
    assert (run.returncode, run.stderr) == (0, "")
    assert log.read_text().splitlines().count("registered") == NUM_TURNS


def test_a_probe_looks_at_the_bytes_and_not_at_their_number_alone(shim: Path) -> None:
    script = "from io_daemon._native import probe_engine; print(probe_engine('posix'))"
    environment = {**os.environ, "LD_PRELOAD": str(shim), "SHIM_BLIND": "1"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=DEADLINE_S, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "the bytes read are not those written" in run.stdout
