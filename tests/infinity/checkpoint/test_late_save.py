"""Saves that are written while training goes on: the same checkpoint, the same training, errors told later."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint.pieces import PieceWriter
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.errors import CheckpointError
from infinity.tiers.snapshot import Snapshot
from tests.conftest import MountTmpfs
from tests.support.checkpoint_kills import killed_late_saves
from tests.support.ranks import run_ranks, run_script
from tests.support.resumed import config_of, differing, everything_of, started, train

WAIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What is imported by the first step draws random numbers."""
    engine = started(config_of())
    train(engine, 1)
    engine.destroy()


def contents(directory: Path, tag: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor of a checkpoint, and its Python values but for those of the client."""
    with StoredCheckpoint.open(directory, tag) as stored:
        assert not list(stored.verify())
        tensors = {
            f"{kind} {name}": stored.read_whole(name, kind).clone()
            for name, entry in stored.entries.items()
            for kind in entry.kinds
        }
        random = {name: str(value) for name, value in stored.rank_state(0)["random"].items()}
        return tensors, {**stored.shared_state(), "random": random, "facts": stored.manifest.facts}


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until training waits for it, at a chunk that it is about to change: then the event is set."""
    waited = threading.Event()
    add, wait_read = PieceWriter.add, Snapshot.wait_read

    def held_add(writer: PieceWriter, *arguments: Any) -> None:
        if not waited.wait(WAIT_S):
            raise AssertionError("training went on without waiting for what it changes")
        add(writer, *arguments)

    def seen_wait(snapshot: Snapshot, chunk: int) -> None:
        waited.set()
        wait_read(snapshot, chunk)

    with monkeypatch.context() as patched:
        patched.setattr(PieceWriter, "add", held_add)
        patched.setattr(Snapshot, "wait_read", seen_wait)
        yield waited
        waited.set()


@pytest.mark.parametrize(
    ("tier", "precision"), [("none", "fp32"), ("none", "bf16"), ("cpu", "fp16"), ("nvme", "fp32"), ("nvme", "bf16")]
)
def test_it_is_what_a_save_at_that_step_is_and_training_does_not_see_it(
    tier: str, precision: str, held_writer: threading.Event, tmp_path: Path
) -> None:
    (tmp_path / "swap").mkdir()
    config = config_of(tier, precision, 3, tmp_path / "swap")
    engine = started(config)
    losses = train(engine, 6)
    engine.save_checkpoint(tmp_path / "late", tag="x", asynchronous=True)
    losses += train(engine, 5)
    assert held_writer.is_set()
    engine.wait_for_checkpoint()
    state = everything_of(engine)
    engine.destroy()

    engine = started(config)
    again = train(engine, 6)
    engine.save_checkpoint(tmp_path / "now", tag="x")
    again += train(engine, 5)
    assert again == losses
    assert not differing(everything_of(engine), state)
    (late, late_values), (now, now_values) = contents(tmp_path / "late", "x"), contents(tmp_path / "now", "x")
    assert not differing(late, now)
    assert late_values == now_values
    engine.load_checkpoint(tmp_path / "late")
    assert train(engine, 5) == losses[6:]
    engine.destroy()


def test_weights_that_are_written_meanwhile_are_kept_as_they_were(tmp_path: Path) -> None:
    """Also where the update before the save is due yet."""
    engine = started(config_of())
    train(engine, 2)
    engine.save_checkpoint(tmp_path, tag="now")
    train(engine, 1)
    engine.load_checkpoint(tmp_path)
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="late", asynchronous=True)
    weight = engine.module.first.weight
    infinity.utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, 7.0))
    engine.wait_for_checkpoint()
    changed = everything_of(engine)
    assert bool((changed["master first.weight"] == 7.0).all())
    engine.load_checkpoint(tmp_path, tag="now")
    train(engine, 1)
    expected = everything_of(engine)
    engine.load_checkpoint(tmp_path, tag="late")
    assert not differing(everything_of(engine), expected)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_weights_that_are_whole_are_kept_as_they_were_before_a_write_in_place(
    stage: int, precision: str, is_gathered: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if stage == 3 and not is_gathered:
        pytest.skip("such a write is refused")
    engine = started(config_of("none", precision, stage, tmp_path))
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="now")
    has_written = threading.Event()
    add = PieceWriter.add

    def held_add(writer: PieceWriter, *arguments: Any) -> None:
        if not has_written.wait(WAIT_S):
            raise AssertionError("the write waits for the save")
        add(writer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PieceWriter, "add", held_add)
        engine.save_checkpoint(tmp_path, tag="late", asynchronous=True)
        weight = engine.module.first.weight
        gathered = infinity.zero.GatheredParameters(weight, modifier_rank=0) if is_gathered else nullcontext()
        with gathered, torch.no_grad():
            weight.fill_(7.0)
            has_written.set()
        engine.wait_for_checkpoint()
    (late, _), (now, _) = contents(tmp_path, "late"), contents(tmp_path, "now")
    assert not differing(late, now)
    assert bool((engine.full_state_dict()["first.weight"] == 7.0).all())
    engine.destroy()


