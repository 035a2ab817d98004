"""The sections' own checks, told in the JSON's words."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from infinity.config.complaints import Complaints, without_quotes
from infinity.config.load import Raw
from infinity.config.optimizer import reason_against
from infinity.config.sections import Config


def validated(fields: Raw, complaints: Complaints, *, silent: Container[str]) -> Config:
    """``fields`` as a ``Config``. What is wrong is complained of and left out, so that the rest can be judged, too.

    ``silent``: paths of which nothing is said: a trainer will fill them in, or they follow from others."""
    while True:
        try:
            return Config.model_validate(fields)
        except ValidationError as error:
            remedies: dict[str, list[str]] = {}
            values: dict[str, object] = {}
            for problem in error.errors(include_url=False):
                path, value, remedy = _told(problem, fields)
                remedies.setdefault(path, []).append(remedy)
                values[path] = value
            for path, told in remedies.items():
                # of a list where a number may stand, what is wrong inside it says more
                if path not in silent and not any(other.startswith(f"{path}.") for other in remedies):
                    complaints.add(path, values[path], _either(told, values[path]))
            _leave_out(fields, remedies)


def _told(problem: ErrorDetails, fields: Raw) -> tuple[str, object, str]:
    """(dotted path, value, remedy) of one of pydantic's problems."""
    path, value = _located(problem["loc"], fields, is_missing=problem["type"] == "missing")
    match problem["type"]:
        case "missing":
            return path, None, "is required"
        case "union_tag_not_found":
            return f"{path}.type", None, "is required"
        case "union_tag_invalid":
            tag = problem["ctx"]["tag"]
            why = f"; {reason_against(tag)}" if path == "optimizer" else ""
            return f"{path}.type", tag, f"must be one of {problem['ctx']['expected_tags']}{why}"
        case "extra_forbidden":
            return path, value, f"{fields[path.split('.')[0]]['type']} takes no such parameter"
        case _:
            return path, value, _in_words_of_json(problem["msg"]) + without_quotes(value)


def _in_words_of_json(message: str) -> str:
    return re.sub(r"^(Input|String|List|Tuple) should ", "must ", message).replace("a valid tuple", "a list")


def _either(remedies: Sequence[str], value: object) -> str:
    """What may stand there, each said once; what to write without quotes, too."""
    first, *others = remedies
    return "; or ".join(dict.fromkeys([first, *(each.removesuffix(without_quotes(value)) for each in others)]))


def _located(location: tuple[int | str, ...], fields: Raw, *, is_missing: bool) -> tuple[str, object]:
    """Dotted path and value; pydantic's own names of union members stand in no JSON and are left out.

    ``is_missing``: the last name is that of what is not there."""
    names: list[str] = []
    value: Any = fields
    for i, name in enumerate(location):
        if isinstance(value, Mapping):
            if name not in value and not (is_missing and i == len(location) - 1):
                continue
            value = value.get(name)
        elif isinstance(value, list | tuple) and isinstance(name, int):
            value = value[name] if name < len(value) else None
        else:
            continue
        names.append(str(name))
    return ".".join(names), value


def _leave_out(fields: Raw, paths: Mapping[str, object]) -> None:
    """What is wrong goes; what is missing takes its section along."""
    for path in paths:
        inner: Any = fields
        for name in path.split("."):
            if isinstance(inner, Mapping) and name in inner and isinstance(inner[name], Mapping):
                inner = inner[name]
            else:
                break
        if isinstance(inner, dict) and name in inner:
            del inner[name]
        else:
            fields.pop(path.split(".")[0], None)  # gone already if something else was missing there
