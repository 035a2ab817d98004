"""What the world may do to a checkpoint: full disks, damaged files, interrupts, kills. The former one stays whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.checkpoint import directory as directories
from infinity.checkpoint.manifest import MANIFEST, index_name
from infinity.checkpoint.pieces import PieceWriter
from infinity.checkpoint.sealed import read_sealed, write_sealed
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.errors import CheckpointError, EngineStateError
from tests.conftest import MountTmpfs
from tests.support.checkpoint_kills import killed_saves
from tests.support.ranks import run_ranks
from tests.support.resumed import differing, everything_of, train


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _stretch(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def test_a_save_of_another_host_is_left_alone(engine: Any, tmp_path: Path) -> None:
    """Its lock may not be seen from here; each of both is published by a rename."""
    theirs = tmp_path / f"{directories.ASIDE}0123456789abcdef01234567-same"
    theirs.mkdir()
    engine.save_checkpoint(tmp_path, tag="same")
    assert theirs.is_dir()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "same")


@pytest.mark.parametrize("damage", [_flip, _cut, _stretch, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_and_the_former_checkpoint_loads(
    engine: Any, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    engine.save_checkpoint(tmp_path, tag="former")
    state = everything_of(engine)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "whole", tag="new")
    now = everything_of(engine)
    for name in [path.name for path in (tmp_path / "whole" / "new").iterdir()]:
        if name.endswith(".pieces") and damage is _flip:
            continue  # what is found when half of it is loaded: see below
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        shutil.copytree(tmp_path / "whole" / "new", tmp_path / "new")
        damage(tmp_path / "new" / name)
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(tmp_path, tag="new")
        assert str(tmp_path / "new") in raised.value.path
        assert name in str(raised.value) or name == MANIFEST
        assert raised.value.remedy
        assert not differing(everything_of(engine), now)
    engine.load_checkpoint(tmp_path)
    assert not differing(everything_of(engine), state)


def test_a_flipped_bit_in_a_piece_is_found_and_the_engine_does_not_go_on(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="x")
    _flip(tmp_path / "x" / "rank-00000.pieces")
    with StoredCheckpoint.open(tmp_path) as stored:
        (found,) = stored.verify()
    assert "is damaged at offset" in str(found)
    with pytest.raises(CheckpointError, match="is damaged at offset"):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(EngineStateError, match="half loaded"):
        engine(torch.ones(4, 16))


def test_a_full_disk_leaves_the_former_checkpoint_and_nothing_else(engine: Any, mount_tmpfs: MountTmpfs) -> None:
    small = mount_tmpfs(400_000)
    engine.save_checkpoint(small, tag="former")
    state = everything_of(engine)
    train(engine, 1)

    def save_for_ever() -> None:
        while True:
            engine.save_checkpoint(small)
            train(engine, 1)

    with pytest.raises(CheckpointError, match="No space left") as raised:
        save_for_ever()
    assert raised.value.errno == errno.ENOSPC
    assert not list(small.glob(".infinity*"))
    with StoredCheckpoint.open(small) as stored:
        assert not list(stored.verify())
    train(engine, 1)
    engine.load_checkpoint(small, tag="former")
    assert not differing(everything_of(engine), state)


CALLS = [
    ("open", errno.EIO),
    ("mkdir", errno.EDQUOT),
    ("pwrite", errno.EDQUOT),
    ("pwrite", errno.EIO),
    ("ftruncate", errno.EIO),
    ("fsync", errno.EIO),
    ("fsync", errno.EDQUOT),
    ("close", errno.EIO),
    ("rename", errno.EACCES),
]
"""What a save asks of the filesystem, and how that may fail."""


class FailingCall:
    """A function of ``os`` that fails once, at its call number ``countdown`` that concerns ``directory``."""

    def __init__(self, name: str, number: int, directory: Path) -> None:
        self._name, self._number, self._directory = name, number, str(directory)
        self._real = getattr(os, name)
        self.countdown = -1

    def __call__(self, what: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        if path.startswith(self._directory):
            self.countdown -= 1
            if self.countdown == -1:
                if self._name == "close":
                    self._real(what)
                raise OSError(self._number, os.strerror(self._number), path)
        return self._real(what, *arguments, **options)


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("tag", ["former", "another"])
def test_whichever_call_fails_the_former_checkpoint_stays_and_nothing_else(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(directories, "_exchange", lambda *_: False)
    num_failed = 0
    for call, number in CALLS:
        directory = tmp_path / f"{call}-{number}"
        engine.save_checkpoint(directory, tag="former", client_state={"save": -1})
        with monkeypatch.context() as patched:
            failing = FailingCall(call, number, directory)
            patched.setattr(os, call, failing)
            for place in range(100):
                failing.countdown = place
                try:
                    engine.save_checkpoint(directory, tag=tag, client_state={"save": place})
                except CheckpointError as error:
                    assert (error.errno, str(directory) in str(error)) == (number, True)
                else:
                    break
                failing.countdown = -1
                num_failed += 1
                assert not list(directory.glob(".infinity*")), (call, place)
                with StoredCheckpoint.open(directory) as stored:
                    assert not list(stored.verify())
                    saved = stored.shared_state()["client_state"]["save"]
                assert set(directories.tags_of(directory)) == {"former", tag if saved == place else "former"}
                if saved == place:  # the new name of `latest` is there; only syncing it, the very last, has failed
                    assert call in ("fsync", "open", "close")
                    break
                assert saved == -1, (call, place)
    assert num_failed > 20
    train(engine, 1)


def test_what_is_no_checkpoint_of_ours_is_never_replaced(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").write_text("DeepSpeed's")
    (tmp_path / "file").write_text("a user's")
    for tag in ("theirs", "file"):
        with pytest.raises(CheckpointError, match="move it away"):
            engine.save_checkpoint(tmp_path, tag=tag)
    assert (tmp_path / "theirs" / "mp_rank_00_model_states.pt").read_text() == "DeepSpeed's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "theirs"]
    (tmp_path / "empty").mkdir()
    engine.save_checkpoint(tmp_path, tag="empty")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "empty")


def test_links_are_followed_to_directories_and_replaced_as_tags(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path / "disk")
    engine.save_checkpoint(linked, tag="first")
    (linked / "moved").mkdir()
    (linked / "first").rename(linked / "moved" / "first")
    (linked / "first").symlink_to(linked / "moved" / "first")
    for save in range(2):
        engine.save_checkpoint(linked, tag="first", client_state={"save": save})
        assert engine.load_checkpoint(linked)[1] == {"save": save}
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["first", "latest", "moved"]
    with StoredCheckpoint(linked / "moved" / "first") as stored:
        assert not list(stored.verify())


@pytest.mark.parametrize("text", [b"", b"\0\0\0", b"\xff\xfe", b"../elsewhere"])
def test_a_latest_that_names_nothing_is_said_with_what_there_is(engine: Any, tmp_path: Path, text: bytes) -> None:
    engine.save_checkpoint(tmp_path, tag="whole")
    (tmp_path / "latest").write_bytes(text)
    with pytest.raises(CheckpointError, match="latest") as raised:
        engine.load_checkpoint(tmp_path)
    assert "whole" in str(raised.value)
    engine.load_checkpoint(tmp_path, tag="whole")
    engine.save_checkpoint(tmp_path, tag="next")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "next")


def test_a_directory_that_cannot_be_written_is_named(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="file") as raised:
            engine.save_checkpoint(bad)
        assert raised.value.errno in (errno.EEXIST, errno.ENOTDIR)
    with pytest.raises(CheckpointError, match="is not there"):
        engine.load_checkpoint(tmp_path / "nowhere", tag="x")
    (tmp_path / "half").mkdir()
    with pytest.raises(CheckpointError, match="has no manifest"):
        engine.load_checkpoint(tmp_path, tag="half")
    (tmp_path / "latest").write_text("gone\n")
    with pytest.raises(CheckpointError, match="gone: is not there"):
        engine.load_checkpoint(tmp_path)
    train(engine, 1)


def test_ctrl_c_leaves_nothing_and_training_goes_on(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save_checkpoint(tmp_path, tag="former")
    before = sorted(path.name for path in tmp_path.iterdir())
    with monkeypatch.context() as patched:
        add = PieceWriter.add

        def interrupted(writer: PieceWriter, *arguments: Any) -> None:
            if len(writer.pieces) == 5:
                raise KeyboardInterrupt
            add(writer, *arguments)

        patched.setattr(PieceWriter, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    train(engine, 1)
    engine.load_checkpoint(tmp_path)


def test_without_an_exchange_of_names_a_tag_is_replaced_all_the_same(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "_exchange", lambda *_: False)
    engine.save_checkpoint(tmp_path, tag="x")
    engine.save_checkpoint(tmp_path, tag="x", client_state={"second": True})
    assert engine.load_checkpoint(tmp_path)[1] == {"second": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "x"]
    (tmp_path / "x").rename(tmp_path / ".infinity-replaced-x")  # where a kill between the two renames would leave it
    assert engine.load_checkpoint(tmp_path)[1] == {"second": True}
    engine.save_checkpoint(tmp_path, tag="y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "x", "y"]


def test_another_process_that_saves_here_is_not_disturbed(engine: Any, tmp_path: Path) -> None:
    with directories.written_aside(tmp_path, "other") as aside:
        (aside / "begun").write_text("")
        with pytest.raises(CheckpointError, match="by another process"):
            engine.save_checkpoint(tmp_path, tag="other")
        engine.save_checkpoint(tmp_path, tag="mine")
        assert (aside / "begun").exists()
    engine.save_checkpoint(tmp_path, tag="other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "mine", "other"]


def test_a_reader_whose_tag_is_saved_again_is_told_so_and_not_of_damage(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="x")
    with StoredCheckpoint.open(tmp_path) as stored:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="x")
        for read in (
            stored.shared_state,
            lambda: list(stored.verify()),
            lambda: stored.read_whole("image", "state.exp_avg"),
        ):
            with pytest.raises(CheckpointError, match=r"/x: was replaced.*read it again"):
                read()
        engine.load_checkpoint(tmp_path)


def test_kills_leave_the_former_checkpoint_whole(tmp_path: Path) -> None:
    for outcome in killed_saves(tmp_path, num_kills=6, seed=1):
        assert outcome.problem == "", outcome


RANKS = """
import json, os, sys
import torch
from infinity.checkpoint.pieces import PieceWriter
from infinity.errors import CheckpointError
from tests.support.resumed import config_of, started, train

