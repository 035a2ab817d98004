"""A user's JSON, from a dict or a file. As in DeepSpeed a file may have comments, and commas behind the last entry, and
be Hjson where the package ``hjson`` is installed, which DeepSpeed brings along."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from infinity.config.complaints import Complaints
from infinity.errors import ConfigError

Raw = dict[str, Any]
Source = Mapping[str, Any] | str | os.PathLike[str]
_STRING: Final = r'"(?:\\.|[^"\\\n])*"'
_COMMENTS: Final = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMAS: Final = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def load(config: Source, complaints: Complaints) -> Raw:
    """The JSON object. Raises ``ConfigError`` where there is none; keys that stand twice are complained of."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError("config", config, "must be a dict or the path of a JSON file")
    path = os.fspath(config)
    try:
        # some editors begin a file with a byte order mark
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError("config", path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config", path, f"is not JSON in UTF-8: {error}; save it in that encoding") from error
    except ValueError as error:
        raise ConfigError("config", path, f"cannot be read: {error}") from error
    return read_text(text, path, complaints)


def read_text(text: str, path: str, complaints: Complaints) -> Raw:
    """The JSON object in ``text``, as ``load`` gives it; ``path`` is what errors call it."""

    twice: list[tuple[Raw, str, Any]] = []

    def unique(pairs: list[tuple[str, Any]]) -> Raw:
        seen: Raw = {}
        for name, value in pairs:
            if name in seen:
                twice.append((seen, name, value))
            seen.setdefault(name, value)
        return seen

    try:
        raw = _parsed(text, path, unique, twice.clear)
    except RecursionError as error:
        raise ConfigError("config", path, "is nested too deeply: no section is more than a few levels deep") from error
    if not isinstance(raw, dict):
        raise ConfigError("config", path, "must hold one JSON object")
    prefixes = dict(_prefixes(raw, "")) if twice else {}
    for section, name, value in twice:
        prefix = prefixes.get(id(section), "")
        complaints.add(f"{prefix}{name}", value, "stands twice in the same object; remove one of the two")
    return raw


def _parsed(
    text: str, path: str, object_of: Callable[[list[tuple[str, Any]]], Raw], begin_anew: Callable[[], None]
) -> Any:
    """What is in ``text``, be it JSON or, where that can be read, Hjson; before that ``begin_anew`` is called. Raises
    ``ConfigError`` if it is neither."""
    plain = _LAST_COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))
    try:
        return json.loads(plain, object_pairs_hook=object_of)
    except ValueError as error:
        remedy, cause = f"is not JSON: {error}", error
    if plain.strip():  # nothing at all is an empty object in Hjson, and a file that went wrong here
        try:
            import hjson  # type: ignore[import-untyped]

            begin_anew()
            return hjson.loads(text, object_pairs_hook=object_of)
        except ImportError:
            remedy += "; if it is Hjson, pip install infinity[hjson]"
        except ValueError as error:
            remedy += f"; nor Hjson: {error}"
    raise ConfigError("config", path, remedy) from cause


def _prefixes(section: Raw, prefix: str) -> Iterator[tuple[int, str]]:
    """(identity, dotted path with its last dot) of an object and of all inside it."""
    yield id(section), prefix
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _prefixes(value, f"{prefix}{name}.")


def _blank(found: re.Match[str]) -> str:
    """Spaces in the place of what is not JSON, so that errors name the lines and columns of the file."""
    return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])
