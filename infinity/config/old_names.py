"""Old and second spellings of the dialect, and what each of them says in today's keys.

A table like the keys themselves. ``modernise`` rewrites a user's JSON before anything else looks at it, so nothing
behind it knows an old name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity.config.complaints import Complaints

Raw = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OldName:
    path: str
    """Dotted, from the top of the JSON; of a section that was renamed, the section."""
    write: str
    """What to write instead."""
    meaning: Callable[[Any, Raw], Mapping[str, Any]]
    """(value, the whole JSON) -> today's keys with their values."""
    boolean: bool = False
    """The old key takes true and false only."""
    if_boolean: bool = False
    """The name is today's; it is an old form only where its value is a boolean."""


class Modern(NamedTuple):
    raw: Raw
    """The JSON without old names."""
    old_name_of: dict[str, str]
    """Today's path -> the old name that gave its value."""
    notes: tuple[str, ...]
    """One for each old name that was met."""


def modernise(raw: Mapping[str, Any], complaints: Complaints) -> Modern:
    """``raw`` in today's keys. An old name beside a new one that says something else is complained of."""
    modern = copy.deepcopy(dict(raw))
    old_name_of: dict[str, str] = {}
    notes = []
    for old in OLD_NAMES:
        value = _look_up(modern, old.path)
        if old.if_boolean and not isinstance(value, bool):
            continue
        if value is None or value == "auto":
            _take_out(modern, old.path)
            continue
        if old.boolean and not isinstance(value, bool):
            complaints.add(old.path, value, f"must be a boolean, and is an old name: write {old.write}")
            _take_out(modern, old.path)
            continue
        _take_out(modern, old.path)
        notes.append(f"{old.path} is an old name: write {old.write}")
        for path, meant in old.meaning(value, modern).items():
            own = _look_up(modern, path)
            if own is not None and own != "auto" and own != meant:
                complaints.add(old.path, value, f"contradicts {path} = {own!r}; remove the old name")
            else:
                _put(modern, path, meant)
                old_name_of[path] = old.path
    notes += _take_in_flat_sizes(modern)
    return Modern(modern, old_name_of, tuple(notes))


def _take_in_flat_sizes(modern: Raw) -> list[str]:
    """Trainers of preferences write sizes of buckets to the top, under dotted names and with fractions of an element:
    they change no bit, and what the section itself says goes before them."""
    notes = []
    for name in FLAT_SIZES:
        value = modern.pop(name, None)
        if value is None:
            continue
        notes.append(f"{name} stands at the top: write it inside zero_optimization, whose own value goes before it")
        if _look_up(modern, name) in (None, "auto"):
            is_number = isinstance(value, float) and math.isfinite(value)
            _put(modern, name, int(value) if is_number else value)
    return notes


def _renamed(path: str, new: str) -> OldName:
    def meaning(value: Any, _raw: Raw) -> Mapping[str, Any]:
        return {new: value}

    return OldName(path=path, write=new, meaning=meaning)


def _moved_section(path: str, new: str) -> OldName:
    def meaning(value: Any, _raw: Raw) -> Mapping[str, Any]:
        return dict(_leaves(value, f"{new}.")) if isinstance(value, Mapping) else {new: value}

    return OldName(path=path, write=new, meaning=meaning)


def _offloaded(path: str, section: str) -> OldName:
    def meaning(value: Any, _raw: Raw) -> Mapping[str, Any]:
        return {f"zero_optimization.{section}.device": "cpu"} if value else {}

    return OldName(path=f"zero_optimization.{path}", write=f"{section}: {{device: cpu}}", meaning=meaning, boolean=True)


def _pinned(value: Any, raw: Raw) -> Mapping[str, Any]:
    """The old switch held for whatever is offloaded."""
    sections = [f"zero_optimization.{name}" for name in ("offload_param", "offload_optimizer")]
    return {f"{s}.pin_memory": value for s in sections if _look_up(raw, f"{s}.device") in ("cpu", "nvme")}


def _stage(value: Any, _raw: Raw) -> Mapping[str, Any]:
    return {"zero_optimization.stage": int(value)}


def _reduced_in_fp32(value: Any, _raw: Raw) -> Mapping[str, Any]:
    return {"communication_data_type": "fp32"} if value else {}


_WITHOUT_PREFIX = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "partition_stream_chunk_size",
)

FLAT_SIZES = tuple(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)
"""Names with their dots that are taken at the top, too."""

OLD_NAMES: tuple[OldName, ...] = (
    OldName(path="zero_optimization", write="zero_optimization: {stage: 1}", meaning=_stage, if_boolean=True),
    _renamed("allgather_size", "zero_optimization.allgather_bucket_size"),
    _moved_section("bfloat16", "bf16"),
    OldName(
        path="fp32_allreduce",
        write='communication_data_type: "fp32"',
        meaning=_reduced_in_fp32,
        boolean=True,
    ),
    _offloaded("cpu_offload", "offload_optimizer"),
    _offloaded("cpu_offload_param", "offload_param"),
    _offloaded("cpu_offload_params", "offload_param"),
    OldName(
        path="zero_optimization.cpu_offload_use_pin_memory",
        write="pin_memory in offload_param and offload_optimizer",
        meaning=_pinned,
        boolean=True,
    ),
    _renamed(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    *(_renamed(f"zero_optimization.{name}", f"zero_optimization.stage3_{name}") for name in _WITHOUT_PREFIX),
    _renamed("aio.num_threads", "aio.intra_op_parallelism"),
)
"""In the order in which they are read: what says where states live comes before what says how."""


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _look_up(raw: Mapping[str, Any], path: str) -> Any:
    value: Any = raw
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _take_out(raw: Raw, path: str) -> None:
    *sections, name = path.split(".")
    inner: Any = raw
    for section in sections:
        inner = inner.get(section) if isinstance(inner, Mapping) else None
    if isinstance(inner, dict):
        inner.pop(name, None)


def _put(raw: Raw, path: str, value: Any) -> None:
    *sections, name = path.split(".")
    inner = raw
    for section in sections:
        if not isinstance(inner.get(section), dict):
            inner[section] = {}
        inner = inner[section]
    inner[name] = value
