"""From a user's JSON to a ``Config``, or to one error with everything that is wrong: key, value and remedy of each."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from infinity.config.activation_checkpoints import check_activation_checkpoints
from infinity.config.batch import BATCH_KEYS, SAMPLES_MAX, BatchSizes, resolve_batch
from infinity.config.complaints import Complaints, without_quotes
from infinity.config.dialect import BY_PATH, SECTIONS, Key, Shape, Standing
from infinity.config.in_backward import check_in_backward
from infinity.config.load import Raw, Source, load
from infinity.config.old_names import OLD_NAMES, modernise
from infinity.config.origins import Resolved, trace_origins
from infinity.config.paths import check_offload, check_swap_dirs
from infinity.config.precision import check_precision
from infinity.config.sections import Config
from infinity.config.validation import validated
from infinity.errors import ConfigError

_log = logging.getLogger(__name__)

SIBLINGS_LISTED_MAX = 16
"""Where there are more keys than this, one that is like no other is told the closest instead of all."""
_SHAPES: dict[Shape, tuple[type, ...]] = {
    "boolean": (bool,),
    "whole number": (int, float),
    "number": (int, float),
    "string": (str,),
    "list": (list, tuple),
    "object": (dict,),
    "any": (object,),
}


def parse_config(
    config: Source, *, world_size: int = 1, check_paths: bool = True, before_trainer: bool = False
) -> Config:
    """The configuration that ``resolve_config`` finds, without the origins of its values."""
    return resolve_config(config, world_size=world_size, check_paths=check_paths, before_trainer=before_trainer).config


def resolve_config(
    config: Source, *, world_size: int = 1, check_paths: bool = True, before_trainer: bool = False
) -> Resolved:
    """Check a configuration whole, fill in what it leaves out, and say where each value comes from.

    Args:
        config: the JSON object in DeepSpeed's dialect, or the path of a file that holds it; null means the default.
        world_size: ranks that share the model, for the arithmetic of batch sizes.
        check_paths: also look at the swap directories of this machine.
        before_trainer: a trainer will fill in "auto" and batch sizes later, as ``Init`` meets them.

    Raises:
        ConfigError: with key, value and remedy; ``CombinedConfigError`` if several settings cannot work.
    """
    complaints = Complaints()
    raw, old_name_of, notes = modernise(load(config, complaints), complaints)
    given = _given(raw, complaints, before_trainer=before_trainer)
    subsumed = tuple(path for path in given.values if BY_PATH[path].standing is Standing.SUBSUMED)
    fields = _nested((path, value) for path, value in given.values.items() if path not in subsumed)
    for name in ("optimizer", "scheduler"):
        if isinstance(raw.get(name), Mapping):
            # an empty one still lacks what it must have
            fields.setdefault(name, {}).setdefault("params", {})
    derived = _resolve_batch(fields, world_size, complaints, may_lack=before_trainer)
    derived.update(_merge_aio(fields, complaints))
    fields.update(subsumed=subsumed, old_names=notes)
    parsed = validated(fields, complaints, silent=given.unfilled | derived.keys())
    check_precision(parsed, complaints)
    check_in_backward(parsed, complaints)
    check_activation_checkpoints(parsed, complaints)
    check_offload(parsed, complaints)
    if check_paths:
        check_swap_dirs(parsed, complaints)
    complaints.raise_all(old_name_of)
    if subsumed:
        _log_subsumed(subsumed)
    return trace_origins(parsed, given=given.values, auto=given.auto, derived=derived, old_name_of=old_name_of)


@functools.cache
def _log_subsumed(paths: tuple[str, ...]) -> None:
    """Once per process and set of keys."""
    for path in paths:
        _log.info("%s needs no setting: %s", path, BY_PATH[path].note)


SWITCHES: Final = frozenset(
    [name for name, field in Config.model_fields.items() if field.annotation is bool]
    + [path for path, key in BY_PATH.items() if key.shape == "boolean" and "." not in path]
)
"""Switches at the top level, which DeepSpeed takes as numbers, too."""


class _Given(NamedTuple):
    values: dict[str, Any]
    """By dotted path: what reaches the sections or is subsumed."""
    auto: frozenset[str]
    """Paths whose "auto" means the default."""
    unfilled: frozenset[str]
    """Paths whose "auto" a trainer will fill in."""


def _given(raw: Raw, complaints: Complaints, *, before_trainer: bool) -> _Given:
    """Everything that was written, each key checked against the dialect."""
    values: dict[str, Any] = {}
    auto, unfilled = set(), set()
    for path, value in _leaves(raw, "", complaints):
        key = BY_PATH[path]
        if value is None:
            continue
        if path in SWITCHES and type(value) is int and value in (0, 1):
            value = bool(value)
        if _is_auto(value) and key.auto != "value":
            if key.auto == "default":
                auto.add(path)
            elif before_trainer:
                unfilled.add(path)
            else:
                remedy = 'only a trainer that knows its own arguments can fill in "auto"; write a value'
                complaints.add(path, value, remedy)
        elif _passes(key, value, complaints):
            values[path] = value
    return _Given(values, frozenset(auto), frozenset(unfilled))


def _passes(key: Key, value: Any, complaints: Complaints) -> bool:
    """Whether the engine, or the list of what it needs no setting for, hears of the key."""
    if key.switch:
        # a section that is switched off passes, whatever else it holds; one that does not say is taken for on
        if not isinstance(value, Mapping):
            complaints.take(_refusal(key, value))
        elif key.switch in value and not _is_off(key, value[key.switch]):
            complaints.add(f"{key.path}.{key.switch}", value[key.switch], f"{key.note}; {key.remedy}")
        elif value and key.switch not in value:
            complaints.add(key.path, value, f"{key.note}; {key.remedy}, or write {key.switched_off}")
        return False
    if key.standing is Standing.REFUSED:
        if not _is_accepted(key, value):
            complaints.take(_refusal(key, value))
        return False
    if key.standing is Standing.SUBSUMED and not _fits(key.shape, value):
        complaints.add(key.path, value, f"must be a {key.shape}{without_quotes(value)}")
        return False
    if key.standing is Standing.SUBSUMED and not _is_accepted(key, value):
        complaints.take(_refusal(key, value))
        return False
    return True


def _leaves(section: Mapping[str, Any], prefix: str, complaints: Complaints) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        path = f"{prefix}{name}"
        if "." in str(name) and (path in BY_PATH or path in SECTIONS):
            above, _, last = path.rpartition(".")
            complaints.add(path, value, f"is a name with dots, which nothing reads: write {last} inside {above}")
        elif path in BY_PATH:
            yield path, value
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                yield from _leaves(value, f"{path}.", complaints)
            elif value is not None:
                complaints.add(path, value, "must be an object: {...}")
        else:
            complaints.add(path, value, _unknown(prefix, str(name)))


def _unknown(prefix: str, name: str) -> str:
    """What the writer of an unknown key may have meant."""
    siblings = {path[len(prefix) :].split(".")[0] for path in BY_PATH if path.startswith(prefix)}
    everywhere: dict[str, str] = {}
    for path in (*BY_PATH, *sorted(SECTIONS)):
        everywhere.setdefault(path.split(".")[-1], path)
    for old in OLD_NAMES:
        everywhere.setdefault(old.path.split(".")[-1], old.write)
    if name in everywhere:
        return f"unknown key here; did you mean {everywhere[name]}?"
    if close := difflib.get_close_matches(name, sorted(siblings), n=1):
        return f"unknown key; did you mean {prefix}{close[0]}?"
    if close := difflib.get_close_matches(name, sorted(everywhere), n=1, cutoff=0.8):
        return f"unknown key here; did you mean {everywhere[close[0]]}?"
    if len(siblings) > SIBLINGS_LISTED_MAX:
        closest = difflib.get_close_matches(name, sorted(siblings), n=1, cutoff=0.0)[0]
        return f"unknown key, which does nothing: remove it; the closest is {closest}"
    return f"unknown key, which does nothing: remove it; known here: {', '.join(sorted(siblings))}"


def _is_off(key: Key, value: object) -> bool:
    return value is None or any(_equal(value, off) for off in key.off)


def _is_accepted(key: Key, value: object) -> bool:
    return key.accepts is None or any(_equal(value, accepted) for accepted in key.accepts)


def _refusal(key: Key, value: object) -> ConfigError:
    return ConfigError(key.path, value, f"{key.note}; {key.remedy}")


def _fits(shape: Shape, value: object) -> bool:
    expected = _SHAPES[shape]
    fits = isinstance(value, expected) and (bool in expected or not isinstance(value, bool))
    if fits and shape == "whole number":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return fits


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _equal(value: object, accepted: object) -> bool:
    """Equality that does not take true for 1."""
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted


def _nested(leaves: Iterable[tuple[str, Any]]) -> Raw:
    fields: Raw = {}
    for path, value in leaves:
        *sections, name = path.split(".")
        inner = fields
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return fields


def _resolve_batch(fields: Raw, world_size: int, complaints: Complaints, *, may_lack: bool) -> dict[str, str]:
    """Fill in the batch sizes; those that follow from others, with these. What is wrong is judged with 1 instead."""
    numbers: dict[str, int | None] = {}
    for name in BATCH_KEYS:
        value = fields.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            complaints.add(name, value, f"must be a whole number of at least 1{without_quotes(value)}")
        elif value is not None and value > SAMPLES_MAX:
            complaints.add(name, value, f"must be a whole number of at most {SAMPLES_MAX}")
        numbers[name] = value if not complaints.has(name) else None
    train, micro, accumulation = numbers.values()
    sizes = BatchSizes(1, 1, 1)
    if not any(complaints.has(name) for name in BATCH_KEYS) and not (may_lack and train is None and micro is None):
        try:
            sizes = resolve_batch(train=train, micro=micro, accumulation=accumulation, world_size=world_size)
        except ConfigError as error:
            complaints.take(error)
    fields.update(zip(BATCH_KEYS, sizes, strict=True))
    known = [name for name, value in numbers.items() if value is not None]
    follow = [name for name in BATCH_KEYS[:2] if name not in known]
    if train is not None and micro is not None and accumulation is None:
        follow.append(BATCH_KEYS[2])  # else it is 1 by default
    return {name: f"{', '.join(known)}, world size {world_size}" for name in follow if known}


def _merge_aio(fields: Raw, complaints: Complaints) -> dict[str, str]:
    """``aio`` names two settings of ``io_daemon``; said twice they must agree. What follows from it, and from what."""
    derived = {}
    for name, value in fields.get("aio", {}).items():
        daemon = fields.setdefault("io_daemon", {})
        if name not in daemon:
            derived[f"io_daemon.{name}"] = f"aio.{name}"
        own = daemon.setdefault(name, value)
        if own is not value and own != value:
            complaints.add(f"aio.{name}", value, f"contradicts io_daemon.{name} = {own}; remove one of the two")
    return derived
