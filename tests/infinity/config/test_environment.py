"""The environment is read once, checked, and agrees with what the daemon takes for its default socket."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from infinity.config import read_environment
from infinity.config.environment import deepspeeds_timeout_min
from infinity.errors import ConfigError
from io_daemon.config import default_socket_path


def test_an_empty_environment_is_one_process() -> None:
    environment = read_environment({})
    assert (environment.rank, environment.world_size) == (0, 1)
    assert (environment.local_rank, environment.local_world_size) == (0, 1)
    assert environment.io_socket is None
    assert not environment.poison


def test_what_torchrun_sets_is_read() -> None:
    environment = read_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert (environment.rank, environment.world_size) == (5, 8)
    assert (environment.local_rank, environment.local_world_size) == (1, 4)


def test_without_local_settings_all_ranks_are_on_this_node() -> None:
    environment = read_environment({"RANK": "1", "WORLD_SIZE": "2"})
    assert (environment.local_rank, environment.local_world_size) == (1, 2)


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"INFINITY_DEBUG": "poisson"}, "INFINITY_DEBUG"),
    ],
)
def test_nonsense_is_refused_by_variable(variables: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(variables)
    assert caught.value.key == key


def test_debug_flags() -> None:
    assert read_environment({"INFINITY_DEBUG": " poison, "}).poison
    assert not read_environment({"INFINITY_DEBUG": ""}).poison


def test_runtime_directories_that_are_not_there_are_not_used(tmp_path: Path) -> None:
    assert read_environment({"XDG_RUNTIME_DIR": str(tmp_path)}).runtime_dir == tmp_path
    assert read_environment({"XDG_RUNTIME_DIR": str(tmp_path / "none")}).runtime_dir is None


@pytest.mark.parametrize("named", ["gone", "read-only", "usable", "relative"])
def test_a_temporary_directory_is_one_that_can_be_used(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemon and ranks find each other below it: both take the same."""
    for name in ("INFINITY_IO_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    usable = tmp_path / "usable"
    usable.mkdir()
    (tmp_path / "read-only").mkdir(mode=0o500)
    if named == "read-only":  # which root heeds on no filesystem of its own
        monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) == usable)
    monkeypatch.setattr(tempfile, "tempdir", str(usable))
    monkeypatch.setenv("TMPDIR", "usable" if named == "relative" else str(tmp_path / named))
    environment = read_environment()
    assert environment.temp_dir == usable
    assert environment.default_socket == default_socket_path() == usable / f"infinity-{os.geteuid()}" / "io.sock"


def test_where_no_file_can_be_made_the_socket_has_a_name_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    assert read_environment().temp_dir == Path("/tmp")
    assert default_socket_path() == read_environment().default_socket


@pytest.mark.parametrize("has_runtime_dir", [True, False])
def test_library_and_daemon_agree_on_the_default_socket(
    has_runtime_dir: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFINITY_IO_SOCKET", raising=False)
    if has_runtime_dir:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert read_environment().default_socket == default_socket_path()


def test_the_named_socket_is_read_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_IO_SOCKET", "/run/io-daemon/io.sock")
    assert read_environment().io_socket == default_socket_path() == Path("/run/io-daemon/io.sock")


@pytest.mark.parametrize("taken", ["open to all", "somebody else's", "a file", "a link"])
def test_a_directory_that_somebody_else_made_first_is_not_used(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp anybody may: whoever owns the directory could take the socket away."""
    temp_dir, state_dir = tmp_path / "tmp", tmp_path / "state"
    temp_dir.mkdir()
    for name in ("INFINITY_IO_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(temp_dir))
    monkeypatch.setattr(tempfile, "tempdir", str(temp_dir))
    monkeypatch.setenv("INFINITY_STATE_DIR", str(state_dir))
    usual = temp_dir / f"infinity-{os.geteuid()}"
    assert default_socket_path() == usual / "io.sock"
    usual.mkdir(mode=0o700)
    assert default_socket_path() == usual / "io.sock"
    if taken == "open to all":
        usual.chmod(0o777)
    elif taken == "somebody else's":
        if os.geteuid() != 0:
            pytest.skip("a directory of another user needs root")
        os.chown(usual, 65534, 65534)
    else:
        usual.rmdir()
        usual.touch() if taken == "a file" else usual.symlink_to(state_dir)
    assert default_socket_path() == read_environment().default_socket == state_dir / "io.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket_path() == read_environment().default_socket == tmp_path / "infinity" / "io.sock"


def test_scripts_of_deepspeeds_say_how_long_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    assert deepspeeds_timeout_min() == 30
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "120")
    assert deepspeeds_timeout_min() == 120
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "0")
    with pytest.raises(ConfigError, match="DEEPSPEED_TIMEOUT"):
        deepspeeds_timeout_min()
