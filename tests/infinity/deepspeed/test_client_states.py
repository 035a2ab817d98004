"""Objects of any class in a client state: frameworks keep their logs there, and read them back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.deepspeed.client_states import PICKLED
from infinity.errors import ConfigError

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class History:
    """A log whose pickle names code, as mmengine's does by methods of its own."""

    def __init__(self) -> None:
        self.values = [1.0, 2.0]
        self.statistics = {"mean": self.mean}

    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def test_objects_come_back_beside_what_is_plain(tmp_path: Path) -> None:
    state: dict[str, Any] = {"epoch": 3, "log": History(), "ema": {"weight": torch.arange(3.0)}}
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    engine.save_checkpoint(tmp_path, "one", state)
    _, found = engine.load_checkpoint(tmp_path, "one")
    assert list(found) == list(state)
    assert found["epoch"] == 3
    assert found["log"].statistics["mean"]() == 1.5
    assert torch.equal(found["ema"]["weight"], torch.arange(3.0))
    engine.destroy()
    with infinity.initialize(model=nn.Linear(4, 4), config=CONFIG)[0] as own:
        found = own.load_checkpoint(tmp_path, "one")[1]
        assert found is not None
        assert found["epoch"] == 3
        assert list(found["log"]) == [PICKLED], "infinity's own engine runs no code"


def test_what_cannot_be_pickled_is_refused_by_its_key(tmp_path: Path) -> None:
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    with pytest.raises(ConfigError, match=r"client_state\.rule"):
        engine.save_checkpoint(tmp_path, "one", {"log": History(), "rule": lambda: 0})
    assert engine.save_checkpoint(tmp_path, "two", {"log": History()})
    engine.destroy()


def test_none_and_what_is_no_dict_are_as_before(tmp_path: Path) -> None:
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    engine.save_checkpoint(tmp_path, "one")
    assert engine.load_checkpoint(tmp_path, "one")[1] == {}
    with pytest.raises(ConfigError, match="pass a dict"):
        engine.save_checkpoint(tmp_path, "two", [1])
    engine.destroy()
