"""From a user's JSON to a ``Config``, or to one ``ConfigError`` that names the key, the value and the remedy."""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pydantic import ValidationError

from infinity.config.batch import resolve_batch
from infinity.config.dialect import BY_PATH, SECTIONS, Key, Shape, Standing
from infinity.config.sections import Config, OffloadOptimizer, OffloadParam
from io_daemon.errors import ConfigError

_log = logging.getLogger(__name__)

SOCKET_PATH_BYTES_MAX = 107
"""sockaddr_un holds 108 bytes, the last of them NUL."""

Raw = dict[str, Any]

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SHAPES: dict[Shape, tuple[type, ...]] = {
    "boolean": (bool,),
    "whole number": (int, float),
    "number": (int, float),
    "string": (str,),
    "object": (dict,),
    "any": (object,),
}


def parse_config(
    config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int = 1, check_paths: bool = True
) -> Config:
    """``config``: the JSON object in DeepSpeed's dialect, or the path of a file that holds it.

    null means the key's default. ``check_paths``: also look at the swap directories of this machine. Raises
    ``ConfigError`` and nothing else."""
    raw = _load(config)
    given = _checked(raw)
    subsumed = tuple(path for path, _ in given if BY_PATH[path].standing is Standing.SUBSUMED)
    fields = _nested((path, value) for path, value in given if BY_PATH[path].standing is not Standing.SUBSUMED)
    for name in ("optimizer", "scheduler"):
        if isinstance(raw.get(name), Mapping):
            fields.setdefault(name, {})  # an empty one still lacks its type
    _resolve_batch_keys(fields, world_size)
    _merge_aio(fields)
    try:
        parsed = Config.model_validate({**fields, "subsumed": subsumed})
    except ValidationError as error:
        _raise_first(error, fields)
    refuse_unsupported(parsed)
    _check_offload(parsed)
    if check_paths:
        _check_swap_dirs(parsed)
    if subsumed:
        _log_subsumed(subsumed)
    return parsed


def refuse_unsupported(config: Config) -> None:
    """Refuse values that parse but that this engine does not serve, defaults included (a missing stage is 0)."""
    for key in BY_PATH.values():
        if key.accepts is None:
            continue
        value: object = config
        for name in key.path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            _check_accepted(key, value)


@functools.cache
def _log_subsumed(paths: tuple[str, ...]) -> None:
    """Once per process and set of keys."""
    for path in paths:
        _log.info("%s needs no setting: %s", path, BY_PATH[path].note)