def test_a_full_disk_is_told_at_a_later_step_and_the_former_checkpoint_stays(mount_tmpfs: MountTmpfs) -> None:
    small = mount_tmpfs(400_000)
    with started(config_of()) as engine:
        engine.save_checkpoint(small, tag="former")

        def train_and_save_for_ever() -> None:
            while True:
                engine.save_checkpoint(small, asynchronous=True)
                train(engine, 1)

        with pytest.raises(CheckpointError, match="No space left") as raised:
            train_and_save_for_ever()
        assert raised.value.errno == errno.ENOSPC
        assert not list(small.glob(".infinity*"))
        with StoredCheckpoint.open(small) as stored:
            assert not list(stored.verify())
        engine.zero_grad()
        train(engine, 2)
        engine.load_checkpoint(small, tag="former")


def test_an_error_nobody_asked_for_is_raised_by_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(config_of())
    train(engine, 1)

    def fail(writer: PieceWriter, *_: Any) -> None:
        raise CheckpointError(writer.path, "cannot be written", "use another drive")

    monkeypatch.setattr(PieceWriter, "add", fail)
    engine.save_checkpoint(tmp_path, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"pieces.*cannot be written"):
        engine.destroy()
    assert not list(tmp_path.iterdir())
    engine.destroy()


def test_the_end_waits_for_it_also_where_an_error_ends_the_training(tmp_path: Path) -> None:
    def train_and_fail() -> None:
        with started(config_of()) as engine:
            train(engine, 1)
            engine.save_checkpoint(tmp_path, tag="x", client_state={"epoch": 1}, asynchronous=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "x"]
    assert contents(tmp_path, "x")[1]["client_state"] == {"epoch": 1}


SCRIPT = """
import sys
from tests.support.resumed import config_of, started, train

engine = started(config_of())
train(engine, 1)
engine.save_checkpoint(sys.argv[1], tag="x", asynchronous=True)
raise ZeroDivisionError
"""


def test_the_end_of_the_script_waits_for_it_too(tmp_path: Path) -> None:
    """Nobody has called destroy(), and the interpreter takes no more work from anybody."""
    directory = tmp_path / "saved"
    ended = run_script(SCRIPT, tmp_path, str(directory))
    assert "ZeroDivisionError" in ended.errors
    assert "Logging error" not in ended.errors
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "x"], ended.errors
    contents(directory, "x")


def test_a_writer_that_hangs_does_not_hang_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    add = PieceWriter.add

    def hang(writer: PieceWriter, *arguments: Any) -> None:
        released.wait(WAIT_S)
        add(writer, *arguments)

    monkeypatch.setattr("infinity.tiers.snapshot.READ_TIMEOUT_S", 0.1)
    monkeypatch.setattr(PieceWriter, "add", hang)
    engine = started(config_of())
    train(engine, 1)
    engine.save_checkpoint(tmp_path, asynchronous=True)
    train(engine, 3)
    released.set()
    with pytest.raises(CheckpointError, match="training went on without it"):
        engine.wait_for_checkpoint()
    assert not list(tmp_path.iterdir())
    engine.destroy()


