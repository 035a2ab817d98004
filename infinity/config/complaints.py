"""Everything that is wrong with one configuration, told in one error."""

from __future__ import annotations

import json

from infinity.errors import CombinedConfigError, ConfigError


class Complaints:
    """What was found so far, one for each key: what follows from a complaint about the same key is not said."""

    def __init__(self) -> None:
        self._found: dict[str, ConfigError] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def has(self, key: str) -> bool:
        return key in self._found

    def add(self, key: str, value: object, remedy: str) -> None:
        self.take(ConfigError(key, value, remedy))

    def take(self, error: ConfigError) -> None:
        self._found.setdefault(error.key, error)

    def raise_all(self, old_name_of: dict[str, str] | None = None) -> None:
        """Raise a ``ConfigError``, or ``CombinedConfigError`` if there are several; return if there are none.

        ``old_name_of``: today's paths whose values an old name gave; a complaint about one names what was written."""
        found = [_as_written(error, old_name_of or {}) for error in self._found.values()]
        if len(found) == 1:
            raise found[0]
        if found:
            raise CombinedConfigError(found)


def without_quotes(value: object) -> str:
    """What to write instead of a number or a boolean in quotes; empty for anything else."""
    if not isinstance(value, str):
        return ""
    try:
        meant = json.loads(value.strip().lower())
    except ValueError:
        return ""
    return f": write {value.strip().lower()} without quotes" if isinstance(meant, bool | int | float) else ""


def _as_written(error: ConfigError, old_name_of: dict[str, str]) -> ConfigError:
    old = old_name_of.get(error.key)
    return error if old is None else ConfigError(error.key, error.value, f"{error.remedy} ({old} says so)")
