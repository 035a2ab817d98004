"""A user's JSON, from a dict or a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from infinity.config.complaints import Complaints
from infinity.errors import ConfigError

Raw = dict[str, Any]
Source = Mapping[str, Any] | str | os.PathLike[str]


def load(config: Source, complaints: Complaints) -> Raw:
    """The JSON object. Raises ``ConfigError`` where there is none; keys that stand twice are complained of."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError("config", config, "must be a dict or the path of a JSON file")

    def unique(pairs: list[tuple[str, Any]]) -> Raw:
        seen: Raw = {}
        for name, value in pairs:
            if name in seen:
                complaints.add(name, value, "stands twice in the same object; remove one of the two")
            seen.setdefault(name, value)
        return seen

    path = os.fspath(config)
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file, object_pairs_hook=unique)
    except OSError as error:
        raise ConfigError("config", path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("config", path, f"is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("config", path, "must hold one JSON object")
    return raw
