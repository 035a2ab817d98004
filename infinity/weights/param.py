"""One sharded parameter: *how* its full weights appear in device memory and leave it.

Tensors of a parameter, listed once:

- ``param``: the user's ``nn.Parameter``; the same object for the engine's life, so ties and references hold.
- ``full``: the unsharded weights. One tensor over one storage for the engine's life; resharding frees the storage's
  memory (``resize_(0)``), unsharding allocates it again. Autograd keeps views of that storage (``F.linear`` saves
  ``weight.t()``), which therefore see the weights again once the storage is refilled (as torch's FSDP2 does).
- ``placeholder``: one NaN expanded to the parameter's shape. What a sharded parameter reads as: shape, dtype and
  numel stay true, a stray use yields NaN rather than freed memory.
- ``param.grad``: the unsharded gradient, from its accumulation until the group reduces it.
"""

from __future__ import annotations

import torch
from torch import nn


class ShardedParam:
    def __init__(self, index: int, name: str, param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.shape = param.shape
        self.numel = param.numel()
        self.full = torch.empty(param.shape, dtype=dtype, device=device)
        self.placeholder = torch.full((), torch.nan, dtype=dtype, device=device).expand(param.shape)
        self._storage = self.full.untyped_storage()
        self._storage_bytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._version = param._version

    @property
    def storage_key(self) -> int:
        """Identity of the storage that autograd's saved views share."""
        key: int = self._storage._cdata
        return key

    @property
    def gradient(self) -> torch.Tensor | None:
        """The accumulated gradient, flat and dense."""
        grad = self.param.grad
        if grad is None:
            return None
        return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)

    def allocate(self) -> torch.Tensor:
        """Memory for the full weights, contents undefined; flat view of it."""
        if self._storage.nbytes() == 0:
            self._storage.resize_(self._storage_bytes)
        return self.full.view(-1)

    @property
    def is_changed(self) -> bool:
        """Whether somebody wrote to the parameter since it was last sharded or unsharded."""
        return self.param._version != self._version

    def refuse_change(self) -> None:
        """Weights live in the store and only the optimizer writes there: any other change would be lost in silence."""
        raise RuntimeError(
            f"{self.name or 'a parameter'} (shape {tuple(self.shape)}) was changed in place, which sharded weights do "
            "not keep: change it before infinity.initialize(), or make the change part of forward's arithmetic"
        )

    def to_unsharded(self) -> None:
        self.param.data = self.full
        self._version = self.param._version

    def to_sharded(self, *, poison: bool) -> None:
        """Give the memory back; under the debug mode keep it and fill it with NaN, so that stale views show."""
        self.param.data = self.placeholder
        if poison:
            self.full.fill_(torch.nan)
        else:
            self._storage.resize_(0)
        self._version = self.param._version


def is_sharded(param: nn.Parameter) -> bool:
    """Whether the parameter is a placeholder of some engine. What ``Init`` staged looks alike: ask there first."""
    return param.numel() > 1 and not any(param.stride())
