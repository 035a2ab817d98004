"""One sharded parameter: *how* its full weights appear in device memory and leave it.

Tensors of a parameter, listed once:

- ``param``: the user's ``nn.Parameter``; the same object for the engine's life, so ties and references hold.
- ``full``: the unsharded weights, or None while they are elsewhere. Memory of its own, referenced and never freed by
  force: a view that somebody keeps goes on reading what it read. Autograd keeps none, see ``saved_tensors``.
- ``placeholder``: shape, dtype and device without memory: what a sharded parameter holds (``placeholder``). Python asks
  the owner before it gets there (``access``), and what gets there is refused (``dispatcher``).
- ``param.grad``: the unsharded gradient, for the length of autograd's hook; its group has it until it is reduced.

Weights are flattened in the order in which they lie in memory, so that a parameter keeps its strides.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.multiprocessing import reductions

from infinity.errors import EngineStateError
from infinity.tiers.inference import outside_inference
from infinity.tiers.pool import MemoryPool
from infinity.weights import access, dispatcher, placeholder
from io_daemon._native import checksum

_storage_reference: Any = reductions.StorageWeakRef
_storage_that_lives: Any = torch.UntypedStorage._new_with_weak_ptr
_torchs_numpy: Any = torch._C.TensorBase.numpy


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The tensor's dimensions from the one with the longest stride to the one with the shortest."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True)


def flattened(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """[numel], the elements in the order of memory of a parameter whose ``memory_order`` is given; a view if it can."""
    return tensor.permute(order).reshape(-1)


def _holders_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How many have the tensor's memory, views among them, and how many its storage in Python."""
    storage = placeholder.storage_of(tensor)
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


@cache
def _holders_of_a_tensor() -> tuple[int, int]:
    """... of a tensor that nobody else has."""
    return _holders_of(torch.empty(1, device="cpu"))


