"""One memory for all chunks: taken again, made larger when it must be, never shorter than asked for."""

from __future__ import annotations

import torch

from infinity.update.scratch import Scratch

CPU = torch.device("cpu")


def test_memory_is_taken_again_and_grows() -> None:
    scratch = Scratch()
    first = scratch.take(100, torch.float32, CPU)
    assert (first.shape, first.dtype) == ((100,), torch.float32)
    assert scratch.take(60, torch.float32, CPU).data_ptr() == first.data_ptr()
    assert scratch.take(60, torch.float32, CPU).shape == (60,)
    assert scratch.take(101, torch.float32, CPU).shape == (101,), "it was smaller"


def test_another_dtype_has_memory_of_its_own_dtype() -> None:
    scratch = Scratch()
    scratch.take(100, torch.float32, CPU)
    assert scratch.take(50, torch.bfloat16, CPU).dtype is torch.bfloat16


def test_inference_mode_leaves_memory_that_can_be_written_to_outside_of_it() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        taken = scratch.take(10, torch.float32, CPU)
    assert not taken.is_inference()
