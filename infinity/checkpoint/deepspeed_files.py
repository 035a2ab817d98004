"""A checkpoint that DeepSpeed wrote with ZeRO 1, 2 or 3 (0.16 to 0.19), open for reading: any part of any tensor.

Stages 1 and 2 keep each param group as one vector, parameter after parameter, of which every rank has an equal part;
stage 3 keeps of each parameter an equal part on every rank, parts one behind another in vectors called sub-groups. Next
to the fp32 weights lie the optimizer's states, in vectors of the same form. Files are mapped and never loaded whole;
nothing of what is pickled in them is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from pathlib import Path
from typing import Any, Final

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from infinity.checkpoint.disk import disk_errors
from infinity.checkpoint.manifest import PIECE_NUMEL_MAX, STATE_PREFIX, WEIGHT
from infinity.errors import CheckpointError
from infinity.files.pieces import pieces
from infinity.files.torch_file import MAPPED_BYTES_MAX

_STAGES: Final = ("disabled", "optimizer_states", "gradients", "weights")
"""DeepSpeed's names of the stages."""
_WHOLE: Final = "save it again with DeepSpeed, on all ranks, or name another tag"


class Inert:
    """It stands in for an object of DeepSpeed's: what it was made of, and no code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a parameter that lie together: in which rank's file, in which vector, from where on."""

    rank: int
    vector: int
    start: int
    numel: int


