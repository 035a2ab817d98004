"""The file of whole weights that scripts read of DeepSpeed's checkpoints: below stage 3, with the weights of the last
step, and a part of the checkpoint as its other files are."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.checkpoint.model_states import MODEL_STATES
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.errors import CheckpointError
from tests.conftest import MountTmpfs

Engines = Callable[..., Any]


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Engines:
    """What makes an engine of a model, which ends with the test."""

    def make(model: nn.Module, stage: int, *, dtype: str = "fp32") -> Any:
        given: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
        }
        if dtype != "fp32":
            given[dtype] = {"enabled": True}
        engine = deepspeed.initialize(model=model, config=given)[0]
        request.addfinalizer(engine.destroy)
        return engine

    return make


class Counted(nn.Module):
    """A tied weight, a frozen one, a buffer, and one that state dicts leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.other.weight = self.one.weight
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.frozen(self.other(self.one(x))).float().sum()
        return loss


def _step(engine: Any) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(1, 8, dtype=dtype)))
    engine.step()


def _read(directory: Path, tag: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / tag / MODEL_STATES)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_holds_the_weights_of_the_last_step_under_all_their_names(
    engines: Engines, stage: int, dtype: str, tmp_path: Path
) -> None:
    engine = engines(Counted(), stage, dtype=dtype)
    _step(engine)
    engine.save_checkpoint(tmp_path, "t", {"epoch": 3})
    found = _read(tmp_path, "t")
    now = engine.module.state_dict()
    assert list(found["module"]) == list(now)
    assert all(torch.equal(found["module"][name], now[name]) for name in now)
    assert found["module"]["one.weight"].data_ptr() == found["module"]["other.weight"].data_ptr()
    assert found["buffer_names"] == ["scale"]
    assert (found["global_steps"], found["epoch"]) == (1, 3)
    _step(engine)
    assert not torch.equal(engine.module.state_dict()["one.weight"], found["module"]["one.weight"])


def test_frozen_weights_are_left_out_and_a_state_dict_of_ones_own_is_heard(engines: Engines, tmp_path: Path) -> None:
    model = Counted()
    engine = engines(model, 2)
    engine.save_checkpoint(tmp_path, "all")
    engine.save_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True)
    left = {"frozen.weight", "frozen.bias"}
    assert _read(tmp_path, "all")["module"].keys() - _read(tmp_path, "trained")["module"].keys() == left
    sizes = [(tmp_path / tag / MODEL_STATES).stat().st_size for tag in ("all", "trained")]
    assert sizes[0] > sizes[1]
    whole = model.state_dict
    object.__setattr__(model, "state_dict", lambda *a, **k: {"one.bias": whole(*a, **k)["one.bias"]})
    engine.save_checkpoint(tmp_path, "own", exclude_frozen_parameters=True)
    assert list(_read(tmp_path, "own")["module"]) == ["one.bias"]


def test_it_comes_and_goes_with_the_checkpoint_of_its_tag(engines: Engines, tmp_path: Path) -> None:
    two = engines(Counted(), 2)
    two.save_checkpoint(tmp_path, "t")
    (tmp_path / "t" / "notes.txt").write_text("mine")
    two.save_checkpoint(tmp_path, "t")
    assert (tmp_path / "t" / MODEL_STATES).is_file()
    two.save_checkpoint(tmp_path, "t", asynchronous=True)
    two.wait_for_checkpoint()
    assert not (tmp_path / "t" / MODEL_STATES).exists(), "weights of then are in no file that is written now"
    two.save_checkpoint(tmp_path, "t")
    three = engines(Counted(), 3)
    three.load_checkpoint(tmp_path, "t")
    three.save_checkpoint(tmp_path, "t")
    assert not (tmp_path / "t" / MODEL_STATES).exists()
    assert (tmp_path / "t" / "notes.txt").read_text() == "mine"
    three.load_checkpoint(tmp_path, "t")


def test_infinitys_own_engine_writes_none_and_reads_the_checkpoint(engines: Engines, tmp_path: Path) -> None:
    engine = engines(Counted(), 1)
    _step(engine)
    engine.save_checkpoint(tmp_path, "t")
    with infinity.initialize(model=Counted(), config=engine.config)[0] as own:
        own.load_checkpoint(tmp_path, "t")
        assert torch.equal(own.module.state_dict()["one.weight"], _read(tmp_path, "t")["module"]["one.weight"])
        own.save_checkpoint(tmp_path, "own")
    assert not (tmp_path / "own" / MODEL_STATES).exists()


@pytest.mark.parametrize("place", ["a tensor", "a name", "the directory of its records"])
def test_damage_in_it_is_found(engines: Engines, place: str, tmp_path: Path) -> None:
    engine = engines(Counted(), 1)
    engine.save_checkpoint(tmp_path, "t")
    path = tmp_path / "t" / MODEL_STATES
    data = bytearray(path.read_bytes())
    places = {
        "a tensor": engine.module.state_dict()["one.bias"].numpy().tobytes(),
        "a name": b"one.bias",
        "the directory of its records": b"PK\x01\x02",
    }
    data[data.find(places[place])] ^= 4
    path.write_bytes(data)
    with StoredCheckpoint.open(tmp_path) as stored:
        (found,) = stored.verify()
    assert MODEL_STATES in str(found)
    assert "is damaged" in str(found)
    engine.load_checkpoint(tmp_path, "t")


def test_a_disk_without_room_for_it_leaves_the_former_checkpoint(engines: Engines, mount_tmpfs: MountTmpfs) -> None:
    small = mount_tmpfs(1_200_000)
    engine = engines(nn.Linear(100, 200), 2)  # 20,200 elements, and 12 bytes of each beside the file's 4

    def save_for_ever() -> None:
        for number in count():
            engine.save_checkpoint(small, f"{number}")

    with pytest.raises(CheckpointError, match="No space left") as raised:
        save_for_ever()
    assert raised.value.errno == errno.ENOSPC
    assert not list(small.glob(".infinity*"))
    last = max(int(path.parent.name) for path in small.glob(f"*/{MODEL_STATES}"))
    assert (small / "latest").read_text() == f"{last}"
    with StoredCheckpoint.open(small) as stored:
        assert not list(stored.verify())
