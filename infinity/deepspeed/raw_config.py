"""The configuration as DeepSpeed's users give it: a dict, a file, or an argument of the command line."""

from __future__ import annotations

import base64
import contextlib
import copy
import os
from collections.abc import Mapping
from typing import Any, Final

from infinity.config.complaints import Complaints
from infinity.config.load import load, read_text
from infinity.errors import ConfigError

_OFFLOADS_WEIGHTS: Final = ("offload_param", "cpu_offload_param", "cpu_offload_params")


def raw_config(config: Any, args: Any = None, config_params: Any = None) -> dict[str, Any]:
    """The raw JSON as a dict of the caller's own.

    Args:
        config: a dict, a path, or the JSON itself in URL-safe base64.
        args: what a script's parser gave; its ``deepspeed_config`` or ``deepscale_config`` is a path, too.
        config_params: an old name of ``config``.

    Raises:
        ConfigError: none is given, or two that differ.
    """
    named = [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    given = [each for each in (config, config_params, *named) if each is not None]
    if not given:
        raise ConfigError("config", None, "pass a dict or a path as config, or as --deepspeed_config")
    complaints = Complaints()
    loaded = [_load(each, complaints) for each in given]
    complaints.raise_all()
    if any(each != loaded[0] for each in loaded):
        raise ConfigError("config", "given twice", "config and args.deepspeed_config differ: pass one of them")
    return copy.deepcopy(dict(loaded[0]))


def _load(given: Any, complaints: Complaints) -> dict[str, Any]:
    text = ""
    if isinstance(given, str) and not os.path.exists(given):
        with contextlib.suppress(ValueError):  # no base64, or none of a text: it is the path of no file
            text = base64.b64decode(given, altchars=b"-_", validate=True).decode()
    return read_text(text, given, complaints) if text.lstrip().startswith("{") else load(given, complaints)


def section_of(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of it; an empty one where it is not an object."""
    section = raw.get(name)
    return section if isinstance(section, Mapping) else {}


def zero_of(raw: Mapping[str, Any]) -> Any:
    """The section ``zero_optimization``; a boolean in its place is its old form."""
    zero = raw.get("zero_optimization", {})
    return {"stage": int(zero)} if isinstance(zero, bool) else zero


def idle_offload(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``zero_optimization`` offloads weights where it does nothing: below stage 3, where they stay whole."""
    zero, stage = zero_of(raw), stage_of(raw)
    if not isinstance(zero, Mapping) or not isinstance(stage, int) or stage >= 3:
        return {}
    asked = {key: zero[key] for key in _OFFLOADS_WEIGHTS if zero.get(key)}
    return {key: value for key, value in asked.items() if section_of(zero, key).get("device") != "none"}


def without_idle_offload(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same without ``idle_offload``, which infinity's own configuration refuses."""
    idle = idle_offload(raw)
    kept = {key: value for key, value in zero_of(raw).items() if key not in idle} if idle else {}
    return {**raw, "zero_optimization": kept} if idle else dict(raw)


def stage_of(raw: Mapping[str, Any]) -> Any:
    """ZeRO's stage, as it is written; 0 where there is no section."""
    zero = zero_of(raw)
    return zero.get("stage", 0) if isinstance(zero, Mapping) else 0
