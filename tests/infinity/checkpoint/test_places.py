"""What users name: directories, tags, and the file ``latest``. It is what they meant, or it is refused by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import CheckpointError, ConfigError, EngineStateError
from infinity.files.aside import Left, held, remove_left
from infinity.files.place import local_path
from tests.support.resumed import config_of, differing, everything_of, started, train


def test_a_late_save_stays_where_it_was_begun(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    engine.save_checkpoint("saved", tag="x", asynchronous=True)
    monkeypatch.chdir(tmp_path / "there")
    train(engine, 1)
    engine.wait_for_checkpoint()
    assert sorted(os.listdir(tmp_path / "here" / "saved")) == ["latest", "x"]
    assert not os.listdir(tmp_path / "there")


@pytest.mark.parametrize("tag", [None, "new"])
def test_what_is_still_being_saved_is_loaded(engine: Any, tmp_path: Path, tag: str | None) -> None:
    engine.save_checkpoint(tmp_path, tag="old")
    train(engine, 1)
    state = everything_of(engine)
    engine.save_checkpoint(tmp_path, tag="new", asynchronous=True)
    assert engine.load_checkpoint(tmp_path, tag=tag)[0] == str(tmp_path / "new")
    assert not differing(everything_of(engine), state)


def test_a_checkpoint_itself_may_be_named(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="x", client_state={"it": 1})
    shutil.move(tmp_path / "x", tmp_path / "best")
    assert engine.load_checkpoint(tmp_path / "best") == (str(tmp_path / "best"), {"it": 1})
    assert engine.load_checkpoint(tmp_path, tag="best")[1] == {"it": 1}


@pytest.mark.parametrize(
    "tag",
    [" x", "x ", "a\nb", "x\n", "\tx", "\udcff", "a\0b", "a/b", "x" * 300, "\u2028"],
    ids=lambda tag: ascii(tag)[:9],
)
def test_a_tag_that_would_not_come_back_is_refused(engine: Any, tmp_path: Path, tag: str) -> None:
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ConfigError, match="tag"):
            call(tmp_path, tag=tag)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "tag", ["in ner", "ä日", "[red]", "%s{x}", "-x", ".hidden", "x" * 229, 7], ids=lambda tag: ascii(tag)[:9]
)
def test_any_other_tag_comes_back(engine: Any, tmp_path: Path, tag: str) -> None:
    for save in range(2):
        engine.save_checkpoint(tmp_path, tag=tag, client_state={"save": save})
        assert engine.load_checkpoint(tmp_path) == (str(tmp_path / str(tag)), {"save": save})
    assert sorted(os.listdir(tmp_path)) == sorted([str(tag), "latest"])


def test_what_is_no_directory_of_this_machine_is_refused(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (None, 5, b"bytes", "", "a\0b", "s3://bucket/run", "hf://model"):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(ConfigError, match="_dir"):
                call(given)
    assert not os.listdir(tmp_path)
    assert local_path("it", Path("a/../b")) == tmp_path / "a" / ".." / "b", "a link's parent is not the text's"


def test_what_cannot_be_looked_at_is_named(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    for bad, calls in {
        "loop": (engine.save_checkpoint, engine.load_checkpoint),
        "dangling": (engine.save_checkpoint,),
        "x" * 256: (engine.save_checkpoint, engine.load_checkpoint),
    }.items():
        for call in calls:
            with pytest.raises(CheckpointError, match=bad):
                call(tmp_path / bad)
    with pytest.raises(CheckpointError, match="loop"):
        engine.load_checkpoint(tmp_path / "loop", tag="x")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "loop"]
    (tmp_path / "latest").symlink_to("gone")
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="latest: cannot be read"):
            engine.load_checkpoint(place)


def test_deepspeeds_own_is_named_with_the_command_that_rewrites_it(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("")
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(CheckpointError, match="infinity import-deepspeed"):
        engine.load_checkpoint(tmp_path)


def test_an_engine_that_has_ended_says_so_first(tmp_path: Path) -> None:
    engine = started(config_of())
    engine.destroy()
    with pytest.raises(EngineStateError, match="destroyed"):
        engine.load_checkpoint(tmp_path)


def test_two_engines_save_into_one_directory_at_once(engine: Any, tmp_path: Path) -> None:
    other = started(config_of(), seed=3)
    states = {"mine": everything_of(engine), "others": everything_of(other)}
    engine.save_checkpoint(tmp_path, tag="mine", asynchronous=True)
    other.save_checkpoint(tmp_path, tag="others", asynchronous=True)
    with pytest.raises(CheckpointError, match="mine: is being saved by another process, or by another engine"):
        started(config_of()).save_checkpoint(tmp_path, tag="mine")
    engine.wait_for_checkpoint()
    other.destroy()
    assert sorted(os.listdir(tmp_path)) == ["latest", "mine", "others"]
    for tag, state in states.items():
        engine.load_checkpoint(tmp_path, tag=tag)
        assert not differing(everything_of(engine), state)


def test_a_directory_that_is_removed_before_it_is_locked_is_made_anew(tmp_path: Path) -> None:
    made: list[Path] = []

    def make() -> Path:
        made.append(tmp_path / str(len(made)))
        made[-1].mkdir()
        if len(made) == 1:
            assert remove_left(made[-1], "") is Left.REMOVED, "somebody sweeps just then"
        return made[-1]

    with held(make) as path:
        assert path == made[1]
        assert remove_left(path, "") is Left.LIVES
        assert path.is_dir()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_directory_in_the_way_of_latest_is_named(engine: Any, tmp_path: Path, asynchronous: bool) -> None:
    engine.save_checkpoint(tmp_path, tag="former", save_latest=False)
    (tmp_path / "latest").mkdir()

    def save() -> None:
        engine.save_checkpoint(tmp_path, tag="x", asynchronous=asynchronous)
        engine.wait_for_checkpoint()

    with pytest.raises(CheckpointError, match="a directory is in the way") as raised:
        save()
    assert raised.value.path == str(tmp_path / "latest")
    assert sorted(os.listdir(tmp_path)) == ["former", "latest"]
    (tmp_path / "latest").rmdir()
    engine.save_checkpoint(tmp_path, tag="x")
    assert (tmp_path / "latest").read_text() == "x"