rank, told = int(os.environ["RANK"]), []
torch.set_num_threads(1)
engine = started(config_of())
train(engine, 1)
engine.save_checkpoint(sys.argv[1], tag="former")
add = PieceWriter.add
if rank == 1:
    def full(writer, *arguments):
        raise CheckpointError(writer.path, "cannot be written: No space left on device (errno 28)", "free space")
    PieceWriter.add = full
try:
    engine.save_checkpoint(sys.argv[1])
except CheckpointError as error:
    told.append(str(error))
PieceWriter.add = add
try:
    engine.save_checkpoint(sys.argv[1], tag=f"rank{rank}")
except Exception as error:
    told.append(f"{type(error).__name__}: {error}")
train(engine, 1)
engine.load_checkpoint(sys.argv[1])
if rank == 1:
    os.unlink(sys.argv[1] + "/former/rank-00001.pieces")
engine.save_checkpoint(sys.argv[1] + "/other")
try:
    engine.load_checkpoint(sys.argv[1])
except CheckpointError as error:
    told.append(str(error))
train(engine, 1)
engine.destroy()
print(json.dumps(told))
"""


def test_what_fails_on_one_rank_fails_on_all_in_words(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    answers = [ended.answer for ended in run_ranks(RANKS, tmp_path, num_ranks=2, words=[str(saved)])]
    assert "rank 1 failed" in answers[0][0]
    assert "rank-00001.pieces" in answers[0][0]
    for full, diverged, missing in answers:
        assert "No space left" in full
        assert "save the checkpoint rank0" in diverged
        assert "save the checkpoint rank1" in diverged
        assert "rank-00001.pieces" in missing
    assert sorted(path.name for path in saved.iterdir()) == ["former", "latest", "other"]


@pytest.mark.parametrize("has_users_files", [False, True])
def test_all_is_on_the_drive_before_it_has_its_name_and_its_name_before_latest_says_so(
    has_users_files: bool, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    seen: list[str] = []
    fsync, rename, take_place = os.fsync, os.rename, directories._take_place

    def noted(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    def inodes(path: Path) -> set[int]:
        return {each.lstat().st_ino for each in (path, *path.rglob("*")) if each.is_file() or each.is_dir()}

    def checked(aside: Path, final: Path, *others: Any) -> Any:
        assert inodes(aside) <= synced, [each.name for each in aside.rglob("*") if each.lstat().st_ino not in synced]
        seen.append("published")
        synced.clear()
        return take_place(aside, final, *others)

    def renamed(source: Any, target: Any, **words: Any) -> None:
        if os.fspath(target).endswith("/latest"):
            assert tmp_path.stat().st_ino in synced, "the tag's name is on the drive"
            seen.append("latest")
            synced.clear()
        rename(source, target, **words)

    engine.save_checkpoint(tmp_path, tag="x")
    if has_users_files:
        (tmp_path / "x" / "mine").mkdir()
        (tmp_path / "x" / "mine" / "notes").write_text("of the user's")
        os.sync()
        for path in (tmp_path / "x" / "mine", tmp_path / "x" / "mine" / "notes"):
            descriptor = os.open(path, os.O_RDONLY)
            fsync(descriptor)
            os.close(descriptor)
            synced.add(path.stat().st_ino)
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(directories, "_take_place", checked)
    engine.save_checkpoint(tmp_path, tag="x")
    assert seen == ["published", "latest"]
    assert tmp_path.stat().st_ino in synced, "and so is latest"


def test_files_of_another_checkpoint_are_not_mixed_in(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="one")
    state = everything_of(engine)
    index = tmp_path / "one" / index_name(0)
    content, _ = read_sealed(index)
    row = next(iter(content.values()))[0]
    size = index.stat().st_size
    digits = str(row[-1])
    row[-1] = int(digits[0] + digits[:0:-1]) if digits[1:] != digits[:0:-1] else int(digits[::-1])
    index.unlink()
    write_sealed(index, content)
    assert index.stat().st_size == size
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        engine.load_checkpoint(tmp_path)
    assert not differing(everything_of(engine), state)


def test_elements_that_no_rank_wrote_are_missed(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, num_added = PieceWriter.add, 0

    def forget_the_third(self: PieceWriter, *arguments: Any) -> None:
        nonlocal num_added
        num_added += 1
        if num_added != 3:
            add(self, *arguments)

    monkeypatch.setattr(PieceWriter, "add", forget_the_third)
    engine.save_checkpoint(tmp_path, tag="x")
    with pytest.raises(CheckpointError, match="lacks elements"):
        StoredCheckpoint.open(tmp_path, "x")
