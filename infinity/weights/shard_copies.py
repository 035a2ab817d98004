"""What ``param.ds_tensor`` hands out: a copy of this rank's shard, which the store does not follow.

With DeepSpeed it is the shard itself, and scripts write to it. Here that would be lost in silence. Torch does not tell
of every write (a collective, an array, another tensor over the memory), so the memory of a copy knows what was handed
out. It is looked at whenever the parameter's owner looks for writes, and once more when its last user lets go of it.
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
    "change the weights inside infinity.zero.GatheredParameters(param, modifier_rank=0), or with "
    "deepspeed.utils.safe_set_full_fp32_param; to compute with them, .clone() it first"
)


class _Memory(np.ndarray[Any, Any]):
    """The bytes of one copy. Views that numpy makes of it are none."""

    param: nn.Parameter | None = None
    handed_out: int = 0

    def is_written(self) -> bool:
        """Whether it holds something else than was handed out."""
        return self.param is not None and checksum(self) != self.handed_out

    def __del__(self) -> None:
        if not sys.is_finalizing() and self.param is not None and self.is_written():
            _written.append(ref(self.param))


_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
"""The memory of every copy that somebody has, by the identity of its storage."""
_written: list[ref[nn.Parameter]] = []
"""The parameters whose copies were written to and are gone."""


def hand_out(owner: Owner, param: nn.Parameter, shard: torch.Tensor) -> torch.Tensor:
    """A copy of ``shard``, 1-D, in the parameter's dtype, on the CPU; of a model on the meta device there. Raises as
    ``check``."""
    check(owner)
    if shard.is_meta or not shard.numel():
        return shard.to(param.dtype)
    memory = np.empty(shard.numel() * param.element_size(), dtype=np.uint8).view(_Memory)
    copy = torch.frombuffer(memory, dtype=param.dtype)
    copy.copy_(shard)
    memory.param, memory.handed_out = param, checksum(memory)
    _memories[placeholder.identity_of(copy)] = memory
    return copy


def check(owner: Owner) -> None:
    """Raises WeightsError if somebody has written to a copy of a shard that ``owner`` has. That is told once."""
    if not _memories and not _written:
        return
    written: list[nn.Parameter] = []
    for gone in list(_written):
        param = gone()
        if param is not None and owner_of(param) is owner:
            written.append(param)
        if param is None or owner_of(param) in (owner, None):
            _written.remove(gone)
    for memory in list(_memories.values()):
        if memory.param is not None and owner_of(memory.param) is owner and memory.is_written():
            memory.handed_out = checksum(memory)
            written.append(memory.param)
    if written:
        _refuse(owner, written[0])


def check_given(taking: torch.Tensor) -> None:
    """Raises WeightsError if ``taking``, whose memory is about to be another's, is such a copy."""
    memory = _memories.get(placeholder.identity_of(taking)) if _memories else None
    if memory is None or memory.param is None:
        return
    owner = owner_of(memory.param)
    if owner is not None:
        _refuse(owner, memory.param)


def _refuse(owner: Owner, param: nn.Parameter) -> NoReturn:
    owner.refuse(param, "was changed through ds_tensor, which is a copy of this rank's shard", _REMEDY)
