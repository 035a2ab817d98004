"""What the configuration has cast around a forward: floating inputs to fp16, or operations by torch's autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from infinity.config import Config
from infinity.plan.precision import DTYPES


class Casting:
    def __init__(self, config: Config, device: torch.device) -> None:
        self._halves_inputs = config.fp16.enabled and config.fp16.auto_cast
        self._autocast, self._device = config.torch_autocast, device

    def inputs(self, given: Any) -> Any:
        """``given``, with its floating-point tensors in the dtype that they are wanted in."""
        return tree_map_only(torch.Tensor, _half, given) if self._halves_inputs else given

    def around_forward(self) -> AbstractContextManager[object]:
        """Entered for a forward; a caller's own autocast gives way to the configuration's."""
        if not self._autocast.enabled:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=DTYPES[self._autocast.dtype])


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
