"""One memory for all chunks: taken again, made larger when it must be, never shorter than asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.update.scratch import Scratch

CPU = torch.device("cpu")


def test_memory_is_taken_again_and_grows() -> None:
    scratch = Scratch()
    first = scratch.take(100, torch.float32, CPU, of="gradients")
    assert (first.shape, first.dtype) == ((100,), torch.float32)
    assert scratch.take(60, torch.float32, CPU, of="gradients").data_ptr() == first.data_ptr()
    assert scratch.take(60, torch.float32, CPU, of="gradients").shape == (60,)
    assert scratch.take(101, torch.float32, CPU, of="gradients").shape == (101,), "it was smaller"


def test_another_dtype_has_memory_of_its_own_dtype() -> None:
    scratch = Scratch()
    scratch.take(100, torch.float32, CPU, of="gradients")
    assert scratch.take(50, torch.bfloat16, CPU, of="gradients").dtype is torch.bfloat16


def test_inference_mode_leaves_memory_that_can_be_written_to_outside_of_it() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        taken = scratch.take(10, torch.float32, CPU, of="gradients")
    assert not taken.is_inference()


def test_what_is_taken_of_something_else_stays() -> None:
    scratch = Scratch()
    weights = scratch.take(10, torch.float32, CPU, of="weights").fill_(1)
    scratch.take(10, torch.float32, CPU, of="gradients").fill_(2)
    assert weights.tolist() == [1] * 10


def test_the_old_memory_goes_before_the_new_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, empty = Scratch(), torch.empty
    scratch.take(100, torch.float32, CPU, of="gradients")
    gone = []

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        gone.append(not scratch._memory)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", noting)
    scratch.take(200, torch.float32, CPU, of="gradients")
    assert gone == [True]
