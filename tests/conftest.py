"""What every test runs under."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# how long an example takes says how busy the machine is, not whether the code is right
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

MountTmpfs = Callable[[int], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=100, help="simulated nodes to run")
    parser.addoption("--first-seed", type=int, default=0, help="of the first one")
    parser.addoption("--gpu", action="store_true", help="train on the GPU, if there is one: it is hidden otherwise")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported, and with it torch."""
    if not config.getoption("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def own_state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What somebody's sweep has found on this machine must not change what is tested."""
    before = os.environ.get("INFINITY_STATE_DIR")
    os.environ["INFINITY_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["INFINITY_STATE_DIR"]
    else:
        os.environ["INFINITY_STATE_DIR"] = before


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread computes: models are tiny, and threads that spin at barriers would take the cores from the daemon."""
    import torch  # tests of the daemon need none

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def warm_daemons(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test is not about daemons, but each of its engines has one."""
    if "io_daemon" in request.path.parts or request.node.get_closest_marker("cold_daemons"):
        yield
        return
    from tests.support.warm_daemons import used

    with used():
        yield


@pytest.fixture
def gone_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test works in a directory that somebody has removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[MountTmpfs]:
    """Mount a small tmpfs of so many bytes, to be filled or remounted; gone after the test. Skips where none may be."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    with ExitStack() as mounted:

        def mount(num_bytes: int) -> Path:
            path = tmp_path / "small"
            path.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode != 0:
                pytest.skip(f"cannot mount a small tmpfs: {run.stderr.strip()}")
            mounted.callback(subprocess.run, ["umount", "--lazy", str(path)], check=True)
            return path

        yield mount
