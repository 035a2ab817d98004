"""The weights of an engine back to the user: what a model has after its engine is what it trained to."""

from __future__ import annotations

import torch

from infinity.config import Config
from infinity.engine.runtime import Runtime
from infinity.weights import access, owners
from infinity.weights.staging import StagingArea
from io_daemon.shared.protocol import ObjectKind


def hand_back(runtime: Runtime, config: Config) -> None:
    """Make every parameter the user's own, one after the other. Collective, between steps; the engine then ends.

    Where weights are whole on every rank they stay so. Where they are sharded they are staged, as under ``Init``: a
    use brings them back, and another engine may take them over. Masters are handed back where there are any: they are
    what was trained, and a dtype of 16 bits is their rounding; not where the model alone said that it is in 16 bits.
    """
    runtime.changes.settle()
    runtime.changes.drop_weights()
    area = None
    if runtime.sharded.policy.shards_weights:
        area = StagingArea(config, runtime.collectives.joined_again())
    try:
        for param in runtime.sharded.params:
            has_master = ObjectKind.MASTER in runtime.io.lasting(param.index)
            kind = ObjectKind.MASTER if has_master else ObjectKind.WEIGHT
            values = runtime.io.read_flat(param, kind)
            dtype = torch.float32 if has_master and not runtime.is_narrow_by_model else param.dtype
            access.drop_gradient(param.param)
            # memory that a collective filled may be held by its library a moment longer, on one rank and not on another
            access.show(param.param, param.unflattened(values.to(dtype, copy=True)))
            del values
            owners.disown(param.param)
            if area is not None:
                area.adopt(param.param, param.name)
        if area is not None:
            area.is_building = False
            area.stage_everything()
    except BaseException:
        if area is not None:
            area.close()
        raise
