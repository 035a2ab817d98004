"""From a model and its layout to an engine: the one way, of ``initialize`` and of ``infinity trace``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.facade import Engine
from infinity.observe.observer import Observers
from infinity.plan.precision import DTYPES, Precision
from infinity.tiers.base import HostTier
from infinity.tiers.collectives import Collectives
from infinity.tiers.connection import NodePlace
from infinity.update.optimizer import ShardedOptimizer
from infinity.weights.buffers import move_buffers, narrowed_against_the_model
from infinity.weights.param import ShardedParam, flattened, memory_order
from infinity.weights.promises import samples_of_promises, take_promises
from infinity.weights.samples import compare
from infinity.weights.sharded_model import Layout, ShardedModel
from infinity.weights.staging import discard, staged_param
from infinity.weights.together import broadcast, together

_log = logging.getLogger(__name__)


def build_engine(
    model: nn.Module,
    layout: Layout,
    optimizer: ShardedOptimizer | None,
    optimizer_groups: Sequence[int],
    *,
    config: Config,
    collectives: Collectives,
    device: torch.device,
    place: NodePlace,
    tier: HostTier | None,
    budget_bytes: int,
    poison: bool = False,
    observers: Observers | None = None,
    kind: type[Engine] = Engine,
    spare_bytes: int = 0,
    when_written: Callable[[], None] = lambda: None,
) -> Engine:
    """Reserve memory and disk space, write what the model holds there, and take its parameters over. Collective.

    Args:
        tier: where what is offloaded goes; the engine closes it at its end, and this does not where it fails.
        kind: the class of the engine.
        spare_bytes: disk space of this rank that ``when_written`` gives back.
        when_written: called when the engine has the model's weights, and before the rest of its space is reserved.

    Raises BudgetError, SwapSpaceError or ConfigError with the numbers, on every rank.
    """
    if optimizer is None:
        precision = replace(Precision.of(config), keeps_gradients=False)
    else:
        precision = Precision.of(config, optimizer.rule.states, unsigned=optimizer.rule.unsigned_kinds)
    dtypes = layout.dtypes()
    came_in_fp32 = all(
        _came_in_fp32(param) for index, param in enumerate(layout.params) if dtypes[index] is precision.weight
    )
    sharded = ShardedModel(
        layout,
        config=config,
        precision=precision,
        collectives=collectives,
        device=device,
        place=place,
        tier=tier,
        budget_bytes=budget_bytes,
        poison=poison,
        spare_bytes=spare_bytes,
    )
    try:
        if sharded.sharers.world_size < collectives.world_size:
            _bring_back(layout)
        _compare_promises(sharded.params, collectives)
        promised = take_promises((param.name, param.param) for param in sharded.params)
        _broadcast_plain([p.param for p in sharded.params if id(p.param) not in promised], collectives)

        def values_of(param: ShardedParam, first: int, numel: int) -> torch.Tensor:
            new = promised.get(id(param.param))
            return new(first, numel).to(param.param.dtype) if new else _values_of(param, first, numel)

        collectives.together(lambda: sharded.write_initial(values_of), "write the initial weights")
        discard(layout.params)
        when_written()
        collectives.together(sharded.reserve, "reserve swap space")
        if collectives.rank == 0 and (names := narrowed_against_the_model(model, precision.weight)):
            words = "the model wants %s and %d more in fp32; weights have one dtype here, %s: bf16 or fp32 is safer"
            _log.warning(words, names[0], len(names) - 1, precision.weight)
        data_types = config.data_types
        move_buffers(
            model,
            device,
            precision.weight,
            dtype=DTYPES[data_types.buffer_dtype] if data_types.buffer_dtype else None,
            follow=came_in_fp32 and kind.buffers_follow_weights,
            kept=data_types.keep_in_fp32_modules,
        )
        return kind(
            model,
            sharded,
            optimizer,
            optimizer_groups,
            config=config,
            collectives=collectives,
            tier=tier,
            observers=observers,
        )
    except BaseException:
        sharded.store.close()
        raise


def _came_in_fp32(param: nn.Parameter) -> bool:
    """Whether its model was made in fp32, also where ``Init`` has cast it since."""
    staged = staged_param(param)
    return param.dtype is torch.float32 or (staged is not None and staged.area.casts_weights)


def _compare_promises(params: Sequence[ShardedParam], collectives: Collectives) -> None:
    """Raises WeightsFileError on every rank where they are about to take parts of different files. Collective."""
    if collectives.world_size > 1:
        named = [(param.name, param.param) for param in params]
        what = "look at the weights that load_pretrained() was given"
        samples = collectives.together(lambda: samples_of_promises(named), what)
        compare(samples, collectives, "compare the weights that load_pretrained() was given")


def _bring_back(layout: Layout) -> None:
    """What ``Init`` staged was cut into shards, and every rank is to have it whole. Collective."""
    for param in layout.params:
        if (staged := staged_param(param)) is not None and staged.is_staged:
            staged.bring_back()


def _broadcast_plain(params: Sequence[nn.Parameter], collectives: Collectives) -> None:
    """Rank 0's values of what is in memory become everybody's, small ones together: a collective for each would be all
    that the start of a model of a hundred thousand parameters is waited for."""
    if collectives.world_size == 1:
        return
    # what shares its memory with another is never staged out
    plain = [param for param in params if (staged := staged_param(param)) is None or not staged.is_staged]
    for several in together(plain, torch.Tensor.detach):
        flats = [flattened(param.detach(), memory_order(param)).contiguous() for param in several]
        numel = sum(flat.numel() for flat in flats)
        what = f"broadcast {len(several)} parameters of rank 0, {numel} elements of {flats[0].dtype}"
        for param, flat, new in zip(several, flats, broadcast(flats, collectives, what), strict=True):
            if collectives.rank:
                flat.copy_(new)  # each in memory of its own, which goes when it is sharded
                param.data = flat.as_strided(param.shape, ShardedParam.layout_for(param).stride())


def _values_of(param: ShardedParam, first: int, numel: int) -> torch.Tensor:
    """Initial values from the model as it was built: what ``Init`` staged, or the parameter itself."""
    staged = staged_param(param.param)
    if staged is not None and staged.is_staged:
        return staged.read(first, numel)
    return param.own_values(first, numel)
