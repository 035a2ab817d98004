"""Groups of ranks that a script with experts of its own asks for, by DeepSpeed's names: plain groups of torch's.

Engines do not use them: no expert of a model that is passed to ``initialize`` lies on some ranks alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from infinity.errors import ConfigError


class _Member(NamedTuple):
    group: dist.ProcessGroup
    ranks: list[int]


_parallel: dict[str, _Member] = {}
_data_parallel: dict[str, _Member] = {}
_world: weakref.ref[dist.ProcessGroup] | None = None
"""The world that these groups are of."""


def _ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises AssertionError if it is not."""
    if numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Which ranks share out experts, and which have the same ones.

    Ranks are numbered with those of a tensor-parallel group next to each other, then those of a stage.

    Args:
        world_size: all ranks.
        tensor_parallel_size_: ranks of a tensor-parallel group.
        expert_parallel_size_: ranks that share out the experts of a layer.
        pipeline_parallel_size_: stages.
        use_data_before_expert_parallel_: ranks with the same experts stand next to each other, not those that share
            them out.

    Raises:
        AssertionError: the sizes do not divide the world.
    """
    stage_size, tensor_size, expert_size = (
        world_size // pipeline_parallel_size_,
        tensor_parallel_size_,
        expert_parallel_size_,
    )
    _ensure_divisibility(world_size, tensor_size * pipeline_parallel_size_)
    _ensure_divisibility(stage_size // tensor_size, expert_size)
    num_copies = stage_size // tensor_size // expert_size
    expert_parallel, data_parallel = [], []
    for stage in range(0, world_size, stage_size):
        for first in range(stage, stage + tensor_size):
            ranks = list(range(first, stage + stage_size, tensor_size))
            if use_data_before_expert_parallel_:
                groups = [ranks[copy::num_copies] for copy in range(num_copies)]
            else:
                groups = [ranks[begin : begin + expert_size] for begin in range(0, len(ranks), expert_size)]
            expert_parallel += groups
            data_parallel += [list(same) for same in zip(*groups, strict=True)]
    return expert_parallel, data_parallel


def _create_expert_and_data_parallel(
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: None = None,
) -> None:
    """Make groups of all ranks, by the name ``ep_size_<number>``, unless they are there. Collective.

    Raises:
        ConfigError: model parallelism.
        AssertionError: the number does not divide the world.
    """
    for name, value in (("mp_size", mp_size), ("pp_size", pp_size)):
        if value not in (None, 1):
            raise ConfigError(name, value, "there is no model parallelism: leave it out")
    if folding_spec is not None:
        raise ConfigError("folding_spec", type(folding_spec).__name__, "there is no model parallelism: leave it out")
    _forget_other_worlds()
    name, rank = f"ep_size_{expert_parallel_size_}", dist.get_rank()
    made = _get_expert_parallel_ranks(
        dist.get_world_size(), 1, expert_parallel_size_, 1, use_data_before_expert_parallel_
    )
    if name in _parallel:
        return
    for table, groups in zip((_parallel, _data_parallel), made, strict=True):
        for ranks in groups:
            group = dist.new_group(ranks)
            if rank in ranks:
                table[name] = _Member(group, ranks)


def _get_expert_parallel_group(group_name: str) -> dist.ProcessGroup:
    """The ranks that share out the experts with this one. Raises AssertionError if nobody made such a group."""
    return _member(_parallel, group_name).group


def _get_expert_parallel_group_ranks(group_name: str) -> Sequence[int]:
    """Their numbers."""
    return _member(_parallel, group_name).ranks


def _get_expert_data_parallel_group(group_name: str) -> dist.ProcessGroup:
    """The ranks that have the same experts as this one. Raises AssertionError if nobody made such a group."""
    return _member(_data_parallel, group_name).group


def _get_expert_data_parallel_group_ranks(group_name: str) -> Sequence[int]:
    """Their numbers."""
    return _member(_data_parallel, group_name).ranks


def _get_max_expert_size() -> int:
    """How many ranks the largest group shares experts out to. Raises AssertionError if nobody made a group."""
    _forget_other_worlds()
    if not _parallel:
        raise AssertionError("no group of experts was made: call _create_expert_and_data_parallel() first")
    return max(len(member.ranks) for member in _parallel.values())


def _get_max_expert_parallel_group() -> dist.ProcessGroup:
    """The largest group, this rank's."""
    return _get_expert_parallel_group(f"ep_size_{_get_max_expert_size()}")


def _member(table: dict[str, _Member], name: str) -> _Member:
    _forget_other_worlds()
    if name not in table:
        raise AssertionError(f"no group of experts is called {name}: call _create_expert_and_data_parallel() first")
    return table[name]


def _forget_other_worlds() -> None:
    """Groups end with the world that they are of."""
    global _world
    if _world is None or _world() is not dist.group.WORLD:
        _parallel.clear()
        _data_parallel.clear()
        _world = None if dist.group.WORLD is None else weakref.ref(dist.group.WORLD)
