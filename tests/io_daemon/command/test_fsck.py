"""``io-daemon fsck``: whose each swap file is, and whether it is whole."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from io_daemon.__main__ import main
from io_daemon.command.outcome import EXIT_FAULT, EXIT_OK, EXIT_USAGE
from io_daemon.disk import inspection
from io_daemon.disk.inspection import Condition, inspect
from io_daemon.disk.swap_file import Owner, SwapFile
from tests.io_daemon.serve.test_reclaim import OTHER_BOOT, dead_owner, leave
from tests.support.daemon import ServedDaemon, specs


@pytest.fixture(autouse=True)
def hardly_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SETTLES_S", 0.05)


def fsck(capsys: pytest.CaptureFixture[str], *directories: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, files as JSON has them, and the lines for people."""
    words = ["fsck", *(word for path in directories for word in ("--swap-dir", str(path)))]
    exit_code = main([*words, "--json"])
    files = json.loads(capsys.readouterr().out)["files"]
    assert main(words) == exit_code
    return exit_code, files, capsys.readouterr().out


def test_a_file_of_a_running_daemon_is_in_use(
    daemon: ServedDaemon, swap_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon.attached(job="demo", rank=3) as client:
        client.register(specs(4))
        (path,) = swap_dir.iterdir()
        exit_code, (file,), text = fsck(capsys, swap_dir)
        assert exit_code == EXIT_OK
        assert file == {
            "path": str(path),
            "condition": "in use",
            "num_bytes": path.stat().st_size,
            "job": "demo",
            "rank": 3,
            "daemon_pid": daemon.pid,
            "note": "",
        }
        assert f"{path}: in use, demo rank 3, daemon {daemon.pid}, " in text
        daemon.kill()
        exit_code, (file,), text = fsck(capsys, swap_dir)
        assert (exit_code, file["condition"]) == (EXIT_OK, "left behind")
        assert f"`io-daemon gc --swap-dir {swap_dir}` removes" in text
        assert path.exists(), "it only looks"


def test_a_file_that_is_cut_off_under_its_daemon_is_damaged(
    daemon: ServedDaemon, swap_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon.attached() as client:
        client.register(specs(4))
        (path,) = swap_dir.iterdir()
        whole = path.stat().st_size
        os.truncate(path, 8192)
        exit_code, (file,), text = fsck(capsys, swap_dir)
        assert (exit_code, file["condition"]) == (EXIT_FAULT, "damaged")
        assert f"8192 bytes long, where its daemon has {whole}" in text
        os.truncate(path, whole)
        assert fsck(capsys, swap_dir)[0] == EXIT_OK


@pytest.mark.parametrize("num_bytes", [0, 100, 8192])
def test_a_file_without_a_header_is_damaged(num_bytes: int, swap_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = swap_dir / "infinity-job-r0-0.swap"
    path.write_bytes(os.urandom(num_bytes))
    exit_code, (file,), text = fsck(capsys, swap_dir)
    assert (exit_code, file["condition"], file["job"]) == (EXIT_FAULT, "damaged", None)
    assert "remove the file by hand" in text
    assert "io-daemon gc" not in text


def test_a_changed_byte_of_the_header_is_seen(swap_dir: Path) -> None:
    path = leave(swap_dir, dead_owner())
    page = bytearray(path.read_bytes())
    page[2000] ^= 1
    path.write_bytes(page)
    (found,) = inspect(swap_dir)
    assert found.condition is Condition.DAMAGED


def test_a_file_that_is_being_made_is_waited_for(monkeypatch: pytest.MonkeyPatch, swap_dir: Path) -> None:
    """A daemon creates the file first, and writes its header then."""
    path = swap_dir / "infinity-job-r0-0.swap"
    path.touch()
    swap_file = SwapFile.create(
        swap_dir, job="other", rank=0, frame_bytes=4096, file_index=0, owner=Owner.this_process(), direct=False
    )
    swap_file.close()
    looked = []

    def later(seconds: float) -> None:
        looked.append(seconds)
        os.replace(swap_file.path, path)

    monkeypatch.setattr(inspection, "SETTLES_S", 1e9)
    monkeypatch.setattr(time, "sleep", later)
    assert [found.condition for found in inspect(swap_dir)] == [Condition.IN_USE]
    assert len(looked) == 1


def test_what_is_not_ours_is_named_and_no_fault(swap_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (swap_dir / "infinity-a.swap").symlink_to(leave(swap_dir, dead_owner()))
    (swap_dir / "infinity-b.swap").mkdir()
    os.mkfifo(swap_dir / "infinity-c.swap")
    (swap_dir / "notes.txt").write_text("no swap file")
    exit_code, files, _ = fsck(capsys, swap_dir)
    assert exit_code == EXIT_OK
    assert [(Path(file["path"]).name, file["condition"]) for file in files] == [
        ("infinity-a.swap", "not ours"),
        ("infinity-b.swap", "not ours"),
        ("infinity-c.swap", "not ours"),
        ("infinity-job-r0-0.swap", "left behind"),
    ]


@pytest.mark.root
def test_files_of_another_user_are_not_ours(swap_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    os.chown(leave(swap_dir, dead_owner()), 1234, -1)
    (found,) = inspect(swap_dir)
    assert (found.condition, found.note) == (Condition.NOT_OURS, "of uid 1234")


def test_files_of_another_machine_are_told_from_dead_ones(monkeypatch: pytest.MonkeyPatch, swap_dir: Path) -> None:
    leave(swap_dir, replace(dead_owner(), boot_id=OTHER_BOOT, machine="another"))
    assert [found.condition for found in inspect(swap_dir)] == [Condition.LEFT]  # a local filesystem
    monkeypatch.setattr("io_daemon.disk.swap_dir.filesystem_of", lambda _: "nfs4")
    assert [found.condition for found in inspect(swap_dir)] == [Condition.ELSEWHERE]


def test_names_that_are_no_text_can_be_told(swap_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.close(os.open(os.fsencode(swap_dir) + b"/infinity-\xff.swap", os.O_CREAT | os.O_WRONLY))
    exit_code, (file,), _ = fsck(capsys, swap_dir)
    assert exit_code == EXIT_FAULT
    assert file["path"].endswith("infinity-\\xff.swap")


def test_directories_are_looked_through_once_each(swap_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(swap_dir, dead_owner())
    (swap_dir / "link").symlink_to(swap_dir)
    assert len(fsck(capsys, swap_dir, swap_dir / "link")[1]) == 1


def test_an_empty_directory_is_well_and_a_missing_one_is_refused(
    swap_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, files, text = fsck(capsys, swap_dir)
    assert (exit_code, files, text) == (EXIT_OK, [], "no swap files\n")
    for path, words in ((swap_dir / "none", "does not exist"), (leave(swap_dir, dead_owner()), "is no directory")):
        assert main(["fsck", "--swap-dir", str(path)]) == EXIT_USAGE
        assert words in capsys.readouterr().err
