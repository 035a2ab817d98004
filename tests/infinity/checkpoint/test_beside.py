"""Files of the user's own in a tag's directory: whatever becomes of a save into it, they stay."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from infinity.checkpoint import beside
from infinity.checkpoint import directory as directories
from infinity.checkpoint.manifest import MANIFEST
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.commands.cli import main
from infinity.errors import CheckpointError
from infinity.files.aside import remove
from tests.support.ranks import run_ranks
from tests.support.resumed import train


def put_beside(tag: Path) -> None:
    """What people keep there: a file, a directory with a mode of its own, links, a pipe."""
    (tag / "my_config.json").write_text("mine")
    (tag / "tokenizer" / "deep").mkdir(parents=True)
    (tag / "tokenizer" / "deep" / "vocab").write_text("words")
    (tag / "tokenizer" / "deep").chmod(0o500)
    (tag / "there").symlink_to("tokenizer/deep")
    (tag / "nowhere").symlink_to("gone")
    os.mkfifo(tag / "pipe")


def check_beside(tag: Path) -> None:
    assert (tag / "my_config.json").read_text() == "mine"
    assert (tag / "there").is_symlink()
    assert (tag / "there" / "vocab").read_text() == "words"
    assert (tag / "tokenizer" / "deep").stat().st_mode & 0o777 == 0o500
    assert os.readlink(tag / "nowhere") == "gone"


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_users_put_into_a_tags_directory_outlives_saves(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(directories, "_exchange", lambda *_: False)
    engine.save_checkpoint(tmp_path, tag="last")
    put_beside(tmp_path / "last")
    for save in range(2):
        engine.save_checkpoint(tmp_path, tag="last", client_state={"save": save}, asynchronous=asynchronous)
        (tmp_path / "last" / f"while saving {save}").write_text("")
        engine.wait_for_checkpoint()
        check_beside(tmp_path / "last")
        assert (tmp_path / "last" / "pipe").is_fifo()
    assert all((tmp_path / "last" / f"while saving {save}").exists() for save in range(2))
    assert engine.load_checkpoint(tmp_path)[1] == {"save": 1}
    assert sorted(os.listdir(tmp_path)) == ["last", "latest"]
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert main(["checkpoint", "info", str(tmp_path)]) == 0
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0


def test_where_no_second_names_are_they_are_copied(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    engine.save_checkpoint(tmp_path, tag="last")
    put_beside(tmp_path / "last")
    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(CheckpointError, match=r"kept beside the new checkpoint.*pipe"):
        engine.save_checkpoint(tmp_path, tag="last")  # a pipe cannot be copied
    assert (tmp_path / "last" / "pipe").is_fifo()
    (tmp_path / "last" / "pipe").unlink()
    engine.save_checkpoint(tmp_path, tag="last")
    check_beside(tmp_path / "last")
    assert sorted(os.listdir(tmp_path)) == ["last", "latest"]


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("moment", ["_keep", "_take_place", "remove"])
def test_whenever_a_save_ends_they_are_there(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, exchanges: bool
) -> None:
    """The process is taken to be killed after one of the steps: what follows is not done, nor what would be undone."""
    if not exchanges:
        monkeypatch.setattr(directories, "_exchange", lambda *_: False)
    engine.save_checkpoint(tmp_path, tag="last")
    put_beside(tmp_path / "last")
    child = os.fork()
    if child == 0:
        module: Any = beside if moment == "_keep" else directories
        real = getattr(module, moment)

        def ends(*arguments: Any, **options: Any) -> None:
            real(*arguments, **options)
            os._exit(7)

        setattr(module, moment, ends)
        with directories.written_aside(tmp_path, "last") as aside:
            for path in (tmp_path / "last").iterdir():
                if path.is_file() and path.name.startswith(("manifest", "rank", "state")):
                    shutil.copy(path, aside)
            directories.publish(aside, tmp_path, "last", latest=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check_beside(tmp_path / "last")
    for _ in range(2):
        engine.save_checkpoint(tmp_path, tag="last")
        check_beside(tmp_path / "last")
    assert sorted(os.listdir(tmp_path)) == ["last", "latest"]
    assert not (tmp_path / "last" / beside.NEW_LATEST).exists()


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_what_comes_while_names_are_exchanged_stays(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    for tag in ("last", "new"):
        if tag == "last":
            engine.save_checkpoint(tmp_path, tag=tag)
        real = directories._take_place

        def late(aside: Path, final: Path, *rest: Any, real: Any = real) -> Any:
            final.mkdir(exist_ok=True)
            (final / "late").write_text("mine")
            return real(aside, final, *rest)

        with monkeypatch.context() as patched:
            if not exchanges:
                patched.setattr(directories, "_exchange", lambda *_: False)
            patched.setattr(directories, "_take_place", late)
            engine.save_checkpoint(tmp_path, tag=tag)
        assert (tmp_path / tag / "late").read_text() == "mine"
        engine.load_checkpoint(tmp_path)


def test_checkpoints_within_a_checkpoints_directory_stay(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="last")
    engine.save_checkpoint(tmp_path / "last", tag="inner", client_state={"inner": True})
    engine.save_checkpoint(tmp_path, tag="last")
    assert (tmp_path / "last" / "latest").read_text() == "inner"
    with StoredCheckpoint(tmp_path / "last" / "inner") as stored:
        assert not list(stored.verify())
        assert stored.shared_state()["client_state"] == {"inner": True}


def test_files_of_a_damaged_checkpoint_are_replaced_and_others_stay(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="last")
    put_beside(tmp_path / "last")
    (tmp_path / "last" / MANIFEST).write_text("{}")
    engine.save_checkpoint(tmp_path, tag="last")
    check_beside(tmp_path / "last")
    engine.load_checkpoint(tmp_path)


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def forbidden(path: Any, **options: Any) -> None:
        if os.path.basename(path) == "kept":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **options)

    for name in ("a", "kept", "z"):
        (tmp_path / "it" / name).mkdir(parents=True)
        (tmp_path / "it" / name / name).write_text("")
    monkeypatch.setattr(os, "unlink", forbidden)
    remove(tmp_path / "it")
    assert os.listdir(tmp_path / "it") == ["kept"]


RANKS = """
import json, os, sys
import torch
from infinity.errors import CheckpointError
from tests.support.resumed import config_of, started, train

torch.set_num_threads(1)
engine, told = started(config_of()), []
train(engine, 1)
for asynchronous in (False, True):
    try:
        engine.save_checkpoint(sys.argv[1], tag="last", asynchronous=asynchronous)
        engine.wait_for_checkpoint()
    except CheckpointError as error:
        told.append(str(error))
train(engine, 1)
engine.save_checkpoint(sys.argv[1], tag="another")
engine.destroy()
print(json.dumps(told))
"""


def test_a_name_that_the_new_checkpoint_needs_is_refused_on_all_ranks(engine: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    engine.save_checkpoint(saved, tag="last", client_state={"former": True})
    train(engine, 1)
    (saved / "last" / "rank-00001.pt").write_text("mine, since one rank has saved this")
    for ended in run_ranks(RANKS, tmp_path, num_ranks=2, words=[str(saved)]):
        assert len(ended.answer) == 2
        for told in ended.answer:
            assert "last/rank-00001.pt: is no file of the checkpoint's there" in told
    assert (saved / "last" / "rank-00001.pt").read_text() == "mine, since one rank has saved this"
    assert engine.load_checkpoint(saved, tag="last")[1] == {"former": True}
    assert sorted(os.listdir(saved)) == ["another", "last", "latest"]
