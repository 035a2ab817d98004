"""``Init``: build a model larger than memory. Parameters are staged out as the model grows.

A bounded set of parameters, the ones touched last, keeps its memory; the others wait in the store as shards of kind
STAGING. Any torch operation that takes a staged parameter (``nn.init.normal_(self.weight)``, ``self.apply(...)``)
brings it back first, and what is brought back is written out again when its turn comes. So constructors run unchanged,
draw the same random numbers in the same order, and give the same model.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from infinity.config import Config, parse_config, read_environment
from infinity.errors import BudgetError
from infinity.plan.memory_plan import MemoryPlan
from infinity.plan.sharding import ALIGNMENT
from infinity.tiers.base import ChunkLayout, ShardStore
from infinity.tiers.collectives import Collectives
from infinity.tiers.connection import DaemonConnection, NodePlace
from infinity.tiers.memory import MemoryStore
from infinity.weights.heap import RETURNED_NUMEL_MIN, return_freed
from infinity.weights.hooks import AccessGuard, unguarded
from infinity.weights.param import ShardedParam
from io_daemon.shared.protocol import PAGE_BYTES, ObjectKind, align_up

STAGING_FRAMES: Final = 8
STAGING_BYTES_MAX: Final = 64 << 20
STAGING_BUDGET_SHARE: Final = 8
"""The staging arena takes 1/n of the host budget; the engine's arena gets the rest, so that the sum stays inside."""
STAGING_CHUNKS_MAX: Final = 1 << 18
STAGING: Final = ObjectKind.STAGING.mask


class StagingArea:
    """The store behind one ``Init``, and what it needs to outlive the context until ``initialize``."""

    def __init__(self, config: Config, collectives: Collectives) -> None:
        """Collective over the ranks of ``collectives``, which become the area's own."""
        self.config = config
        self.collectives = collectives
        self.connection: DaemonConnection | None = None
        self.arena_bytes = 0
        """Of all ranks of the job on this node: to be left out of the engine's budget."""
        self.num_params = 0
        """Parameters that were registered so far; the same on every rank."""
        self.store: ShardStore = MemoryStore(torch.device("cpu"))
        self.piece_bytes = STAGING_BYTES_MAX // STAGING_FRAMES
        zero = config.zero_optimization
        if "nvme" in (zero.offload_param.device, zero.offload_optimizer.device):
            self._open_daemon_store()

    def next_number(self) -> int:
        self.num_params += 1
        return self.num_params

    def close_store(self) -> None:
        """Remove the staged shards. The connection stays: the engine goes on with it."""
        self.store.close()
        self.collectives.close()

    def close(self) -> None:
        """No engine will take over: end the private daemon too."""
        self.close_store()
        if self.connection is not None:
            self.connection.close()

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