def test_who_waits_for_a_drive_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former checkpoint is whole, and training goes on."""
    engine = started(config_of())
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="former")
    released, add = threading.Event(), PieceWriter.add

    def hang(writer: PieceWriter, *arguments: Any) -> None:
        released.wait(WAIT_S)
        add(writer, *arguments)

    monkeypatch.setattr("infinity.engine.late_save.STALL_TIMEOUT_S", 0.1)
    monkeypatch.setattr("infinity.engine.late_save.ABANDON_TIMEOUT_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(PieceWriter, "add", hang)
        engine.save_checkpoint(tmp_path, tag="late", asynchronous=True)
        with pytest.raises(CheckpointError, match="is not written: its drive took nothing for"):
            engine.wait_for_checkpoint()
        released.set()
    train(engine, 1)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "former")
    engine.destroy()


def test_kills_leave_the_former_checkpoint_whole(tmp_path: Path) -> None:
    for outcome in killed_late_saves(tmp_path, num_kills=4, seed=2):
        assert outcome.problem == "", outcome


RANKS = """
import json, os, sys
import torch
from infinity.checkpoint.pieces import PieceWriter
from infinity.engine.saving import Saving
from infinity.errors import CheckpointError
from tests.support.resumed import config_of, differing, everything_of, started, train

rank, told = int(os.environ["RANK"]), []
torch.set_num_threads(1)
engine = started(config_of())
train(engine, 2)
engine.save_checkpoint(sys.argv[1], tag="late", asynchronous=True)
losses = train(engine, 3)
engine.wait_for_checkpoint()
state = everything_of(engine)
engine.load_checkpoint(sys.argv[1])
told.append(train(engine, 3) == losses and not differing(everything_of(engine), state))
add = PieceWriter.add
if rank == 1:
    def full(writer, *arguments):
        raise CheckpointError(writer.path, "cannot be written: No space left on device (errno 28)", "free space")
    PieceWriter.add = full
engine.save_checkpoint(sys.argv[1], asynchronous=True)
try:
    for step in range(1000):
        train(engine, 1)
except CheckpointError as error:
    told += [step, str(error)]
PieceWriter.add = add
engine.zero_grad()
keep_buffers = Saving.keep_buffers
if rank == 1:
    def out_of_memory(_saving):
        raise RuntimeError("out of memory")
    Saving.keep_buffers = out_of_memory
try:
    engine.save_checkpoint(sys.argv[1], tag="none", asynchronous=True)
except (CheckpointError, RuntimeError) as error:
    told.append(str(error))
Saving.keep_buffers = keep_buffers
train(engine, 1)
engine.save_checkpoint(sys.argv[1], tag="last", asynchronous=True)
engine.destroy()
print(json.dumps(told))
"""


def test_ranks_publish_together_and_fail_together(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    answers = [ended.answer for ended in run_ranks(RANKS, tmp_path, num_ranks=2, words=[str(saved)])]
    assert [answer[0] for answer in answers] == [True, True]
    assert answers[0][1] == answers[1][1], "all ranks raise at the same step"
    assert "rank 1 failed" in answers[0][2]
    assert "No space left" in answers[1][2]
    assert "rank 1 failed: RuntimeError: out of memory" in answers[0][3], "and training goes on"
    assert answers[1][3] == "out of memory"
    assert sorted(path.name for path in saved.iterdir()) == ["last", "late", "latest"]
    with StoredCheckpoint.open(saved) as stored:
        assert not list(stored.verify())


FORKS = """
import os, sys, warnings
import torch
from tests.support.resumed import config_of, started, train

torch.set_num_threads(1)
engine = started(config_of())
train(engine, 1)
engine.save_checkpoint(sys.argv[1], tag="late", asynchronous=True)
warnings.filterwarnings("ignore", "This process")  # Python 3.12 warns of forks beside threads
child = os.fork()
if child == 0:
    if sys.argv[2] == "destroys":
        engine.destroy()
    if sys.argv[2] == "leaves":
        with engine:
            sys.exit(0)
    sys.exit(0)  # with all that an interpreter does at its end
status = os.waitpid(child, 0)[1]
engine.wait_for_checkpoint()
train(engine, 1)
engine.destroy()
sys.exit(status)
"""


@pytest.mark.parametrize("child", ["ends", "destroys", "leaves"])
def test_a_forked_child_that_ends_leaves_its_parents_save_alone(child: str, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    ended = run_script(FORKS, tmp_path, str(directory), child)
    assert (ended.code, ended.errors) == (0, "")
    assert sorted(path.name for path in directory.iterdir()) == ["late", "latest"]
