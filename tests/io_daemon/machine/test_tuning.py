"""What a sweep has found is used by "auto", and by nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from io_daemon.machine import tuning
from io_daemon.machine.block_device import device_key
from io_daemon.machine.tuning import Tuning, choose, recall, remember

FOUND = Tuning(engine="posix", block_bytes=1 << 18, queue_depth=8)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state"
    monkeypatch.setenv("INFINITY_STATE_DIR", str(path))
    return path


def test_nothing_is_known_at_first(tmp_path: Path) -> None:
    assert recall([tmp_path]) is None
    assert choose([tmp_path], "auto", None, None) == ("auto", 512 << 10, 32, None)


def test_what_was_found_is_what_auto_means(tmp_path: Path) -> None:
    assert remember([tmp_path], FOUND) == tmp_path / "state" / "tuning.json"
    assert choose([tmp_path], "auto", None, None)[:3] == ("require:posix", 1 << 18, 8)
    assert choose([tmp_path], "require:posix", 1 << 18, None)[:3] == ("require:posix", 1 << 18, 8)


def test_what_was_found_together_is_not_taken_apart(tmp_path: Path) -> None:
    remember([tmp_path], FOUND)
    assert choose([tmp_path], "require:libaio", None, None) == ("require:libaio", 512 << 10, 32, None)
    assert choose([tmp_path], "auto", 4096, None) == ("auto", 4096, 32, None)
    assert choose([tmp_path], "auto", None, 2) == ("auto", 512 << 10, 2, None)


def test_other_directories_of_the_device_share_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    remember([tmp_path], FOUND)
    assert recall([tmp_path / "other"]) == FOUND


def test_devices_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    monkeypatch.setattr(tuning, "device_key", lambda directory: directory.name)
    deeper = Tuning(engine="io_uring", block_bytes=1 << 20, queue_depth=64)
    remember([first], FOUND)
    remember([second], deeper)
    assert (recall([first]), recall([second])) == (FOUND, deeper)
    assert recall([first, second]) == FOUND  # the shallower: neither device gets more than it wants
    remember([first], deeper)
    assert recall([first]) == deeper


def test_an_engine_that_works_no_more_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember([tmp_path], FOUND)
    monkeypatch.setattr(tuning, "probe_engine", lambda engine: "gone")
    assert choose([tmp_path], "auto", None, None) == ("auto", 512 << 10, 32, None)


@pytest.mark.parametrize(
    "text",
    [b"", b"no json", b"\xff\xfe", b'{"version": 2}', b'{"devices": {"x": {"engine": "warp"}}}', b"[" * 100_000],
    ids=range(6),
)
def test_a_damaged_memory_is_said_and_ignored(
    text: bytes, state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.mkdir()
    (state / "tuning.json").write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert recall([tmp_path]) is None
    assert "tuning.json" in caplog.text
    remember([tmp_path], FOUND)
    assert recall([tmp_path]) == FOUND


def test_a_device_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    assert device_key(tmp_path) == device_key(tmp_path / "below") != ""
    assert device_key(Path("/dev/shm")) != device_key(tmp_path)
