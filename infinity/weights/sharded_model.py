"""A model cut up: parameters to groups, shards to chunks, chunks to a store, and the initial values written there.

This is the road from a model that the user built, plainly or under ``Init``, to what the engine runs. After it no
parameter holds its weights; the module, its buffers and its Parameter objects stay the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Final

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.files.pieces import pieces
from infinity.plan.grouping import GroupMembers, group_params
from infinity.plan.leaves import is_leaf
from infinity.plan.memory_plan import DEVICE_LARGE_NUMEL, LARGE_NUMEL, MemoryPlan, StateShape, plan_memory
from infinity.plan.precision import FP32, STATES_MASK, Precision, Tiers, dtype_beside
from infinity.plan.registered import modules, named_parameters, parameters
from infinity.plan.sharding import NORM_BLOCK, ChunkPlacement, GroupPlacement, Segment, cut_chunks, place_group
from infinity.plan.stage import Reduction, StagePolicy
from infinity.tiers.base import ChunkLayout, HostStore, HostTier, ShardStore, is_beside, leased, spans
from infinity.tiers.collectives import Collectives
from infinity.tiers.connection import NodePlace
from infinity.tiers.due import DueStore
from infinity.tiers.halved import HalvedStore
from infinity.tiers.layers import PoisonStore, SplitStore, TracedStore
from infinity.tiers.memory import MemoryStore
from infinity.tiers.narrowed import NarrowedStore
from infinity.tiers.pool import ALIGNMENT_BYTES, MemoryPool
from infinity.tiers.remade import RemadeStore
from infinity.tiers.snapshot import SnapshotStore
from infinity.tiers.under_way import UnderWay
from infinity.weights import access
from infinity.weights.admission import admit
from infinity.weights.param import ShardedParam
from infinity.weights.param_group import LeaseAllowance, ParamGroup
from infinity.weights.streams import CopyStream
from io_daemon.shared.protocol import LEASES_MAX, ObjectKind, align_up

ValuesOf = Callable[[ShardedParam, int, int], torch.Tensor]
"""(parameter, first element, numel) -> initial values of that part of the parameter, flattened in memory order, 1-D."""

UNITS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch's that use their children's weights, and take another path where they are not plain parameters; so
does ``nn.TransformerEncoder``, of its first layer alone."""

LEASE_SHARE: Final = 4
"""Leases held ahead take at most this fraction (1/n) of the streamed frames; the rest stays for demand."""

LEASES_AHEAD_MAX: Final = LEASES_MAX // 2
"""... and are no more than this, whatever the frames: a daemon refuses a rank that asks for more than it remembers."""

SUB_GROUPS_AHEAD_MAX: Final = 4

