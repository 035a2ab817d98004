"""Copies of this rank's shards, as ``param.ds_tensor`` and ``optimizer.state`` give them; the store follows none.

With DeepSpeed they are the shards themselves, and scripts write to them. Here that would be lost in silence. Torch does
not tell of every write (a collective, an array, another tensor over the memory), so the memory of a copy knows what was
handed out. It is looked at whenever the parameter's owner looks for writes, and once more when its last user lets go of
it.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch import nn

from infinity.weights import placeholder
from infinity.weights.owners import Owner, owner_of
from io_daemon._native import checksum

_REMEDY = (
    "change weights inside infinity.zero.GatheredParameters(param, modifier_rank=0), or these, states and gradients by "
    "safe_set_full_fp32_param, safe_set_full_optimizer_state and safe_set_full_grad; to compute with them, .clone() it "
    "first"
)


class _Memory(np.ndarray[Any, Any]):
    """The bytes of one copy. Views that numpy makes of it are none."""

    param: nn.Parameter | None = None
    through: str = ""
    handed_out: int = 0

    def is_written(self) -> bool:
        """Whether it holds something else than was handed out."""
        return self.param is not None and checksum(self) != self.handed_out

    def __del__(self) -> None:
        if not sys.is_finalizing() and self.param is not None and self.is_written():
            _written.append((ref(self.param), self.through))


_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
"""The memory of every copy that somebody has, by the identity of its storage."""
_written: list[tuple[ref[nn.Parameter], str]] = []
"""The parameters whose copies were written to and are gone, and where these came from."""


def hand_out(owner: Owner, param: nn.Parameter, values: torch.Tensor, through: str) -> torch.Tensor:
    """A copy of ``values``, 1-D, on the CPU; of a model on the meta device there. Raises as ``check``.

    Args:
        param: whose values they are, or the first one's.
        through: where the user gets them.
    """
    check(owner)
    if values.is_meta or not values.numel():
        return values
    memory = np.empty(values.nbytes, dtype=np.uint8).view(_Memory)
    copy = torch.frombuffer(memory, dtype=values.dtype)
    copy.copy_(values)
    memory.param, memory.through, memory.handed_out = param, through, checksum(memory)
    _memories[placeholder.identity_of(copy)] = memory
    return copy


def check(owner: Owner) -> None:
    """Raises WeightsError if somebody has written to a copy of a shard that ``owner`` has. That is told once."""
    if not _memories and not _written:
        return
    written: list[tuple[nn.Parameter, str]] = []
    gone = _written[:]
    del _written[: len(gone)]  # more of them may come at any time
    for found, through in gone:
        param = found()
        if param is not None and owner_of(param) is owner:
            written.append((param, through))
        elif param is not None and owner_of(param) is not None:
            _written.append((found, through))
    for memory in list(_memories.values()):
        if memory.param is not None and owner_of(memory.param) is owner and memory.is_written():
            memory.handed_out = checksum(memory)
            written.append((memory.param, memory.through))
    if written:
        _refuse(owner, *written[0])


def check_given(taking: torch.Tensor) -> None:
    """Raises WeightsError if ``taking``, whose memory is about to be another's, is such a copy."""
    memory = _memories.get(placeholder.identity_of(taking)) if _memories else None
    if memory is None or memory.param is None:
        return
    owner = owner_of(memory.param)
    if owner is not None:
        _refuse(owner, memory.param, memory.through)


def _refuse(owner: Owner, param: nn.Parameter, through: str) -> NoReturn:
    owner.refuse(param, f"was changed through {through}, which is a copy of this rank's shard", _REMEDY)