class ShardedParam:
    """``resident``: storage identity -> parameter, of all of a model whose weights are here. ``left_behind``: the same
    of memory that weights have left and somebody has still. ``pool``: where memory for the weights comes from; None:
    torch."""

    def __init__(
        self,
        index: int,
        name: str,
        param: nn.Parameter,
        dtype: torch.dtype,
        device: torch.device,
        resident: dict[int, ShardedParam] | None = None,
        pool: MemoryPool | None = None,
        left_behind: dict[int, ShardedParam] | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.shape = param.shape
        self.numel = param.numel()
        self.dtype, self.device = dtype, device
        self.full: torch.Tensor | None = None
        self.generation = 0
        """Updates and writes that the weights have had: what was saved for backward is of one of them."""
        self.stays = False
        """Whether the weights stay where they are between uses."""
        self._num_set = 0
        """How often they were set to themselves, which changes nothing and ends graphs of before."""
        self._saved: int | None = None
        """The generation that was saved for backward last, since the last update."""
        self.order = memory_order(param)
        self.layout = self.layout_for(param, dtype)
        self._lies_plainly = self.layout.is_contiguous()
        dispatcher.watch()
        self.placeholder = placeholder.make(param.shape, dtype, device)
        self._resident = resident if resident is not None else {}
        self._left_behind = left_behind if left_behind is not None else {}
        self._pool = pool if pool is not None else MemoryPool(0, device)
        self._key = 0
        self._num_shown = 0
        self._version: int | None = None
        """Autograd's count of writes to the parameter and its views, as of the last look; None: never shown."""
        self._lent: int | None = None
        """The checksum of weights whose memory somebody was given, where writes are not counted; None: nobody was."""
        self._num_unseen = 0
        self._outlived: dict[int, Any] = {}
        """Memory that the weights have left, by its identity; the weak reference keeps that from being another's."""
        self._left: Any = None
        """The memory that the weights left and come back to, if anybody has it still."""
        self._accumulator: Any = None
        """The node by which autograd accumulates the gradient. Held, so that it holds the parameter all the time."""

    @staticmethod
    def layout_for(param: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """How the weights lie, on the meta device: as they did, or in the same order without holes."""
        order = memory_order(param)
        sizes = [param.size(dim) for dim in order]
        packed = torch.empty(sizes, dtype=dtype or param.dtype, device="meta")
        return packed.permute([order.index(dim) for dim in range(param.dim())])

    def lies_as(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has the shape, dtype, device and order of memory that were found here."""
        return (tensor.shape, tensor.dtype, tensor.device, memory_order(tensor)) == (
            (self.shape, self.dtype, self.device, self.order)
        )

    def is_all_of(self, view: torch.Tensor) -> bool:
        """Whether a view of the weights that are here is these, as they lie: a transposed one has their shape."""
        return (view.shape, view.dtype, view.stride(), view.storage_offset()) == (
            (self.shape, self.dtype, self.layout.stride(), 0)
        )

    def flat_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient``, as autograd made it, flattened in memory order. Raises EngineStateError if it is sparse."""
        if gradient.is_sparse:
            raise EngineStateError(
                f"{self.name}: its gradient is sparse, and torch's optimizers add such a one entry by entry, which the "
                "pieces of a shard cannot: write sparse=False in the embedding, or in the call that made it"
            )
        if self._lies_plainly and gradient.is_contiguous():
            return gradient.view(-1)
        return flattened(gradient, self.order)

    def own_values(self, first: int, numel: int) -> torch.Tensor:
        """A part of what the user's parameter itself holds, flattened in memory order."""
        return flattened(self.param.detach(), self.order)[first : first + numel]

    @property
    def has_memory(self) -> bool:
        """Whether the weights are in memory, or come back to some that somebody keeps."""
        return self.full is not None or self._left is not None

    def allocate(self) -> torch.Tensor:
        """Memory for the full weights, contents undefined; flat view of it. What is there already is taken again."""
        if self.full is None:
            with outside_inference():
                self.full = self._come_back()
                if self.full is None:
                    self.full = self._pool.empty_strided(self.shape, self.layout.stride(), self.dtype)
            self._key = placeholder.identity_of(self.full)
            self._resident[self._key] = self
        # of what is shown autograd must see that it is written to
        return (self.param.detach() if self._num_shown else self.full).as_strided((self.numel,), (1,))

    def move(self, data: torch.Tensor, *, takes_over: bool) -> None:
        """``param.data = data``, a write: the weights are in other memory from then on. Whoever has that of before, as
        who puts weights aside to swap an average in, keeps what is there.

        Args:
            takes_over: ``data`` follows the weights, if its memory is nobody else's: it is theirs then, as torch's.
        """
        if self.full is None or not self.is_shown:
            self.allocate().copy_(flattened(data, self.order))
            return
        data = data.detach()
        taken = takes_over and self._may_take(data)
        if not taken and placeholder.identity_of(data) == self._key and self.is_all_of(data):
            return
        weights = data if taken else self._pool.empty_strided(self.shape, self.layout.stride(), self.dtype).copy_(data)
        del self._resident[self._key]
        self.full, self._key, self._lent = weights, placeholder.identity_of(weights), None
        self._resident[self._key] = self
        placeholder.put(self.param, weights)
        with access.raw():
            increment_version(self.param)
        self._num_unseen = self._count_unseen()
        if taken:
            self.lend_memory()

    def _may_take(self, data: torch.Tensor) -> bool:
        """Whether weights may lie where ``data`` does: as here, in memory that is nobody else's."""
        key = placeholder.identity_of(data)
        return (
            self.lies_as(data)
            and self.is_all_of(data)
            and key not in self._resident
            and (placeholder.storage_of(data).nbytes() == data.nbytes)
        )

    def counting(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights``, which are here, with the parameter's count of writes: who gets them inside backward, as a custom
        function from its context, may write to them as to the parameter."""
        with access.raw(), placeholder.unasked():
            counted: torch.Tensor = torch._C.TensorBase.detach(self.param)
        placeholder.put(counted, weights)
        return counted

    def unflattened(self, flat: torch.Tensor) -> torch.Tensor:
        """``flat`` [numel] in memory order as the parameter lies; a view."""
        return flat.as_strided(self.shape, self.layout.stride())

    def show(self) -> bool:
        """The parameter is its weights, until ``hide`` was called as often. False if, since they were shown last,
        somebody wrote to a view of them: that is lost, or in ``full`` alone."""
        untouched = True
        if self.full is None:
            raise AssertionError(f"{self.name} is shown without its weights")
        if self._num_shown == 0:
            access.show(self.param, self.full, stays=self.stays)
            version = self.param._version
            untouched = self._version in (None, version) and not self._differs_from_lent()
            self._version = version
            if self._accumulator is None and not torch.is_inference_mode_enabled():
                self.hold_accumulator()
            self._num_unseen = self._count_unseen()
        self._num_shown += 1
        return untouched

    def hide(self) -> bool:
        """The counterpart of ``show``. False if somebody wrote to the weights in between."""
        changed = self.is_written()
        self._num_shown -= 1
        if self._num_shown:
            return True
        self._version = self.param._version
        access.hide(self.param, self.placeholder)
        return not changed

    def conceal(self) -> None:
        """Nobody uses the parameter: whatever an interrupt has left, it is hidden."""
        if self._num_shown or not isinstance(self.param, access.ShardedParameter):
            self._num_shown = 0
            self._version = self.param._version
            access.hide(self.param, self.placeholder)

    def hold_accumulator(self) -> None:
        """Have autograd make the node by which it accumulates, which from then on always holds the parameter."""
        if self.param.requires_grad:
            with access.raw(), placeholder.unasked():
                self._accumulator = torch.autograd.graph.get_gradient_edge(self.param).node

    def is_reached(self) -> bool:
        """Whether the backward that runs now accumulates a gradient of the parameter. Raises RuntimeError in
        ``torch.autograd.grad`` with respect to it."""
        return self._accumulator is not None and torch._C._will_engine_execute_node(self._accumulator)

    def is_kept_unseen(self) -> bool:
        """Whether autograd has come to hold the parameter itself since it was shown.

        Where our hooks are (``saved_tensors``) it holds notes instead. So some operation ran in another thread, or with
        hooks switched off, and backward would find the placeholder. While others have the parameter shown an operation
        of theirs may hold it; the last of them is told.
        """
        return self._num_shown == 1 and self._count_unseen() > self._num_unseen

    def _count_unseen(self) -> int:
        """Holders of the parameter that are no views: a view holds the parameter and its memory, a node the former."""
        num_of_memory = torch._C._storage_Use_Count(self._key)
        counted: Any = self.param
        return int(counted._use_count()) - int(num_of_memory)

    @property
    def is_shown(self) -> bool:
        return self._num_shown > 0

    @property
    def is_changed(self) -> bool:
        """Whether somebody wrote to the weights, or to a view that was kept of them, since they were shown."""
        with access.raw():
            return self._version is not None and self.param._version != self._version

    def lies_in(self, memory: int) -> bool:
        """Whether the weights are here, and in the memory of that identity."""
        return self.full is not None and self._key == memory

    def lend_memory(self) -> None:
        """Somebody gets the memory of the weights that are here: what they are now is remembered."""
        if self._lent is None and self.full is not None:
            self._lent = self.checksum()

    @property
    def is_lent(self) -> bool:
        """Whether somebody has, or may have, the memory of the weights."""
        return self._lent is not None

    @property
    def differs(self) -> bool:
        """Whether it ``is_changed``, or whoever has the memory wrote to it."""
        return self.is_changed or self._differs_from_lent()

    def is_written(self) -> bool:
        """Whether it ``differs``. If not, an address is forgotten: nobody can tell how long it is kept."""
        if self.differs:
            return True
        if self._lent is not None and self.full is not None:
            memory, storage = _holders_of(self.full)
            nobody, nobodys = _holders_of_a_tensor()
            if memory - self.is_shown <= nobody and storage <= nobodys:
                self._lent = None
        return False

    def _differs_from_lent(self) -> bool:
        return self._lent is not None and self._lent != self.checksum()

    def checksum(self) -> int:
        """The checksum of the weights that are here, in the order of memory."""
        if self.full is None:
            raise AssertionError(f"{self.name} has no weights here")
        return self._checksum_of(self.full)

    def _checksum_of(self, weights: torch.Tensor) -> int:
        flat = weights.as_strided((self.numel,), (1,)).cpu().view(torch.uint8)
        return checksum(_torchs_numpy(flat))

    def overlook_change(self) -> None:
        """It was refused, or the store has it."""
        with access.raw():
            self._version = self.param._version
        self._look_again()

    def _look_again(self) -> None:
        if self._lent is not None:
            self._lent = self.checksum()

    def note_saved(self) -> tuple[int, int]:
        """Autograd saves the weights, of the age that is returned."""
        self._saved = self.generation
        return self.age

    @property
    def age(self) -> tuple[int, int]:
        """What graphs have of the weights, if it is still that."""
        return self.generation, self._num_set

    def count_set(self) -> None:
        """The weights were set to themselves. What was written before is still to be found."""
        self._num_set += 1
        if self._num_shown and not self.is_changed:
            with access.raw():
                increment_version(self.param)
            self.overlook_change()

    def take_stale(self) -> bool:
        """Whether the weights were written after a forward saved them, and by no update. That is told once."""
        is_stale = self._saved not in (None, self.generation)
        if is_stale:
            self._saved = None
        return is_stale

    def count_update(self) -> None:
        """The optimizer has stepped the weights: graphs of before are over."""
        self.count_write()
        self._saved = None

    def disown_graphs(self) -> None:
        """The weights are others than those that graphs have saved."""
        self.generation += 1

    def count_write(self) -> None:
        """The weights were written; those that are shown, where they are."""
        self.disown_graphs()
        if self._num_shown:
            self._version = self.param._version
        self._look_again()

    def drop(self, *, come_back: bool = False) -> None:
        """Give up the weights. Their memory goes with the last view that somebody keeps, which is remembered.

        ``come_back``: the same weights are to be here again, and then in that memory, if anybody has kept it: so that
        a view follows what becomes of them.
        """
        if self.full is None:
            return
        self._resident.pop(self._key, None)  # an interrupt may have come behind it before
        memory = _storage_reference(self.full.untyped_storage())
        lent, self.full, self._lent = self._lent, None, None
        if memory.expired():
            return
        if come_back:
            self._left = (memory, lent)
        self._forget_the_gone()
        self._outlived[self._key], self._left_behind[self._key] = memory, self

    def _come_back(self) -> torch.Tensor | None:
        """The weights in the memory that they left, unless nobody has that any more, or who does wrote there."""
        if self._left is None:
            return None
        (memory, lent), self._left = self._left, None
        storage = _storage_that_lives(memory.cdata)
        if storage is None:
            return None
        weights = torch.empty(0, dtype=self.dtype, device=self.device)
        weights.set_(storage, 0, self.shape, self.layout.stride())
        if self.is_changed or lent not in (None, self._checksum_of(weights)):
            return None
        self._lent = lent
        key = placeholder.identity_of(weights)
        del self._outlived[key], self._left_behind[key]
        return weights

    def has_outliving_views(self) -> bool:
        """Whether views of weights that were dropped are alive: they would not follow an update, as torch's do."""
        self._forget_the_gone()
        return bool(self._outlived)

    def _forget_the_gone(self) -> None:
        for key in [key for key, memory in self._outlived.items() if memory.expired()]:
            del self._outlived[key], self._left_behind[key]
