"""Which schedule a training follows, as a table of what the configuration says and what was passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from infinity.config import Scheduler, parse_config
from infinity.errors import ConfigError
from infinity.update.client_schedule import choose_schedule
from infinity.update.schedules import WarmupLR


def made() -> optim.SGD:
    return optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def section() -> Scheduler:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    found = parse_config(config).scheduler
    assert found is not None
    return found


class Minimal:
    """Is no scheduler of torch's, and knows of no optimizer."""

    def step(self, *_args: Any, epoch: int = 0, **_options: Any) -> None:
        """Nothing."""


class Demanding:
    def step(self, metrics: float, epoch: int, /, more: int = 0, *args: Any, key: str, **options: Any) -> None:
        """Nothing."""


def test_without_a_schedule_there_is_none() -> None:
    assert choose_schedule(None, None, optimizer=made(), passed=None) is None
    assert choose_schedule(section(), None, optimizer=None, passed=None) is None
    assert choose_schedule(None, lambda o: StepLR(o, 1), optimizer=None, passed=None) is None


def test_the_configurations_own_drives_the_engines_optimizer() -> None:
    optimizer = made()
    found = choose_schedule(section(), None, optimizer=optimizer, passed=None)
    assert isinstance(found, WarmupLR)
    assert found.optimizer is optimizer


def test_what_was_passed_is_the_schedule() -> None:
    passed, optimizer = made(), made()
    own = StepLR(passed, 1)
    assert choose_schedule(None, own, optimizer=optimizer, passed=passed) is own
    minimal: Any = Minimal()
    assert choose_schedule(None, minimal, optimizer=optimizer, passed=None) is minimal
    given: list[Any] = []

    def function(engines: optim.Optimizer) -> StepLR:
        given.append(engines)
        return StepLR(engines, 1)

    found = choose_schedule(None, function, optimizer=optimizer, passed=None)
    assert isinstance(found, StepLR)
    assert given == [optimizer]
    assert isinstance(choose_schedule(None, lambda o: StepLR(o, 1), optimizer=optimizer, passed=passed), StepLR)


REFUSED: list[tuple[Callable[[optim.Optimizer], Any], bool, str]] = [
    # what is passed, whether the configuration names one as well, why not
    (lambda _o: StepLR(made(), 1), False, "drives another optimizer than the one passed: pass both"),
    (lambda o: StepLR(o, 1), True, "a scheduler was passed too: remove one"),
    (lambda o: ReduceLROnPlateau(o), False, r"its step\(\) needs metrics, which"),
    (lambda _o: Demanding(), False, r"its step\(\) needs metrics, epoch, key, which"),
    (lambda _o: "cosine", False, "must be a scheduler, or a function"),
    (lambda _o: lambda _engines: None, False, "must return a scheduler"),
    (lambda _o: lambda _engines: StepLR, False, "must return a scheduler"),
    (lambda _o: lambda _engines: StepLR(made(), 1), False, "the function must use the one that it gets"),
]


@pytest.mark.parametrize(("given", "named", "words"), REFUSED)
def test_what_cannot_be_followed_is_refused(given: Callable[[optim.Optimizer], Any], named: bool, words: str) -> None:
    passed = made()
    with pytest.raises(ConfigError, match=words):
        choose_schedule(section() if named else None, given(passed), optimizer=made(), passed=passed)


def test_a_class_is_a_function_from_the_optimizer() -> None:
    class Halving(StepLR):
        def __init__(self, optimizer: optim.Optimizer) -> None:
            super().__init__(optimizer, step_size=1, gamma=0.5)

    optimizer = made()
    found = choose_schedule(None, Halving, optimizer=optimizer, passed=None)
    assert isinstance(found, Halving)
    assert found.optimizer is optimizer