class DeepSpeedFiles:
    """``shapes``: of every parameter that was trained; ``kinds``: what there is of each, by our names."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for what is none, or not whole, or split among ranks of models or pipelines."""
        self.directory = directory
        self._maps: dict[Path, Any] = {}
        self._num_bytes = 0
        self._model_paths, self._optim_paths = _find(directory)
        self.model: Mapping[str, Any] = self._load(self._model_paths[0])
        if "param_shapes" not in self.model or "buffer_names" not in self.model:
            raise CheckpointError(self._model_paths[0], "is no file of ZeRO's", "save with ZeRO 1, 2 or 3")
        self.groups: Sequence[Mapping[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in self.model["param_shapes"]
        ]
        first = self._state(0)
        self.stage = _stage(first)
        world_size = first["partition_count"]
        world_size = max(world_size) if isinstance(world_size, list) else int(world_size)
        if world_size != len(self._optim_paths) or (self.stage == 3 and world_size != len(self._model_paths)):
            raise CheckpointError(
                directory,
                f"was written by {world_size} ranks, and has {len(self._optim_paths)} files of the optimizer's and "
                f"{len(self._model_paths)} of the model's",
                _WHOLE,
            )
        self.world_size = world_size
        self.shapes = {name: shape for group in self.groups for name, shape in group.items()}
        self._runs = dict(self._sharded_by_parameter() if self.stage == 3 else self._sharded_by_group())
        self.kinds = self._kinds()
        self._check()

    # What is read

    def pieces(self, name: str, kind: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of a kind of a trained parameter, row-major, in order."""
        done = 0
        for run in self._runs[name]:
            for start, numel in pieces(run.numel, PIECE_NUMEL_MAX):
                vector = self._vector(run, kind)
                yield done + start, self._counted(vector[run.start + start :][:numel].clone())
            done += run.numel

    def vector_of(self, name: str) -> int | None:
        """The number of the vectors that a trained parameter lies in; None for one without elements."""
        return self._runs[name][0].vector if self._runs[name] else None

    def frozen(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters that were not trained."""
        listed = self.model.get("frozen_param_shapes") or {}
        if self.stage == 3:
            return {name: tuple(shape) for name, shape in listed.items()}
        others = {*self.shapes, *self.model["buffer_names"], *(self.model.get("shared_params") or ())}
        whole = {name: value for name, value in self.model["module"].items() if torch.is_tensor(value)}
        return {name: tuple(value.shape) for name, value in whole.items() if name not in others}

    def frozen_value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The weight of one of these, in its shape; None if it was not saved."""
        if self.stage < 3:
            return self._counted(self._load(self._model_paths[0])["module"][name].clone())
        parts = []
        for path in self._model_paths:
            fragments = self._load(path).get("frozen_param_fragments") or {}
            if name not in fragments:
                return None
            parts.append(self._counted(fragments[name].reshape(-1).clone()))
        return torch.cat(parts)[: prod(shape)].view(shape)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Buffers of the state dict."""
        module = self.model["module"]
        return {name: module[name] for name in self.model["buffer_names"] if torch.is_tensor(module.get(name))}

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """``param_groups`` and ``state`` as torch's optimizer had them on rank 0; empty where they were not saved."""
        return self._optimizer(0)

    @property
    def loss_scaler(self) -> Any:
        return self._state(0).get("loss_scaler")

    @property
    def configuration(self) -> Mapping[str, Any]:
        found = self._load(self._optim_paths[0]).get("ds_config") or self.model.get("ds_config")
        return found if isinstance(found, Mapping) else {}

    # Where it lies

    def _sharded_by_group(self) -> Iterator[tuple[str, list[Run]]]:
        """Stages 1 and 2."""
        paddings = self._state(0).get("param_alignment_paddings")
        for number, group in enumerate(self.groups):
            part = int(self._weights(0)[number].numel())
            offset = 0
            for place, (name, shape) in enumerate(group.items()):
                yield (
                    name,
                    list(_cut(offset, prod(shape), part, number))
                    if self.world_size > 1
                    else [Run(0, number, offset, prod(shape))],
                )
                offset += prod(shape) + (paddings[number][place] if paddings else 0)

    def _sharded_by_parameter(self) -> Iterator[tuple[str, list[Run]]]:
        """Stage 3."""
        ends = list(accumulate(int(vector.numel()) for vector in self._weights(0)))
        vector, offset = 0, 0
        for name, shape in self.shapes.items():
            part = ceil(prod(shape) / self.world_size)
            while vector < len(ends) - 1 and offset >= ends[vector]:
                vector += 1
            start = offset - (ends[vector - 1] if vector else 0)
            yield (
                name,
                [
                    Run(rank, vector, start, numel)
                    for rank in range(self.world_size)
                    if (numel := min(part, prod(shape) - rank * part)) > 0
                ],
            )
            offset += part

    def _kinds(self) -> dict[str, list[str]]:
        """Name -> what there is of the parameter; states are those tensors that are as long as the weights."""
        states = self.optimizer.get("state") or {}
        found = {}
        for name, runs in self._runs.items():
            least = max((run.start + run.numel for run in runs if run.rank == 0), default=0)
            of_vector = states.get(runs[0].vector, {}) if runs else {}
            found[name] = [WEIGHT] + [
                f"{STATE_PREFIX}{state}"
                for state, value in of_vector.items()
                if torch.is_tensor(value) and value.dim() == 1 and value.numel() >= least
            ]
        return found

    def _check(self) -> None:
        """Every run lies in its vector, on every rank."""
        for name, runs in self._runs.items():
            for kind in self.kinds[name]:
                for run in runs:
                    vector = self._vector(run, kind)
                    if run.start + run.numel > vector.numel():
                        raise CheckpointError(
                            self._optim_paths[run.rank],
                            f"lacks elements of {name} ({kind}): a vector has {vector.numel()}, needed are "
                            f"{run.start + run.numel}",
                            f"{_WHOLE}; what DeepSpeed keeps on NVMe is saved from the CPU or the device only",
                        )

    # Files

    def _vector(self, run: Run, kind: str) -> torch.Tensor:
        if kind == WEIGHT:
            weights: torch.Tensor = self._weights(run.rank)[run.vector]
            return weights
        state = (self._optimizer(run.rank).get("state") or {}).get(run.vector, {})
        value = state.get(kind.removeprefix(STATE_PREFIX))
        return value if torch.is_tensor(value) else torch.empty(0, device="cpu")

    def _weights(self, rank: int) -> Sequence[Any]:
        state = self._state(rank)
        for key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            if key in state:
                vectors: Sequence[Any] = state[key]
                return vectors
        raise CheckpointError(self._optim_paths[rank], "has no fp32 weights", "save with ZeRO 1, 2 or 3")

    def _optimizer(self, rank: int) -> Mapping[str, Any]:
        state = self._state(rank)
        found = state.get("optimizer_state_dict") or state.get("base_optimizer_state") or {}
        if isinstance(found, list):  # elastic: a dict for each group
            return {"state": dict(enumerate(found)), "param_groups": state.get("param_groups", [])}
        result: Mapping[str, Any] = found
        return result

    def _state(self, rank: int) -> Mapping[str, Any]:
        state = self._load(self._optim_paths[rank]).get("optimizer_state_dict")
        if not isinstance(state, Mapping) or "partition_count" not in state:
            raise CheckpointError(self._optim_paths[rank], "is no file of ZeRO's", "save with ZeRO 1, 2 or 3")
        return state

    def _load(self, path: Path) -> Mapping[str, Any]:
        if path not in self._maps:
            self._maps[path] = _load_inert(path)
        found: Mapping[str, Any] = self._maps[path]
        return found

    def _counted(self, values: torch.Tensor) -> torch.Tensor:
        self._num_bytes += values.nbytes
        if self._num_bytes >= MAPPED_BYTES_MAX:
            self._maps.clear()
            self._num_bytes = 0
        return values


def _find(directory: Path) -> tuple[list[Path], list[Path]]:
    """Files of the model and of the optimizer, in rank order."""
    with disk_errors(directory, "read"):
        names = sorted(path.name for path in directory.iterdir())
    others = [name for name in names if re.search(r"mp_rank_(?!00)\d|^layer_|expert_", name)]
    if others:
        raise CheckpointError(
            directory,
            f"is split among model-parallel ranks, pipeline stages or experts ({others[0]})",
            "import a checkpoint of data-parallel ranks alone",
        )
    model = _by_rank(directory, names, r"(?:bf16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
    optimizer = _by_rank(directory, names, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
    if not model or not optimizer:
        absent = "model_states.pt" if not model else "optim_states.pt"
        raise CheckpointError(
            directory, f"has no *{absent}", "name a directory that DeepSpeed's save_checkpoint() wrote with ZeRO"
        )
    return model, optimizer


def _by_rank(directory: Path, names: Sequence[str], pattern: str) -> list[Path]:
    found = {int(match[1] or 0): directory / name for name in names if (match := re.fullmatch(pattern, name))}
    for rank in range(len(found)):
        if rank not in found:
            raise CheckpointError(directory, f"lacks rank {rank}'s file beside {found[max(found)].name}", _WHOLE)
    return [found[rank] for rank in sorted(found)]


def _load_inert(path: Path) -> Mapping[str, Any]:
    """What was pickled, every class that torch does not vouch for replaced by ``Inert``."""
    with disk_errors(path, "read"):
        try:
            names = get_unsafe_globals_in_checkpoint(path)
            stand_ins: list[Any] = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in names]
            with safe_globals(stand_ins):
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except OSError:
            raise
        except Exception as error:
            reason = str(error).split("\n")[0]
            raise CheckpointError(
                path, f"cannot be read ({reason})", "copy it again if it is cut short; it must be of torch 1.6 or later"
            ) from error
    if not isinstance(found, Mapping):
        raise CheckpointError(path, f"holds a {type(found).__name__}", "name a checkpoint of DeepSpeed's")
    return found


def _stage(state: Mapping[str, Any]) -> int:
    stage = state.get("zero_stage", 1)  # the bf16 optimizer of stage 1 does not say
    if isinstance(stage, Inert) and stage.arguments:
        stage = stage.arguments[-1]  # of an enumeration's member its value, or from Python 3.11.0 to 3.11.3 its name
    return _STAGES.index(stage) if stage in _STAGES else int(stage)


def _cut(offset: int, numel: int, part: int, vector: int) -> Iterator[Run]:
    """The runs of elements [offset, offset + numel) of a vector that lies on the ranks in parts."""
    end = offset + numel
    while offset < end:
        rank, start = divmod(offset, part)
        taken = min(part - start, end - offset)
        yield Run(rank, vector, start, taken)
        offset += taken
