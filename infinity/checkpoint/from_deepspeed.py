"""A checkpoint of ours from one of DeepSpeed's: weights, optimizer states, counters, schedule, loss scale, a piece at a
time. DeepSpeed saves no random numbers, so none are restored."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from infinity.checkpoint import plain
from infinity.checkpoint.deepspeed_files import DeepSpeedFiles, Inert
from infinity.checkpoint.directory import check_tag, latest_tag, publish, written_aside
from infinity.checkpoint.manifest import (
    BUFFER,
    MANIFEST,
    SHARED_STATE,
    WEIGHT,
    Manifest,
    TensorEntry,
    dtype_name,
)
from infinity.checkpoint.pieces import PieceWriter
from infinity.checkpoint.sealed import write_sealed
from infinity.checkpoint.writing import write_rank, write_state
from infinity.errors import ConfigError
from io_daemon.machine.facts import package_version

_NOT_THE_CLIENTS: Final = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "csr_tensor_module_names",
        "num_experts",
    )
)
"""What DeepSpeed itself puts beside a client's state."""
_NOT_OPTIONS: Final = frozenset({"params", "param_names", "step"})


class Import:
    """One import. ``left_out``: what of the client's state cannot be kept."""

    def __init__(self, directory: Path, tag: str | None) -> None:
        """Open DeepSpeed's checkpoint. Raises CheckpointError for what is none, or is not whole."""
        tag = latest_tag(directory) if tag is None else check_tag(tag)
        self.source = directory / tag if tag else directory
        self.tag = check_tag(os.path.basename(os.path.abspath(self.source)))  # of "." and "..", too
        self.files = DeepSpeedFiles(self.source)
        self.left_out: list[str] = []
        self._aliases: dict[str, list[str]] = {}
        for alias, name in (self.files.model.get("shared_params") or {}).items():
            self._aliases.setdefault(name, []).append(alias)

    def write(self, out: Path, *, states: bool = True) -> Manifest:
        """Write and publish it, with the optimizer's ``states`` or without; what stood there under the same tag stays
        until then."""
        shared = plain.to_bytes(self._shared_state())
        own = plain.to_bytes({})
        with written_aside(out, self.tag) as aside:
            tensors: list[TensorEntry] = []
            left_out: list[str] = []
            files = write_rank(aside, 0, lambda writer: self._write_tensors(writer, tensors, left_out, states), own)
            files |= write_state(aside / SHARED_STATE, shared)
            manifest = Manifest(
                tag=self.tag,
                written_by=package_version(),
                world_size=1,
                facts={**self._counters(), "stage": self.files.stage, "imported_from": self._version()},
                tensors=tensors,
                left_out=left_out,
                files=files,
            )
            write_sealed(aside / MANIFEST, manifest.as_json(), indent=1)
            publish(aside, out, self.tag, latest=True)
        return manifest

    def _write_tensors(
        self, writer: PieceWriter, tensors: list[TensorEntry], left_out: list[str], states: bool
    ) -> None:
        """``tensors`` gets what was written, ``left_out`` the frozen parameters that DeepSpeed had left out."""
        for name, shape in self.files.shapes.items():
            kinds = {}
            for kind in self.files.kinds[name] if states else (WEIGHT,):
                for first, values in self.files.pieces(name, kind):
                    writer.add(name, kind, first, values)
                    kinds[kind] = dtype_name(values.dtype)
            tensors.append(self._entry(name, shape, kinds, trainable=True))
        for name, shape in self.files.frozen().items():
            value = self.files.frozen_value(name, shape)
            if value is None:
                left_out.append(name)
            else:
                tensors.append(self._entry(name, shape, _write_whole(writer, name, WEIGHT, value), trainable=False))
        for name, value in self.files.buffers().items():
            tensors.append(self._entry(name, tuple(value.shape), _write_whole(writer, name, BUFFER, value)))

    def _entry(
        self, name: str, shape: tuple[int, ...], kinds: Mapping[str, str], *, trainable: bool = False
    ) -> TensorEntry:
        return TensorEntry(
            name=name,
            aliases=tuple(self._aliases.get(name, ())),
            shape=shape,
            order=tuple(range(len(shape))),
            trainable=trainable,
            kinds=kinds,
        )

    def _shared_state(self) -> dict[str, Any]:
        groups = self.files.optimizer.get("param_groups") or []
        return {
            "client_state": self._client_state(),
            "histories": self._histories(),
            "counters": self._counters(),
            "lr_scheduler": self._schedule(),
            "param_groups": [_options(group) for group in groups],
            "loss_scale": _loss_scale(self.files.loss_scaler),
            "extra_states": {},
        }

    def _counters(self) -> dict[str, int]:
        return {key: int(self.files.model.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps")}

    def _histories(self) -> dict[str, tuple[float, ...]]:
        """For each parameter that was stepped the count of its steps, where its optimizer keeps one."""
        states, groups = self.files.optimizer.get("state") or {}, self.files.optimizer.get("param_groups") or []
        found: dict[str, tuple[float, ...]] = {}
        for name in self.files.shapes:
            state = states.get(self.files.vector_of(name))
            if state is None:
                continue
            step = state.get("step", next((group["step"] for group in groups if "step" in group), None))
            found[name] = () if step is None else (float(step),)
        return found

    def _schedule(self) -> list[Any] | None:
        state = self.files.model.get("lr_scheduler")
        section = self.files.configuration.get("scheduler")
        if not isinstance(state, Mapping) or not isinstance(section, Mapping):
            return None
        return [str(section.get("type")), dict(state)]

    def _client_state(self) -> dict[str, Any]:
        kept = {}
        for key, value in self.files.model.items():
            if key in _NOT_THE_CLIENTS or key.startswith("autoep"):
                continue
            try:
                plain.to_bytes({key: value})
            except ConfigError:
                self.left_out.append(key)
            else:
                kept[key] = value
        return kept

    def _version(self) -> str:
        return f"DeepSpeed {self.files.model.get('ds_version')}, {self.files.world_size} ranks"


def _write_whole(writer: PieceWriter, name: str, kind: str, value: torch.Tensor) -> dict[str, str]:
    writer.add_all(name, kind, value.reshape(-1))
    return {kind: dtype_name(value.dtype)}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group says of its steps: numbers, flags and tuples of these."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in group.items()
        if key not in _NOT_OPTIONS and all(_is_plain(each) for each in _each(value))
    }


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, (list, tuple)) else (value,)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _loss_scale(scaler: Any) -> dict[str, float]:
    """The dynamic one's numbers; of a fixed one there are none."""
    found = vars(scaler) if isinstance(scaler, Inert) else {}
    if not found.get("dynamic") or "cur_iter" not in found:
        return {}
    return {
        "value": float(found["cur_scale"]),
        "patience": int(found["cur_hysteresis"]),
        "good_steps": int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1,
    }
