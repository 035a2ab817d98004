"""Which ranks' parts of a model make up those of a smaller world: arithmetic of ``deepspeed.checkpoint``.

Ranks have three numbers: tensor-parallel ones stand next to each other, then come stages, then copies of the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from infinity.deepspeed.constants import CHECKPOINT_PARALLEL_DIMS, CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE

Item = TypeVar("Item")


class meg_2d_parallel_map:  # noqa: N801
    """Lists of data by stage and tensor-parallel number."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree, self.tp_degree = pp_degree, tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Give each place the number of its rank."""
        places = [(stage, part) for stage in range(self.pp_degree) for part in range(self.tp_degree)]
        self.map = {f"{stage},{part}": [rank] for rank, (stage, part) in enumerate(places)}

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append to the list of a place."""
        self._check(pp_index, tp_index)
        self.map.setdefault(f"{pp_index},{tp_index}", []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """The list of a place; without one of the numbers, those of all places behind each other."""
        self._check(pp_index, tp_index)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        parts = range(self.tp_degree) if tp_index is None else [tp_index]
        return [each for stage in stages for part in parts for each in self.map[f"{stage},{part}"]]

    def _check(self, pp_index: int | None, tp_index: int | None) -> None:
        for index, degree in ((pp_index, self.pp_degree), (tp_index, self.tp_degree)):
            if index is not None and index >= degree:
                raise AssertionError(f"index {index} is not below {degree}")


@dataclass
class model_3d_desc:  # noqa: N801
    """How many stages, parts of tensors, and copies there are."""

    pp_degree: int = 1
    tp_degree: int = 1
    dp_degree: int = 1

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """For each copy of the target, which of this world's ranks each place is made of.

        Raises AssertionError where the target is larger, or does not divide this."""
        can, why = self.can_reshape(target_3d_desc)
        if not can:
            raise AssertionError(", ".join(why))
        ranks = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree
        )
        stride, num_copies = self.pp_degree * self.tp_degree, target_3d_desc.dp_degree
        made = [meg_2d_parallel_map(ranks.pp_degree, ranks.tp_degree) for _ in range(num_copies)]
        for stage in range(ranks.pp_degree):
            for part in range(ranks.tp_degree):
                of_all = [
                    rank + copy * stride for rank in ranks.get_data(stage, part) for copy in range(self.dp_degree)
                ]
                for each, data in zip(made, partition_data(of_all, num_copies), strict=True):
                    each.add_data(stage, part, data)
        return made

    def get_desc(self) -> str:
        """The numbers as text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """All ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is a rank of these numbers, and which of them are too large."""
        given = (("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree))
        why = [f"{name}: index {index} is not below {degree}" for name, index, degree in given if index >= degree]
        return not why, why

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether no number of the target is larger, and which are."""
        degrees = ("pp_degree", "tp_degree", "dp_degree")
        pairs = [(name, getattr(self, name), getattr(target_3d_desc, name)) for name in degrees]
        why = [f"{name} cannot grow, from {here} to {there}" for name, here, there in pairs if there > here]
        return not why, why


def get_model_3d_descriptor(directory: str | os.PathLike[str]) -> model_3d_desc:
    """How many of each had the job that saved DeepSpeed's checkpoint in ``directory``.

    Raises RuntimeError where its files disagree.
    """
    paths = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    models = [path for path in paths if path.name.startswith("mp_rank_")]
    kinds = ("zero_pp_rank_", "fp16_zero_pp_rank_", "bf16_zero_pp_rank_")
    shards = next((found for kind in kinds if (found := [p for p in paths if p.name.startswith(kind)])), [])
    written = [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in models]
    degrees = [state.get(CHECKPOINT_PARALLEL_DIMS) for state in written]
    if not any(degrees):
        num_first = sum(path.name.startswith("layer_01") for path in paths)
        num_parts = num_first or len(models)
        stages = len(models) // num_parts if num_first else 1
        return model_3d_desc(stages, num_parts, max(1, len(shards) // max(1, stages * num_parts)))
    if not all(degrees):
        lacking = [path.name for path, degree in zip(models, degrees, strict=True) if not degree]
        raise RuntimeError(f"{CHECKPOINT_PARALLEL_DIMS} is missing from model-state files: {', '.join(lacking)}")
    if any(degree != degrees[0] for degree in degrees):
        raise RuntimeError(f"{CHECKPOINT_PARALLEL_DIMS} disagrees across model-state files: {degrees}")
    stages, num_parts = degrees[0][CHECKPOINT_PP_DEGREE], degrees[0][CHECKPOINT_TP_DEGREE]
    if len(models) != stages * num_parts or len(shards) % len(models):
        numbers = f"{len(models)} files of models and {len(shards)} of shards"
        raise RuntimeError(f"{numbers} are not what {stages} stages of {num_parts} parts save")
    return model_3d_desc(stages, num_parts, max(1, len(shards) // len(models)))


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """Which ranks of one copy each place of a smaller world is made of: neighbours are joined, parts before stages."""
    if new_pp_degree > old_pp_degree or new_tp_degree > old_tp_degree:
        raise AssertionError("a model cannot be cut into more stages or parts than it was")
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    joined, made = (meg_2d_parallel_map(stages, new_tp_degree) for stages in (old_pp_degree, new_pp_degree))
    for stage in range(old_pp_degree):
        for part, data in enumerate(partition_data(old.get_data(pp_index=stage), new_tp_degree)):
            joined.add_data(stage, part, data)
    for part in range(new_tp_degree):
        for stage, data in enumerate(partition_data(joined.get_data(tp_index=part), new_pp_degree)):
            made.add_data(stage, part, data)
    return made


def partition_data(data_list: list[Item], num_partitions: int) -> list[list[Item]]:
    """Runs of equal length. Raises AssertionError if there are none."""
    length, left = divmod(len(data_list), num_partitions)
    if left:
        raise AssertionError(f"{len(data_list)} entries cannot be cut into {num_partitions} equal parts")
    return [data_list[begin : begin + length] for begin in range(0, len(data_list), length)]


def merge_state(state_a: Any, state_b: Any, key_list: list[str] | None = None) -> Any:
    """Two states of the same structure as one: tensors behind each other, of other values the first.

    Raises ValueError where types or lengths differ."""
    if type(state_a) is not type(state_b):
        raise ValueError(f"cannot merge {type(state_a).__name__} and {type(state_b).__name__}")
    if isinstance(state_a, Mapping):
        both = {key: merge_state(state_a[key], value) if key in state_a else value for key, value in state_b.items()}
        return type(state_a)(both)  # type: ignore[call-arg]
    if isinstance(state_a, list | tuple):
        if len(state_a) != len(state_b):
            raise ValueError(f"cannot merge lists of {len(state_a)} and {len(state_b)} entries")
        return type(state_a)(merge_state(a, b) for a, b in zip(state_a, state_b, strict=True))
    return torch.cat([state_a, state_b]) if isinstance(state_a, torch.Tensor) else state_a