def _load(config: Mapping[str, Any] | str | os.PathLike[str]) -> Raw:
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError("config", config, "must be a dict or the path of a JSON file")
    path = os.fspath(config)
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file, object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ConfigError("config", path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("config", path, f"is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("config", path, "must hold one JSON object")
    return raw


def _unique_keys(pairs: list[tuple[str, Any]]) -> Raw:
    seen: Raw = {}
    for name, value in pairs:
        if name in seen:
            raise ConfigError(name, value, "stands twice in the same object; remove one of the two")
        seen[name] = value
    return seen


def _checked(raw: Raw) -> list[tuple[str, Any]]:
    """(path, value) of every key that reaches the sections or is subsumed, each checked against the dialect."""
    given = []
    for path, value in _leaves(raw, ""):
        key = BY_PATH[path]
        if value is None or (_is_auto(value) and key.auto == "default"):
            continue
        if _is_auto(value) and key.auto == "refused":
            raise ConfigError(
                path, value, 'only a trainer that knows its own arguments can fill in "auto"; write a value'
            )
        if key.switch:
            _check_switch(key, value)
            continue
        if key.standing is Standing.REFUSED:
            _check_accepted(key, value)
            if not _has_field(path):
                continue
        if key.standing is Standing.SUBSUMED:
            _check_shape(key, value)
        given.append((path, value))
    return given


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        path = f"{prefix}{name}"
        if path in BY_PATH:
            yield path, value
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                yield from _leaves(value, f"{path}.")
            elif value is not None:
                raise ConfigError(path, value, "must be an object: {...}")
        else:
            raise ConfigError(path, value, _unknown(prefix, str(name)))


def _unknown(prefix: str, name: str) -> str:
    """What the writer of an unknown key may have meant."""
    siblings = {path[len(prefix) :].split(".")[0] for path in BY_PATH if path.startswith(prefix)}
    if close := difflib.get_close_matches(name, sorted(siblings), n=1):
        return f"unknown key; did you mean {prefix}{close[0]}?"
    everywhere: dict[str, str] = {}
    for path in BY_PATH:
        everywhere.setdefault(path.split(".")[-1], path)
    if close := difflib.get_close_matches(name, sorted(everywhere), n=1, cutoff=0.8):
        return f"unknown key here; did you mean {everywhere[close[0]]}?"
    return f"unknown key; known here: {', '.join(sorted(siblings))}"


def _check_accepted(key: Key, value: object) -> None:
    if key.accepts is not None and not any(_equal(value, accepted) for accepted in key.accepts):
        raise ConfigError(key.path, value, f"{key.note}; {key.remedy}")


def _check_switch(key: Key, value: object) -> None:
    """A section that is switched off passes, whatever else it holds."""
    if not isinstance(value, Mapping):
        raise ConfigError(key.path, value, f"{key.note}; {key.remedy}")
    if value.get(key.switch, False) is not False:
        raise ConfigError(f"{key.path}.{key.switch}", value[key.switch], f"{key.note}; {key.remedy}")


def _check_shape(key: Key, value: object) -> None:
    expected = _SHAPES[key.shape]
    fits = isinstance(value, expected) and (bool in expected or not isinstance(value, bool))
    if fits and key.shape == "whole number":
        fits = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not fits:
        raise ConfigError(key.path, value, f"must be a {key.shape}")


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _equal(value: object, accepted: object) -> bool:
    """Equality that does not take true for 1."""
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted


def _has_field(path: str) -> bool:
    """Whether a refused key has a field in the sections: its harmless values are part of the configuration."""
    model: Any = Config
    *sections, name = path.split(".")
    for section in sections:
        field = model.model_fields.get(section)
        model = field.annotation if field is not None else None
        if not hasattr(model, "model_fields"):
            return False
    return name in model.model_fields


def _nested(leaves: Iterator[tuple[str, Any]]) -> Raw:
    fields: Raw = {}
    for path, value in leaves:
        *sections, name = path.split(".")
        inner = fields
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return fields


def _resolve_batch_keys(fields: Raw, world_size: int) -> None:
    numbers: list[int | None] = []
    for name in _BATCH_KEYS:
        value = fields.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(name, value, "must be a whole number of at least 1")
        numbers.append(value)
    train, micro, accumulation = numbers
    sizes = resolve_batch(train=train, micro=micro, accumulation=accumulation, world_size=world_size)
    fields.update(zip(_BATCH_KEYS, sizes, strict=True))


def _merge_aio(fields: Raw) -> None:
    """``aio`` names two settings of ``io_daemon``; said twice they must agree."""
    for name, value in fields.get("aio", {}).items():
        own = fields.setdefault("io_daemon", {}).setdefault(name, value)
        if own != value:
            raise ConfigError(f"aio.{name}", value, f"contradicts io_daemon.{name} = {own}; remove one of the two")


def _raise_first(error: ValidationError, fields: Raw) -> NoReturn:
    problems = error.errors(include_url=False)
    first = problems[0]
    path, value = _located(first["loc"], fields)
    if first["type"] == "missing":
        value, remedy = None, "is required"
    elif first["type"] == "union_tag_not_found":
        path, value, remedy = f"{path}.type", None, "is required"
    elif first["type"] == "union_tag_invalid":
        path, value, remedy = f"{path}.type", first["ctx"]["tag"], f"must be one of {first['ctx']['expected_tags']}"
    elif first["type"] == "extra_forbidden":
        remedy = f"{fields['scheduler']['type']} takes no such parameter"
    else:
        remedy = first["msg"].replace("Input should be", "must be")
    others = sorted({_located(problem["loc"], fields)[0] for problem in problems[1:]} - {path})
    if others:
        remedy += f" (also wrong: {', '.join(others)})"
    raise ConfigError(path, value, remedy) from None


def _located(location: tuple[int | str, ...], fields: Raw) -> tuple[str, object]:
    """Dotted path and value; pydantic's own names of union members stand in no JSON and are left out."""
    names: list[str] = []
    value: Any = fields
    for i, name in enumerate(location):
        if isinstance(value, Mapping) and name not in value and i < len(location) - 1:
            continue
        names.append(str(name))
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list | tuple) and isinstance(name, int):
            value = value[name] if name < len(value) else None
    return ".".join(names), value


def _check_offload(config: Config) -> None:
    zero = config.zero_optimization
    for name in ("offload_param", "offload_optimizer"):
        offload: OffloadParam | OffloadOptimizer = getattr(zero, name)
        path = f"zero_optimization.{name}"
        if offload.device == "nvme" and not config.swap_dirs:
            raise ConfigError(
                f"{path}.nvme_path", None, "device nvme needs a directory: write nvme_path here or io_daemon.swap_dirs"
            )
    socket = config.io_daemon.socket
    if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            "io_daemon.socket", socket, f"a Unix socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes; shorten it"
        )


def _check_swap_dirs(config: Config) -> None:
    for key, path in config.swap_dir_keys():
        if not os.path.exists(path):
            raise ConfigError(key, path, f"does not exist: mkdir -p {path}, on the NVMe filesystem")
        if not os.path.isdir(path):
            raise ConfigError(key, path, "is not a directory; name the directory that swap files go to")
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            remedy = f"is not writable by uid {os.getuid()} ({error.strerror}): chown or chmod it, or name another"
            raise ConfigError(key, path, remedy) from error