AHEAD_CHUNKS_MAX: Final = 32
"""Chunks read ahead of who goes through all of them: a busy machine lets a process wait for milliseconds, and the
drive goes on."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything about placement that is decided before any byte moves."""

    members: Sequence[GroupMembers]
    placements: Sequence[GroupPlacement]
    params: Sequence[nn.Parameter]
    index_of: dict[int, int]
    """Index of a parameter by its id()."""
    names: Sequence[str]
    modules: Sequence[nn.Module]
    trains: bool

    @classmethod
    def of(cls, model: nn.Module, config: Config, world_size: int, *, trains: bool = True) -> Layout:
        """``trains``: false of an engine without an optimizer. To it every parameter is as good as frozen, but for
        those that it would keep in 16 bits and that may be trained later: of these it has masters, too."""
        zero = config.zero_optimization
        policy, precision = StagePolicy.of(config), Precision.of(config)
        admit(model, precision.weight, trains=trains)
        named = list(named_parameters(model))
        index_of = {id(param): index for index, (_, param) in enumerate(named)}
        members = group_params(
            model,
            numel_max=min(zero.stage3_prefetch_bucket_size, max(zero.stage3_max_live_parameters, 1)),
            persistent_numel_max=zero.stage3_param_persistence_threshold if policy.shards_weights else None,
            persistent_total_max=zero.stage3_model_persistence_threshold if policy.shards_weights else None,
            bucket_numel=zero.reduce_bucket_size,
            dtype_of=lambda p: dtype_beside(precision.weight, p.dtype, trainable=trains and p.requires_grad),
        )
        if not trains:
            rounds = precision.master and any(param.dtype is FP32 for param in parameters(model))
            members = [
                replace(group, trainable=group.trainable and rounds and group.dtype is precision.weight)
                for group in members
            ]
        placements = [
            place_group(
                number,
                [(index_of[id(p)], p.numel()) for p in group.params],
                world_size=world_size if policy.shards_states else 1,
                trainable=group.trainable,
            )
            for number, group in enumerate(members)
        ]
        params = [param for _, param in named]
        return cls(
            members=members,
            placements=placements,
            params=params,
            index_of=index_of,
            names=[name for name, _ in named],
            modules=list(modules(model)),
            trains=trains,
        )

    def description(self) -> list[str]:
        """Everything that ranks must have alike, one line a parameter in its place."""
        return [
            f"{self.names[p.param]} {tuple(self.params[p.param].shape)} {self.params[p.param].dtype} in group "
            f"{placement.index}, {'trained' if placement.trainable else 'frozen'}"
            for placement in self.placements
            for p in placement.params
        ]

    def dtypes(self) -> dict[int, torch.dtype]:
        """What each parameter's weight is here, by its index."""
        pairs = zip(self.members, self.placements, strict=True)
        return {param.param: members.dtype for members, placement in pairs for param in placement.params}

    @property
    def gradients_numel(self) -> int:
        """Elements of this rank's gradients."""
        return sum(placement.shard_numel for placement in self.placements if placement.trainable)

    def largest_chunk(self, *numels_max: int) -> int:
        """The numel of a chunk that holds this rank's shard of any group, if none of these limits is less."""
        largest = max((placement.shard_numel for placement in self.placements), default=0)
        return max(NORM_BLOCK, min(align_up(largest, NORM_BLOCK), *numels_max) // NORM_BLOCK * NORM_BLOCK)

    def gradients_stay(self, config: Config, precision: Precision) -> bool:
        """Whether gradients wait for their update on the device although states stream: where all weights and this
        rank's gradients are within what may be live, and kept until backward. That gives gradients as it lets go of
        weights, whose memory they take."""
        zero = config.zero_optimization
        if not StagePolicy.of(config).shards_weights or zero.offload_optimizer.device != "nvme":
            return False
        weights = sum(placement.numel for placement in self.placements)
        num_bytes = weights * precision.weight.itemsize + self.gradients_numel * precision.gradient.itemsize
        kept = min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
        return num_bytes <= kept * precision.weight.itemsize

    def state_shape(self, precision: Precision, tiers: Tiers) -> StateShape:
        stored = precision.stored_bytes(precision.dtypes(trainable=True) | precision.dtypes(trainable=False))
        return StateShape(
            group_shard_numels=[placement.shard_numel for placement in self.placements],
            group_trainable=[placement.trainable for placement in self.placements],
            group_weight_bytes=[members.dtype.itemsize for members in self.members],
            itemsizes={k: size for k, size in stored.items() if tiers.host_mask >> k & 1},
            trained_mask=~ObjectKind.WEIGHT.mask,
            frozen_mask=0 if precision.keeps_weights else ObjectKind.WEIGHT.mask,
            pinned_mask=tiers.pinned_mask,
            ratio=tiers.ratio,
        )


def _planned(
    layout: Layout,
    config: Config,
    precision: Precision,
    tiers: Tiers,
    *,
    budget_bytes: int,
    local_world_size: int,
    device: torch.device,
) -> tuple[Precision, MemoryPlan]:
    """The plan of the arena; where nothing is in one, of one with room for everything. It is without weights beside
    masters, and so is the precision, where that pays and everything is in memory then."""

    def plan_of(precision: Precision) -> MemoryPlan:
        numel_max = config.zero_optimization.sub_group_size
        if not tiers.host_mask:
            shape = layout.state_shape(precision, Tiers(device_mask=0, pinned_mask=~0, nvme_mask=0))
            plan = plan_memory(shape, budget_bytes=None, chunk_numel_max=numel_max, local_world_size=1, budget_key="")
            if is_beside(device):
                plan = replace(plan, chunk_numel=layout.largest_chunk(numel_max, DEVICE_LARGE_NUMEL))
            return plan
        return plan_memory(
            layout.state_shape(precision, tiers),
            budget_bytes=budget_bytes,
            chunk_numel_max=numel_max,
            local_world_size=local_world_size,
            budget_key="io_daemon.host_budget_bytes",
            large_numel=DEVICE_LARGE_NUMEL if is_beside(device) else LARGE_NUMEL,
        )

    # of one gather a step; and another device is to be sent no more than what it computes with
    if not is_beside(device) and not config.accumulates and precision.may_round_gathers(tiers):
        rounding = replace(precision, keeps_weights=False)
        try:
            plan = plan_of(rounding)
        except BudgetError:
            if not tiers.nvme_mask:
                raise
        else:
            if plan.holds_all:
                return rounding, plan
    return precision, plan_of(precision)


class ShardedModel:
    def __init__(
        self,
        layout: Layout,
        *,
        config: Config,
        precision: Precision,
        collectives: Collectives,
        device: torch.device,
        place: NodePlace,
        tier: HostTier | None,
        budget_bytes: int,
        poison: bool,
        spare_bytes: int = 0,
    ) -> None:
        """Plan, open the store, register every chunk: after this, memory and disk space are reserved.

        Args:
            spare_bytes: if any, this rank will free so much disk space until ``reserve``, which comes then.

        Raises BudgetError, SwapSpaceError or ConfigError with the numbers, on every rank.
        """
        self.layout = layout
        self._collectives, self._device = collectives, device
        self.policy = StagePolicy.of(config)
        self.sharers = collectives if self.policy.shards_states else Collectives(None)
        """The ranks that have a shard each of what is sharded; at stage 0 every rank has everything."""
        collectives.follow(self.policy)
        # another device's memory is scarce, and gradients leave it beside the computation
        gradients_stay = not is_beside(device) and layout.gradients_stay(config, precision)
        tiers = Tiers.of(config, precision, gradients_stay=gradients_stay)
        self.precision, plan = _planned(
            layout,
            config,
            precision,
            tiers,
            budget_bytes=budget_bytes,
            local_world_size=place.local_world_size,
            device=device,
        )
        self.plan = plan if tiers.host_mask else None
        self.chunks: list[ChunkPlacement] = [
            chunk
            for placement in layout.placements
            for chunk in cut_chunks(placement, rank=self.sharers.rank, chunk_numel=plan.chunk_numel)
        ]
        self.remade: frozenset[int] = frozenset()
        """Chunks whose weights can be given up, and are made anew of their masters."""
        self.makes_each = config.io_daemon.update_in_backward and not config.accumulates
        """Whether weights are made of their masters for each read of a training step, and none are kept: of two reads,
        one comes right before an update that reads the masters, too."""
        self._makes_weights: Callable[[int], bool] = lambda _chunk: False
        """Whether a lease on a chunk's weights takes its masters, too."""
        masks = [0xFF] * len(self.chunks)
        if self.plan is not None:
            masks = tiers.device_masks((chunk.numel, self._is_trained(chunk)) for chunk in self.chunks)
        self._device_mask = reduce(or_, masks, 0)
        self.stepped_on = self._stepped_on(tiers)
        take_turns = ObjectKind.GRAD.mask if gradients_stay else 0  # with weights, when these go
        turns_bytes = self._store_bytes([mask & take_turns for mask in masks])
        kept_bytes = self._store_bytes([mask & ~take_turns for mask in masks])
        self.pool = MemoryPool(self._pool_bytes(config) + turns_bytes, device, poison=poison)
        self.device_store = MemoryStore(
            device,
            MemoryPool(kept_bytes, device),
            pools={ObjectKind.GRAD: self.pool} if gradients_stay else {},
        )
        self.copies, self.under_way = CopyStream(device), UnderWay()
        self.store = collectives.together(
            lambda: self._open_store(tiers, masks, tier, poison, spare_bytes), "open the store of shards"
        )
        self.resident: dict[int, ShardedParam] = {}
        """Parameters whose weights are on the device now, by the identity of their storage."""
        self.left_behind: dict[int, ShardedParam] = {}
        """... and those whose weights have left a memory that somebody has still."""
        dtypes = layout.dtypes()
        self.params = [
            ShardedParam(index, name, param, dtypes[index], device, self.resident, self.pool, self.left_behind)
            for index, (name, param) in enumerate(zip(layout.names, layout.params, strict=True))
        ]
        self.groups = self._build_groups()
        self.group_of = {param.index: group for group in self.groups for param in group.params}
        """The group of a parameter by its index."""
        self.anchors: dict[nn.Module, list[ParamGroup]] = {}
        for members, group in zip(layout.members, self.groups, strict=True):
            if members.anchor is not None:
                self.anchors.setdefault(members.anchor, []).append(group)
        self.given_gradients: dict[int, torch.Tensor] = {}
        """By the parameter's index what was in ``param.grad`` before: torch's next backward would add to it."""
        self.units = frozenset(module for module in layout.modules if isinstance(module, UNITS))
        self.leaves = {anchor: groups for anchor, groups in self.anchors.items() if is_leaf(anchor)}

    def _stepped_on(self, tiers: Tiers) -> torch.device | None:
        """Where the optimizer steps; None: some chunks on the device, and others on the CPU."""
        kinds = (tiers.device_mask | tiers.host_mask) & STATES_MASK
        states = kinds & ~ObjectKind.GRAD.mask or kinds
        if not is_beside(self._device) or not tiers.host_mask & states:
            return self._device
        return torch.device("cpu") if tiers.ratio == 1 else None

    def reserve(self) -> None:
        """Reserve the disk space that was only looked for. Raises SwapSpaceError."""
        if self.host_store is not None:
            self.host_store.reserve()

    def write_initial(self, values_of: ValuesOf) -> None:
        """Write weights and master weights, and take each parameter's own memory away as it is done."""
        for group in self.groups:
            for chunk_id, chunk in group.chunks:
                self._write_chunk(chunk_id, chunk, values_of)
            for param in group.params:
                gradient = access.take_gradient(param.param)
                if gradient is not None and group.placement.trainable:
                    self.given_gradients[param.index] = gradient
                access.hide(param.param, param.placeholder)

    def weights_of(self, segment: Segment) -> torch.Tensor:
        """Where the segment's whole weights are, 1-D, to be written."""
        return self.params[segment.param].allocate()[segment.param_offset : segment.param_offset + segment.numel]

    @property
    def sub_groups_ahead(self) -> int:
        """Chunks whose leases the update issues while it steps one, within a quarter of the streamed frames."""
        return max(1, min(SUB_GROUPS_AHEAD_MAX, self._demand_sets // LEASE_SHARE))

    @property
    def chunks_ahead(self) -> int:
        """Chunks whose leases are issued ahead by who alone goes through all of them: half of the streamed frames."""
        return max(1, min(AHEAD_CHUNKS_MAX, self._demand_sets // 2))

    @property
    def _demand_sets(self) -> int:
        """How often the streamed frames hold what one chunk may ask for; 0 where nothing is streamed."""
        if self.plan is None or self.plan.demand_frames == 0:
            return 0
        return (self.plan.num_frames - self.plan.pinned_frames) // self.plan.demand_frames

    def _pool_bytes(self, config: Config) -> int:
        """The pool holds all weights that are live at a time; with several ranks also what gathers a group."""
        pairs = zip(self.layout.members, self.layout.placements, strict=True)
        passing = [placement.numel for members, placement in pairs if not members.persistent]
        passing_max = config.zero_optimization.stage3_max_live_parameters + max(passing, default=0)
        staying = sum(placement.numel for placement in self.layout.placements) - sum(passing)
        live = staying + min(sum(passing), passing_max)
        num_bytes = live * self.precision.weight.itemsize + len(self.layout.params) * ALIGNMENT_BYTES
        if self._collectives.world_size > 1:
            largest = max((p.shard_numel for p in self.layout.placements), default=0) * self._collectives.world_size
            num_bytes += 2 * largest * self.precision.reduce.itemsize
        return num_bytes

    def _store_bytes(self, masks: Sequence[int]) -> int:
        """What the chunks keep of the kinds in ``masks``, and a quarter more: gradients come and go in two orders, and
        leave holes. What nobody touches is address space."""
        num_bytes = 0
        for mask, chunk in zip(masks, self.chunks, strict=True):
            sizes = self.precision.stored_bytes(self.dtypes_of(chunk.group))
            num_bytes += int(chunk.numel * sum(size for kind, size in sizes.items() if mask >> kind & 1))
        return num_bytes * 5 // 4 + len(self.chunks) * ALIGNMENT_BYTES

    def _open_store(
        self, tiers: Tiers, masks: Sequence[int], tier: HostTier | None, poison: bool, spare_bytes: int
    ) -> DueStore:
        if self.plan is not None and not self.plan.holds_all and self.precision.remakes(tiers):
            # not of masters on the device, which users may offload
            pairs = enumerate(zip(self.chunks, masks, strict=True))
            self.remade = frozenset(i for i, (c, m) in pairs if self._is_trained(c) and not m & ObjectKind.MASTER.mask)
        store: ShardStore = self.device_store
        self.host_store: HostStore | None = None
        if self.plan is not None:
            if tier is None:
                raise AssertionError("a plan for the host needs a tier")
            host = tier.open(
                self.plan,
                job=tier.job,
                pinned_mask=tiers.pinned_mask,
                device=self._device,
                spare_bytes=spare_bytes,
            )
            if self.copies.is_beside:
                host.relieve_by(self.under_way.end_all)
            store = SplitStore(store, host, masks) if any(masks) else host
            self.host_store = host
        if self.precision.narrows:
            store = NarrowedStore(store, self.precision.narrows)
        if self.precision.markers is not None:
            store = HalvedStore(store, self.precision.markers)
        store = snapshots = SnapshotStore(store, self.under_way.end_all)
        if self.remade:
            store = made = RemadeStore(snapshots, self.remade)
            self._makes_weights = made.is_given_up
        traced = PoisonStore(store) if poison else TracedStore(store)
        stacked = DueStore(traced, snapshots, num_ahead=self.sub_groups_ahead, under_way=self.under_way)
        try:
            chunks = stacked.register([self._chunk_layout(chunk) for chunk in self.chunks])
        except BaseException:
            stacked.close()
            raise
        if chunks != range(len(self.chunks)):
            raise AssertionError(f"a fresh store numbers its chunks {chunks}")
        return stacked

    def refuse_away(self, kinds: int) -> None:
        """Raises EngineStateError if one of these kinds was offloaded by the user, also where this rank has no part."""
        self.device_store.refuse_away(kinds & self._device_mask)

    def on_device(self, kinds: int) -> int:
        """Those of the kinds that have objects on the device now: the others are in host memory, or on disk."""
        return kinds & self._device_mask & ~self.device_store.away

    def _chunk_layout(self, chunk: ChunkPlacement) -> ChunkLayout:
        return ChunkLayout(numel=chunk.numel, dtypes=self.dtypes_of(chunk.group))

    def dtypes_of(self, group: int) -> dict[int, torch.dtype]:
        """dtype by object kind of what the group of that index has."""
        trainable, weight = self.layout.placements[group].trainable, self.layout.members[group].dtype
        return self.precision.dtypes(trainable=trainable, weight=weight)

    def _is_trained(self, chunk: ChunkPlacement) -> bool:
        return self.layout.placements[chunk.group].trainable

    def _build_groups(self) -> list[ParamGroup]:
        streamed = self.plan.num_frames - self.plan.pinned_frames if self.plan else len(self.chunks) * LEASE_SHARE
        due_frames = self.plan.demand_frames if self.plan else 1
        weight_bytes = self.precision.weight.itemsize
        frame_itemsize = self.plan.frame_bytes // self.plan.chunk_numel if self.plan else weight_bytes

        def frames_in(chunk: int, kind: ObjectKind) -> int:
            return -(-self.dtypes_of(self.chunks[chunk].group)[kind].itemsize // frame_itemsize)

        def frames_of(chunk: int) -> int:
            if self.store.is_due(chunk):
                return due_frames
            home = self.precision.home(trainable=self._is_trained(self.chunks[chunk]))
            beside = frames_in(chunk, ObjectKind.MASTER) if self._makes_weights(chunk) else 0
            return frames_in(chunk, home) + beside

        allowance = LeaseAllowance(max(0, min(streamed // LEASE_SHARE, LEASES_AHEAD_MAX)), frames_of)
        chunks_of: list[list[tuple[int, ChunkPlacement]]] = [[] for _ in self.layout.placements]
        for chunk_id, chunk in enumerate(self.chunks):
            chunks_of[chunk.group].append((chunk_id, chunk))
        return [
            ParamGroup(
                placement,
                [self.params[param.param] for param in placement.params],
                chunks_of[placement.index],
                store=self.store,
                collectives=self.sharers,
                reductions=self._collectives,
                all_reduces=self.policy.reduction is Reduction.ALL_REDUCE,
                allowance=allowance,
                copies=self.copies,
                under_way=self.under_way,
                dtype=members.dtype,
                reduce_dtype=self.precision.reduce,
                home=self.precision.home(trainable=placement.trainable),
                updated_in_place=placement.trainable and self.precision.rounds_in_place,
                persistent=members.persistent,
                name=members.name,
                pool=self.pool,
                remade=self.remade,
                lent_to=self.device_store if self.precision.lies_in_params(trainable=placement.trainable) else None,
            )
            for placement, members in zip(self.layout.placements, self.layout.members, strict=True)
        ]

    def _write_chunk(self, chunk_id: int, chunk: ChunkPlacement, values_of: ValuesOf) -> None:
        has = self.dtypes_of(chunk.group)
        kinds = [kind for kind in (ObjectKind.WEIGHT, ObjectKind.MASTER) if kind in has]
        mask = sum(kind.mask for kind in kinds)
        with leased(self.store, chunk_id, write=mask) as lease:
            for segment in chunk.segments:
                for first, numel in pieces(segment.numel):
                    values = self._values(segment, first, numel, values_of)
                    for kind in kinds:
                        for start, target in spans(lease.pieces(kind), segment.chunk_offset + first, numel):
                            target.copy_(values[start : start + target.numel()])

    def _values(self, segment: Segment, first: int, numel: int, values_of: ValuesOf) -> torch.Tensor:
        values = values_of(self.params[segment.param], segment.param_offset + first, numel)
        return values.to(FP32) if self.precision.master else values
