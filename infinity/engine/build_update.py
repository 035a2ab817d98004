"""The update of an engine's chunks: one sub-group a trainable chunk, over the runtime's store and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.config import Config
from infinity.engine.runtime import Runtime
from infinity.update.loss_scale import loss_scale_of
from infinity.update.optimizer import ShardedOptimizer
from infinity.update.rounding import Rounding
from infinity.update.scratch import Scratch
from infinity.update.sub_group import SubGroup
from infinity.update.update import Update
from infinity.update.whole import WholeParams


def build_update(
    runtime: Runtime, optimizer: ShardedOptimizer, optimizer_groups: Sequence[int], config: Config
) -> Update:
    """``optimizer_groups``: the optimizer's group of each parameter, -1 of one that it does not have."""
    sharded, rule, scratch = runtime.sharded, optimizer.rule, Scratch()
    precision = sharded.precision
    rounding = Rounding({kind: precision.narrows[kind] for kind in rule.unsigned_kinds if kind in precision.narrows})
    sub_groups = [
        SubGroup(
            chunk_id,
            chunk,
            rule=rule,
            precision=precision,
            group_of=optimizer_groups,
            scratch=scratch,
            rounding=rounding,
            weights_of=sharded.weights_of if precision.rounds_in_place else None,
            device=sharded.stepped_on,
        )
        for chunk_id, chunk in enumerate(sharded.chunks)
        if sharded.layout.placements[chunk.group].trainable
    ]
    whole = None
    if rule.whole_groups:
        whole = WholeParams(
            sharded.params, runtime.io, rule=rule, precision=precision, group_of=optimizer_groups, rounding=rounding
        )
    return Update(
        # last chunks first: the first ones, which the next forward needs first, are the ones left resident
        sub_groups[::-1],
        optimizer,
        runtime.gradients,
        store=sharded.store,
        scale=loss_scale_of(config),
        num_params=len(sharded.params),
        left_out=[param for param, group in enumerate(optimizer_groups) if group < 0],
        # as DeepSpeed, which leaves gradients to torch there
        counts_all=config.zero_optimization.stage == 0 and precision.weight is torch.float32,
        max_norm=config.gradient_clipping,
        whole=whole,
        remade=sharded.remade if sharded.makes_each else (),
    )
