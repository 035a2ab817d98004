"""One rank's param groups over a strict store: what an engine stands on, without the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.plan.precision import Precision
from infinity.plan.sharding import NORM_BLOCK, ChunkPlacement, GroupPlacement, cut_chunks, place_group
from infinity.tiers.base import ChunkLayout, spans
from infinity.tiers.collectives import Collectives
from infinity.tiers.memory import MemoryStore
from infinity.weights.param import ShardedParam
from infinity.weights.param_group import LeaseAllowance, ParamGroup
from infinity.weights.streams import CopyStream
from io_daemon.shared.protocol import ObjectKind
from tests.support.strict_store import StrictStore

CPU = torch.device("cpu")
ADAM = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
FP32 = Precision(weight=torch.float32, reduce=torch.float32, gradient=torch.float32, master=False, states=ADAM)
BF16 = Precision(weight=torch.bfloat16, reduce=torch.float32, gradient=torch.float32, master=True, states=ADAM)


class SmallShards:
    """``shapes``: of each group's parameters. Weights are 1, 2, 3, ... over all parameters, in order of memory."""

    def __init__(
        self,
        shapes: Sequence[Sequence[tuple[int, ...]]],
        collectives: Collectives | None = None,
        *,
        precision: Precision = FP32,
        chunk_numel: int = NORM_BLOCK,
        piece_numel: int = 1 << 13,
        leases_ahead: int = 2,
        persistent: Sequence[int] = (),
        frozen: Sequence[int] = (),
        lent_to: MemoryStore | None = None,
    ) -> None:
        self.lent_to = lent_to
        self.collectives = Collectives(None) if collectives is None else collectives
        self.precision = precision
        self.store = StrictStore(piece_numel)
        self.allowance = LeaseAllowance(leases_ahead)
        self.placements: list[GroupPlacement] = []
        self.chunks: list[ChunkPlacement] = []
        self.params: list[ShardedParam] = []
        self.groups: list[ParamGroup] = []
        for number, group_shapes in enumerate(shapes):
            self._add_group(
                number, group_shapes, chunk_numel, persistent=number in persistent, trainable=number not in frozen
            )

    @property
    def full(self) -> list[torch.Tensor]:
        """Weights of every parameter, flat."""
        values, first = [], 1
        for param in self.params:
            values.append(torch.arange(first, first + param.numel, dtype=torch.float32).to(self.precision.weight))
            first += param.numel
        return values

    @property
    def trained(self) -> list[tuple[list[int], list[int]]]:
        """Parameters and chunks of each group that is trained."""
        return [
            ([param.index for param in group.params], [chunk for chunk, _ in group.chunks])
            for group in self.groups
            if group.placement.trainable
        ]

    def write_weights(self) -> None:
        """Into the store: WEIGHT and MASTER, of these what it has."""
        full = self.full
        kept = [ObjectKind.WEIGHT] if self.precision.keeps_weights else []
        kinds = [*kept, *([ObjectKind.MASTER] if self.precision.master else [])]
        for chunk, placement in enumerate(self.chunks):
            for kind in kinds:
                for segment in placement.segments:
                    values = full[segment.param][segment.param_offset : segment.param_offset + segment.numel]
                    self.part(chunk, kind, segment.chunk_offset, segment.numel).copy_(values)

    def part(self, chunk: int, kind: int, offset: int, numel: int) -> torch.Tensor:
        ((_, view),) = spans([self.store.object(chunk, kind)], offset, numel)
        return view

    def _add_group(
        self, number: int, shapes: Sequence[tuple[int, ...]], chunk_numel: int, *, persistent: bool, trainable: bool
    ) -> None:
        params = [
            ShardedParam(index, f"p{index}", _param(shape, trainable), self.precision.weight, CPU)
            for index, shape in enumerate(shapes, start=len(self.params))
        ]
        placement = place_group(
            number,
            [(param.index, param.numel) for param in params],
            world_size=self.collectives.world_size,
            trainable=trainable,
        )
        cut = cut_chunks(placement, rank=self.collectives.rank, chunk_numel=chunk_numel)
        dtypes = self.precision.dtypes(trainable=trainable)
        ids = self.store.register([ChunkLayout(numel=chunk.numel, dtypes=dtypes) for chunk in cut])
        self.chunks += cut
        self.placements.append(placement)
        self.params += params
        self.groups.append(
            ParamGroup(
                placement,
                params,
                list(zip(ids, cut, strict=True)),
                store=self.store,
                collectives=self.collectives,
                allowance=self.allowance,
                copies=CopyStream(CPU),
                dtype=self.precision.weight,
                reduce_dtype=self.precision.reduce,
                persistent=persistent,
                home=self.precision.home(trainable=trainable),
                updated_in_place=trainable and self.precision.rounds_in_place,
                name=f"group {number}",
                lent_to=self.lent_to,
            )
        )


def _param(shape: tuple[int, ...], trainable: bool) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=trainable)