def staging_plan(config: Config, local_world_size: int) -> MemoryPlan:
    """The arena of one rank's staging area; ``initialize`` leaves it out of the engine's budget."""
    share = config.io_daemon.host_budget_bytes // STAGING_BUDGET_SHARE // local_world_size
    piece_bytes = max(PAGE_BYTES, min(share, STAGING_BYTES_MAX) // STAGING_FRAMES // PAGE_BYTES * PAGE_BYTES)
    return MemoryPlan(
        chunk_numel=piece_bytes,
        frame_bytes=piece_bytes,
        num_frames=STAGING_FRAMES,
        pinned_frames=0,
        demand_frames=1,
        swap_bytes=0,
        chunks_max=STAGING_CHUNKS_MAX,
    )


def budget_beside(staging_bytes: int, config: Config) -> int:
    """Of the host budget, what is left for the engines' arenas beside ``staging_bytes`` of the node's ranks.

    Raises BudgetError if nothing is.
    """
    budget_bytes = config.io_daemon.host_budget_bytes
    if staging_bytes >= budget_bytes:
        raise BudgetError(
            key="io_daemon.host_budget_bytes",
            budget_bytes=budget_bytes,
            smallest_bytes=2 * staging_bytes,
            reason=f"models under construction have {staging_bytes} bytes of staging arenas",
        )
    return budget_bytes - staging_bytes


class StagedParam:
    """One parameter of a model under construction; this rank's shard lies in the staging area while it is staged."""

    def __init__(self, param: nn.Parameter, area: StagingArea, name: str) -> None:
        self._param = weakref.ref(param)  # the registry below must not keep a model alive that its user dropped
        self.area = area
        self.name = f"parameter {area.next_number()} under Init, {name} of shape {tuple(param.shape)}"
        self.numel = param.numel()
        self.shard_numel = align_up(-(-self.numel // area.collectives.world_size), ALIGNMENT)
        self.start = area.collectives.rank * self.shard_numel
        """First element of this rank's shard in the flattened parameter."""
        self.piece_numel = area.piece_bytes // param.element_size()
        self._chunks = range(0)
        self._memory: ShardedParam | None = None
        self.is_staged = False

    @property
    def param(self) -> nn.Parameter:
        param = self._param()
        if param is None:
            raise ReferenceError("the parameter was dropped while it was staged")
        return param

    @property
    def is_dropped(self) -> bool:
        """The constructor replaced the parameter (tying does) and nobody holds it any more."""
        return self._param() is None

    def stage_out(self) -> None:
        """Rank 0's values become every rank's; each keeps its shard only."""
        values = self.param.detach().reshape(-1).contiguous()
        self.area.collectives.broadcast(values, f"stage out {self.name}")
        if self._memory is None:
            # made only now: a parameter may still be moved or cast by the constructor that registers it
            self._memory = ShardedParam(0, "", self.param, self.param.dtype, self.param.device)
            self._chunks = self.area.store.register(self._layouts())
        for offset, chunk in self._pieces():
            numel = max(0, min(self.piece_numel, self.shard_numel - offset, self.numel - self.start - offset))
            lease = self.area.store.acquire(chunk, write=STAGING)
            lease.wait()
            (piece,) = lease.pieces(ObjectKind.STAGING)
            piece[:numel].copy_(values[self.start + offset : self.start + offset + numel])
            lease.release(dirty=STAGING)
        del values
        self._memory.to_sharded(poison=False)
        self.is_staged = True
        if self.numel >= RETURNED_NUMEL_MIN:
            return_freed()

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the parameter was written to after ``Init`` ended: that would be lost."""
        if self._memory is not None and self._memory.is_changed:
            self._memory.refuse_change()

    def bring_back(self) -> None:
        """The full parameter in memory again."""
        if self._memory is None:
            raise AssertionError("only a staged parameter can be brought back")
        collectives = self.area.collectives
        agreement = collectives.agree(f"bring back {self.name}")
        shard = torch.zeros(self.shard_numel, dtype=self.param.dtype)
        for offset, _ in self._pieces():
            numel = min(self.piece_numel, self.shard_numel - offset)
            shard[offset : offset + numel].copy_(self.read(self.start + offset, numel))
        full = torch.empty(collectives.world_size * self.shard_numel, dtype=self.param.dtype)
        agreement.wait()
        collectives.all_gather(full, shard)
        self._memory.allocate().copy_(full[: self.numel])
        self._memory.to_unsharded()
        self.is_staged = False

    def read(self, first: int, numel: int) -> torch.Tensor:
        """Elements [first, first + numel) of the flattened parameter, which this rank's shard must hold."""
        parts = []
        position, stop = first - self.start, first - self.start + numel
        while position < stop:
            number, inner = divmod(position, self.piece_numel)
            taken = min(stop - position, self.piece_numel - inner)
            lease = self.area.store.acquire(self._chunks[number], read=STAGING)
            lease.wait()
            (piece,) = lease.pieces(ObjectKind.STAGING)
            parts.append(piece[inner : inner + taken].clone())
            lease.release()
            position += taken
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def discard(self) -> None:
        """The engine has taken the values over."""
        if len(self._chunks):
            self.area.store.unregister(self._chunks)
        self._chunks = range(0)
        del _staged[self.param]

    def _layouts(self) -> Sequence[ChunkLayout]:
        dtypes = {int(ObjectKind.STAGING): self.param.dtype}
        return [
            ChunkLayout(numel=min(self.piece_numel, self.shard_numel - offset), dtypes=dtypes)
            for offset in range(0, self.shard_numel, self.piece_numel)
        ]

    def _pieces(self) -> list[tuple[int, int]]:
        """(offset in the shard, chunk id) of every piece."""
        return [(number * self.piece_numel, chunk) for number, chunk in enumerate(self._chunks)]


_staged: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""nn.Parameter -> StagedParam: how ``initialize`` finds what ``Init`` left."""


def staged_param(param: nn.Parameter) -> StagedParam | None:
    """What ``Init`` knows of the parameter; None if it was built without."""
    found: StagedParam | None = _staged[param] if param in _staged else None  # noqa: SIM401 (get is untyped)
    return found


class Init:
    """Context manager: every parameter created inside is sharded, and offloaded as the config says, as it is built.

    Args:
        config_dict_or_path: the same configuration that ``initialize`` gets.
        process_group: the ranks that share the model; by default all, whom this starts torch.distributed for where
            RANK and WORLD_SIZE are set and nobody has.

    Lazy parameters are refused when they are registered. Collective: every rank runs the same constructors.
    """

    def __init__(
        self,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._config_source, self._process_group = config_dict_or_path, process_group
        self._stack = ExitStack()
        self._in_memory: OrderedDict[int, StagedParam] = OrderedDict()
        self._area: StagingArea | None = None
        self._numel_max = 0

    def __enter__(self) -> Init:
        collectives = Collectives.join(self._process_group)
        try:
            config = parse_config(self._config_source, world_size=collectives.world_size)
            self._area = StagingArea(config, collectives)
        except BaseException:
            collectives.close()
            raise
        self._numel_max = config.zero_optimization.stage3_prefetch_bucket_size
        guard = AccessGuard(lambda p: staged_param(p) is not None, self._touch)
        hook = register_module_parameter_registration_hook(self._registered)
        self._stack.callback(hook.remove)
        self._stack.enter_context(guard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._stack.close()
        if error is None:
            self._evict(keep=frozenset(), numel_max=-1)
        elif self._area is not None:
            self._area.close()

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or staged_param(param) is not None or param.device.type == "meta":
            return
        if is_lazy(param):
            raise TypeError(f"{type(module).__name__}.{name} is lazy: its shape must be known to be sharded")
        if self._area is None:
            raise AssertionError("registered outside the context")
        staged = StagedParam(param, self._area, f"{type(module).__name__}.{name}")
        _staged[param] = staged
        self._keep(staged)

    def _touch(self, params: Sequence[nn.Parameter]) -> None:
        touched = [staged for param in params if (staged := staged_param(param)) is not None]
        keep = frozenset(id(staged) for staged in touched)
        for staged in touched:
            if staged.is_staged:
                staged.bring_back()
            self._keep(staged, keep)

    def _keep(self, staged: StagedParam, keep: frozenset[int] = frozenset()) -> None:
        self._in_memory[id(staged)] = staged
        self._in_memory.move_to_end(id(staged))
        self._evict(keep=keep | {id(staged)}, numel_max=self._numel_max)

    def _evict(self, *, keep: frozenset[int], numel_max: int) -> None:
        for key in [key for key, staged in self._in_memory.items() if staged.is_dropped]:
            del self._in_memory[key]
        numel = sum(staged.numel for staged in self._in_memory.values())
        for key, staged in list(self._in_memory.items()):
            if numel <= numel_max:
                return
            if key not in keep:
                with unguarded():
                    staged.stage_out()
                del self._in_memory[key]
                numel -= staged.numel
