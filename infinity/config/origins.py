"""Where each value of a configuration comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from infinity.config.sections import Config


class Origin(Enum):
    GIVEN = "given"
    DEFAULT = "default"
    DERIVED = "derived"
    MAPPED = "mapped from an old name"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    origin: Origin
    source: str = ""
    """What a derived value follows from, the old name of a mapped one, or "auto" for a default that was written so."""

    def __str__(self) -> str:
        match self.origin:
            case Origin.MAPPED:
                return f"mapped from {self.source}"
            case Origin.DERIVED:
                return f"derived from {self.source}"
            case _:
                return f"{self.origin.value}, {self.source}" if self.source else self.origin.value


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration, and for every dotted path of it where the value comes from."""

    config: Config
    provenance: Mapping[str, Provenance]

    def values(self) -> dict[str, Any]:
        """The configuration as JSON that ``initialize`` takes and resolves to the same."""
        return self.config.model_dump(mode="json", exclude={"subsumed", "old_names"})

    def rows(self) -> Iterator[tuple[str, Any, Provenance]]:
        """(dotted path, value, where it comes from), in the order of the sections."""
        for path, value in flattened(self.values()):
            yield path, value, self.provenance[path]


def flattened(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is no section itself."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def trace_origins(
    config: Config,
    *,
    given: Mapping[str, object],
    auto: frozenset[str],
    derived: Mapping[str, str],
    old_name_of: Mapping[str, str],
) -> Resolved:
    """``given``: paths that the JSON holds, after old names were rewritten; ``auto``: those that say "auto" and so mean
    the default; ``derived``: paths whose values follow from others, with those others."""

    def origin(path: str) -> Provenance:
        if path in derived:
            return Provenance(origin=Origin.DERIVED, source=derived[path])
        if path in old_name_of:
            return Provenance(origin=Origin.MAPPED, source=old_name_of[path])
        if path in given:
            return Provenance(origin=Origin.GIVEN)
        return Provenance(origin=Origin.DEFAULT, source='"auto"' if path in auto else "")

    values = config.model_dump(mode="json", exclude={"subsumed", "old_names"})
    return Resolved(config=config, provenance={path: origin(path) for path, _ in flattened(values)})
