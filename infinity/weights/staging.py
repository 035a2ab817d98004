"""Where ``Init`` keeps the parameters of a model under construction: in memory as long as they fit, else as shards of
kind STAGING in the store. The area owns them until ``initialize`` takes them over."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Final, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.config import Config, read_environment
from infinity.errors import WeightsError
from infinity.plan.sharding import ALIGNMENT
from infinity.plan.staging_plan import PIECE_BYTES_MAX, staging_plan
from infinity.tiers.base import ChunkLayout, ShardStore, leased
from infinity.tiers.collectives import Collectives
from infinity.tiers.connection import DaemonConnection, NodePlace
from infinity.tiers.daemon import DaemonStore
from infinity.tiers.inference import outside_inference
from infinity.tiers.memory import MemoryStore
from infinity.weights import access, arrays, owners, placeholder, shard_copies
from infinity.weights.ds_names import end_loan, lend
from infinity.weights.heap import RETURNED_NUMEL_MIN, return_freed
from infinity.weights.mapped_files import page_out_mapped_weights
from infinity.weights.param import ShardedParam, flattened, memory_order
from infinity.weights.promises import fill
from infinity.weights.together import broadcast, together
from io_daemon.shared.protocol import ObjectKind, align_up

STAGING: Final = ObjectKind.STAGING.mask


class StagingArea(owners.Owner):
    """The store behind one ``Init``; it outlives the context until ``initialize``."""

    keeps_writes = True

    def __init__(self, config: Config, collectives: Collectives) -> None:
        """Collective. The area closes ``collectives``."""
        self.config = config
        self.collectives = collectives
        self.connection: DaemonConnection | None = None
        self.is_building = True
        """The model is being built: this is true between entering and leaving ``Init``."""
        self.casts_weights = False
        """``Init`` was told a dtype that weights in fp32 were cast to."""
        self.arena_bytes = 0
        """The arenas of all ranks of the job on this node: to be left out of the engine's budget."""
        self.num_params = 0
        """Parameters that were registered so far; the same on every rank."""
        self.store: ShardStore = MemoryStore(torch.device("cpu"))
        self.piece_bytes = PIECE_BYTES_MAX
        self._in_memory: OrderedDict[int, tuple[StagedParam, int]] = OrderedDict()
        """By id, with its elements; the one touched last at the end."""
        self._numel = 0
        """Elements of all these."""
        zero = config.zero_optimization
        self._numel_max = zero.stage3_prefetch_bucket_size
        if "nvme" in (zero.offload_param.device, zero.offload_optimizer.device):
            self._open_daemon_store()
        # a model may go without an engine: its parameters are all that refers to the area
        ending = partial(_end, self.store, collectives, self.connection)
        self._let_go = weakref.finalize(self, collectives.let_go, ending)
        self._let_go.atexit = False

    def has_others(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a model beside that of ``params`` is staged here, or may yet be."""
        own = {id(param) for param in params}
        return self.is_building or any(s.area is self and id(p) not in own for p, s in _all_staged())

    @property
    def swap_bytes(self) -> int:
        """What this rank's shards take on disks; once the store is closed, it is free."""
        return self.store.tenant_stats().swap_bytes if isinstance(self.store, DaemonStore) else 0

    @property
    def is_closed(self) -> bool:
        """Whether the shards are gone: an engine has them, or was refused."""
        return not self._let_go.alive

    def close_store(self) -> None:
        """Remove the staged shards. The connection stays: the engine goes on with it. Idempotent."""
        if self._let_go.detach() is None:
            return
        self.store.close()
        self.collectives.close()

    def close(self) -> None:
        """No engine will take over: end the private daemon too."""
        self.close_store()
        if self.connection is not None:
            self.connection.close()

    # What is in memory

    def keep(self, staged: StagedParam) -> None:
        """It was made, or touched, last; others make room for it."""
        self.forget(id(staged))
        self._in_memory[id(staged)] = staged, staged.numel
        self._numel += staged.numel
        if self._numel > self._numel_max:  # some more go with what must: together they cost as much as one
            self._evict(keep=staged, numel_max=self._numel_max - self._numel_max // 4)

    def stage_everything(self) -> None:
        """The model is built: nothing but its shards stays."""
        self._evict(keep=None, numel_max=-1)

    def forget(self, key: int) -> None:
        """The one of this id needs no memory any more, or nobody has it: wherever that is, it may be the collector."""
        _, numel = self._in_memory.pop(key, (None, 0))
        self._numel -= numel

    def _evict(self, *, keep: StagedParam | None, numel_max: int) -> None:
        leaving, numel = [], self._numel
        for staged, own_numel in list(self._in_memory.values()):
            if numel <= numel_max or staged is keep:  # it is the last
                break
            leaving.append(staged)
            numel -= own_numel
        # held: the collector may come at any time
        there = [(staged, staged.param) for staged in leaving if not (staged.is_dropped or staged.is_aliased)]
        for several in together(there, lambda pair: pair[1]):
            with access.raw(), torch.no_grad():
                self._stage_out([staged for staged, _ in several])
            if any(staged.numel >= RETURNED_NUMEL_MIN for staged, _ in several):
                return_freed()
                page_out_mapped_weights()
        for staged in leaving:
            self.forget(id(staged))

    def _stage_out(self, several: Sequence[StagedParam]) -> None:
        """Rank 0's values become every rank's; each keeps its shards only."""
        flats = [staged.leaving_values() for staged in several]
        if self.collectives.world_size > 1:
            others = f" to {several[-1].name}, {len(several)} of them" if len(several) > 1 else ""
            flats = broadcast(flats, self.collectives, f"stage out {several[0].name}{others}")
        if new := [staged for staged in several if not staged.chunks]:
            layouts = [staged.layouts() for staged in new]
            chunks = self.store.register(list(chain.from_iterable(layouts)))
            for staged, own in zip(new, layouts, strict=True):
                staged.chunks, chunks = chunks[: len(own)], chunks[len(own) :]
        for staged, flat in zip(several, flats, strict=True):
            staged.leave(flat)

    # The ``Owner``

    @contextmanager
    def borrow(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """What the operation writes is kept: a staged parameter is still being made."""
        shard_copies.check(self)
        lent = [self.staged(param) for param in params]
        try:
            for staged in lent:
                if staged.is_staged:
                    staged.bring_back()
            yield
        finally:
            for staged in lent:
                if not staged.is_staged:  # else it could not be read, and is where it was
                    self.keep(staged)
            if not self.is_building:
                self.stage_everything()

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
        """What is written is kept: that of ``modifier_rank``, by default of rank 0, or by ``enable_sanity_checks`` of
        nobody, but refused."""
        owners.check_modifier_rank(modifier_rank, self.collectives.world_size)
        with self.borrow(params):
            before = [param._version for param in params]
            for param in params:
                lend(param, self)
            try:
                yield
            finally:
                for param in params:
                    end_loan(param)
            if modifier_rank is None and self.config.zero_optimization.enable_sanity_checks:
                self._refuse_changes(params, before)
            if modifier_rank:
                for param in params:
                    self._share_changes(param, modifier_rank)

    def _refuse_changes(self, params: Sequence[nn.Parameter], before: Sequence[int]) -> None:
        pairs = zip(params, before, strict=True)
        changed = torch.tensor([param._version != version for param, version in pairs], dtype=torch.uint8, device="cpu")
        self.collectives.max(changed, f"look for changes of {len(params)} gathered parameters")
        for param, flag in zip(params, changed.tolist(), strict=True):
            if flag:
                owners.refuse_write(self, param)

    def _share_changes(self, param: nn.Parameter, source: int) -> None:
        values = flattened(param.detach(), memory_order(param))
        # a copy: a library may hold what it was given a moment longer, on one rank alone; ``is_aliased`` counts that
        sent = values.clone()
        self.collectives.broadcast(
            sent, f"share the changes of {self.staged(param).name} on rank {source}", source=source
        )
        values.copy_(sent)

    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        staged = self.staged(param)
        numel = max(0, min(staged.shard_numel, staged.numel - staged.start))
        arrays.watch_methods()
        return shard_copies.hand_out(self, param, staged.read(staged.start, numel), "ds_tensor")

    def is_persistent(self, param: nn.Parameter) -> bool:
        return False

    def alias(self, param: nn.Parameter) -> torch.Tensor:
        """While the model is being made, a constructor's own: what it keeps of a parameter keeps that in memory."""
        if not self.is_building:
            return access.ShardedAlias.of(param)
        with self.borrow([param]):
            return param.detach()

    def remake(self, param: nn.Parameter) -> nn.Parameter:
        """The user's own again, as long as the other one shares its memory."""
        with self.borrow([param]):
            return torch.Tensor._make_subclass(nn.Parameter, param.detach())

    def layout_of(self, param: nn.Parameter) -> torch.Tensor:
        return self.staged(param).layout

    def gradient_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return access.own_gradient(param)

    def set_gradient(self, param: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.refuse(param, "is staged: it has no gradient", "train with the engine of infinity.initialize()")
        access.drop_gradient(param)

    def set_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """The parameter begins anew with the values given."""
        staged = self.staged(param)
        data = access.memory_of(data)
        staged.discard()
        owners.disown(param)
        placeholder.put(param, data)
        self.adopt(param, staged.name)

    def copy(self, param: nn.Parameter) -> nn.Parameter:
        """A parameter of its own, in memory."""
        with self.borrow([param]):
            return owners.users_class(param)(param.detach().clone(), param.requires_grad)

    def overwrite(self, values: Sequence[tuple[nn.Parameter, owners.Values]]) -> None:
        def write() -> None:
            for param, new in values:
                staged = self.staged(param)
                if staged.is_staged:
                    staged.write(new)
                else:
                    fill(param, new)

        self.collectives.together(write, "write new weights to the staging area")

    def refuse(self, param: nn.Parameter, problem: str, remedy: str) -> NoReturn:
        raise WeightsError(self.staged(param).name, problem, remedy)

    def adopt(self, param: nn.Parameter, name: str) -> None:
        """A module has registered it."""
        self.num_params += 1
        name = f"parameter {self.num_params} under Init, {name} of shape {tuple(param.shape)}"
        self.keep(StagedParam(param, self, name))

    def staged(self, param: nn.Parameter) -> StagedParam:
        found = staged_param(param)
        if found is None:
            raise AssertionError("the parameter is not staged")
        return found

    def _open_daemon_store(self) -> None:
        environment = read_environment()
        place = NodePlace.find(self.collectives, environment)
        connection = DaemonConnection(self.config, environment, self.collectives, place)
        plan = staging_plan(self.config, place.local_world_size)
        self.piece_bytes = plan.frame_bytes
        self.store = self.collectives.together(
            lambda: connection.open(plan, job=f"{connection.job}-init", pinned_mask=0, device=torch.device("cpu")),
            "open a staging area",
        )
        self.connection = connection
        self.arena_bytes = plan.arena_bytes * place.local_world_size


def _end(store: ShardStore, collectives: Collectives, connection: DaemonConnection | None) -> None:
    store.close()
    collectives.close()
    if connection is not None:
        connection.close()


class StagedParam:
    """One parameter of a model under construction; this rank's shard lies in the staging area while it is staged."""

    def __init__(self, param: nn.Parameter, area: StagingArea, name: str) -> None:
        """``name``: of the module that registered it, and its place among all, the same on every rank."""
        # the table below must not keep a model alive that its user dropped
        self._param = weakref.ref(param, partial(_forget, area, id(self)))
        self.area, self.name = area, name
        self.chunks = range(0)
        """Where the store has it, once it has been staged."""
        self._memory: ShardedParam | None = None
        self.is_staged = False
        self._measure()
        _staged[param] = self

    def _measure(self) -> None:
        """How much there is, and which part is this rank's."""
        param, collectives = self.param, self.area.collectives
        self.numel = param.numel()
        self.shard_numel = align_up(-(-self.numel // collectives.world_size), ALIGNMENT)
        self.start = collectives.rank * self.shard_numel
        """First element of this rank's shard in the flattened parameter."""
        self.piece_numel = self.area.piece_bytes // param.element_size()

    @property
    def param(self) -> nn.Parameter:
        param = self._param()
        if param is None:
            raise ReferenceError("the parameter was dropped while it was staged")
        return param

    @property
    def layout(self) -> torch.Tensor:
        """How the parameter lies, on the meta device."""
        return ShardedParam.layout_for(self.param) if self._memory is None else self._memory.layout

    @property
    def is_dropped(self) -> bool:
        """The constructor replaced the parameter (tying does) and nobody holds it any more."""
        return self._param() is None

    @property
    def is_aliased(self) -> bool:
        """Whether somebody keeps a view of the parameter's memory, which must go on following it."""
        return _num_users(self.param) > _num_users(torch.empty(1, device="cpu"))

    def leaving_values(self) -> torch.Tensor:
        """What is to be staged, flattened in memory order."""
        param = self.param
        if self._memory is None or not self._memory.lies_as(param):
            # made only now: a parameter may still be moved, cast or replaced by the constructor that registers it
            self._memory = ShardedParam(0, "", param, param.dtype, param.device)
            # what is in the table of staged parameters must not keep them alive
            self._memory.param = nn.Parameter(self._memory.layout, requires_grad=False)
            self._give_back_chunks()
            self._measure()
        return flattened(param.detach(), self._memory.order)

    def leave(self, values: torch.Tensor) -> None:
        """This rank's shard of ``values``, those of rank 0 as ``leaving_values`` gives them, is staged."""
        if self._memory is None:
            raise AssertionError("nobody has asked for what is to be staged")
        self.write(lambda first, numel: values[first : first + numel])
        owners.adopt(self.param, self.area)
        access.hide(self.param, self._memory.placeholder)
        self.is_staged = True

    def bring_back(self) -> None:
        """The full parameter in memory again, as the user's own."""
        if self._memory is None:
            raise AssertionError("only a staged parameter can be brought back")
        collectives, memory = self.area.collectives, self._memory

        def own() -> tuple[torch.Tensor, torch.Tensor]:
            flat = memory.allocate()
            if collectives.world_size == 1:
                self._read_into(flat, 0)
                return flat, flat
            shard = torch.empty(self.shard_numel, dtype=memory.dtype, device="cpu")
            self._read_into(shard, self.start)
            return torch.empty(collectives.world_size * self.shard_numel, dtype=memory.dtype, device="cpu"), shard

        with outside_inference(), torch.no_grad():
            full, shard = collectives.prepared(own, f"bring back {self.name}")
            if collectives.world_size > 1:
                collectives.all_gather(full, shard)
                memory.allocate().copy_(full[: self.numel])
        param, weights = self.param, memory.full
        if weights is None:
            raise AssertionError("the weights were allocated and are not there")
        access.show(param, weights)
        owners.disown(param)
        memory.drop()  # the parameter has the memory now
        self.is_staged = False

    def read(self, first: int, numel: int) -> torch.Tensor:
        """Elements [first, first + numel) of the parameter flattened in memory order, which this rank's shard holds."""
        values = torch.empty(numel, dtype=self.param.dtype, device="cpu")
        self._read_into(values, first)
        return values

    def _read_into(self, values: torch.Tensor, first: int) -> None:
        """Fill ``values``, 1-D, with the elements from ``first`` on."""
        self.check_kept()
        position, done = first - self.start, 0
        while done < values.numel():
            number, inner = divmod(position + done, self.piece_numel)
            taken = min(values.numel() - done, self.piece_numel - inner)
            with leased(self.area.store, self.chunks[number], read=STAGING) as lease:
                (piece,) = lease.pieces(ObjectKind.STAGING)
                values[done : done + taken].copy_(piece[inner : inner + taken])
            done += taken

    def write(self, values: owners.Values) -> None:
        """This rank's shard, piece by piece, from values of the whole parameter flattened in memory order."""
        for offset, chunk in self._pieces():
            numel = max(0, min(self.piece_numel, self.shard_numel - offset, self.numel - self.start - offset))
            with leased(self.area.store, chunk, write=STAGING) as lease:
                (piece,) = lease.pieces(ObjectKind.STAGING)
                if numel:
                    piece[:numel].copy_(values(self.start + offset, numel))

    def check_kept(self) -> None:
        """Raises WeightsError where nobody has its values any more."""
        if self.area.is_closed:
            problem = "was held by Init until an infinity.initialize() that failed: its values went with that"
            raise WeightsError(self.name, problem, "build the model anew")

    def discard(self) -> None:
        """The parameter begins anew."""
        self._give_back_chunks()
        self.forget()

    def forget(self) -> None:
        """It is staged no more; its chunks are given back by whoever says so."""
        self.area.forget(id(self))
        del _staged[self.param]

    def _give_back_chunks(self) -> None:
        if len(self.chunks):
            self.area.store.unregister(self.chunks)
        self.chunks = range(0)

    def layouts(self) -> Sequence[ChunkLayout]:
        dtypes = {int(ObjectKind.STAGING): self.param.dtype}
        return [
            ChunkLayout(numel=min(self.piece_numel, self.shard_numel - offset), dtypes=dtypes)
            for offset in range(0, self.shard_numel, self.piece_numel)
        ]

    def _pieces(self) -> list[tuple[int, int]]:
        """(offset in the shard, chunk id) of every piece."""
        return [(number * self.piece_numel, chunk) for number, chunk in enumerate(self.chunks)]


def discard(params: Iterable[nn.Parameter]) -> None:
    """An engine has taken the values of those over that are staged. Their chunks go in as few pieces as they lie in."""
    found = [staged for param in params if (staged := staged_param(param)) is not None]
    runs: list[tuple[StagingArea, range]] = []
    for staged in sorted(found, key=lambda staged: (id(staged.area), staged.chunks.start)):
        area, chunks = staged.area, staged.chunks
        if runs and runs[-1][0] is area and runs[-1][1].stop == chunks.start:
            runs[-1] = area, range(runs[-1][1].start, chunks.stop)
        elif chunks:
            runs.append((area, chunks))
        staged.forget()
    for area, chunks in runs:
        area.store.unregister(chunks)


def _forget(area: StagingArea, key: int, _param: weakref.ref[nn.Parameter]) -> None:
    area.forget(key)


_staged: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The StagedParam of an nn.Parameter: how ``initialize`` finds what ``Init`` left."""


def _all_staged() -> list[tuple[nn.Parameter, StagedParam]]:
    return list(_staged.items())  # type: ignore[no-untyped-call]


def staged_param(param: nn.Parameter) -> StagedParam | None:
    """What ``Init`` knows of the parameter; None if it was built without."""
    found: StagedParam | None = _staged[param] if param in _staged else None  # noqa: SIM401 (get is untyped)
    return found


def _num_users(tensor: torch.Tensor) -> int:
    """The users of the tensor's memory, by the same count for all."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
