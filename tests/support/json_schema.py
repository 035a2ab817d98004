"""As much of JSON Schema as our own schemas use. A word of it that is not known here is an error."""

from __future__ import annotations

from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "number": (int, float),
    "integer": (int, float),
    "null": (type(None),),
}
SILENT = {
    "$schema",
    "title",
    "description",
    "default",
    "deprecated",
    "properties",
    "additionalProperties",
    "prefixItems",
}


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """A line for each thing that is wrong; none if the value is allowed."""
    found = []
    for word, rule in schema.items():
        if word not in SILENT and not _holds(value, word, rule):
            found.append(f"{where}: {value!r} breaks {word} {rule!r}")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name, inner in value.items():
            if name in known:
                found += problems(inner, known[name], f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                found.append(f"{where}.{name} is unknown")
    if isinstance(value, list):
        for place, (inner, rule) in enumerate(zip(value, schema.get("prefixItems", []), strict=False)):
            found += problems(inner, rule, f"{where}[{place}]")
    return found


def _holds(value: Any, word: str, rule: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match word:
        case "type":
            return any(_is(value, name) for name in ([rule] if isinstance(rule, str) else rule))
        case "anyOf":
            return any(not problems(value, each) for each in rule)
        case "const":
            return _same(value, rule)
        case "enum":
            return any(_same(value, each) for each in rule)
        case "items":
            return not isinstance(value, list) or all(not problems(each, rule) for each in value)
        case "minimum":
            return not is_number or value >= rule
        case "maximum":
            return not is_number or value <= rule
        case "exclusiveMinimum":
            return not is_number or value > rule
        case "exclusiveMaximum":
            return not is_number or value < rule
        case "multipleOf":
            return not is_number or value % rule == 0
        case "minLength":
            return not isinstance(value, str) or len(value) >= rule
        case "required":
            return not isinstance(value, dict) or set(rule) <= value.keys()
        case "minItems":
            return not isinstance(value, list) or len(value) >= rule
        case "maxItems":
            return not isinstance(value, list) or len(value) <= rule
        case _:
            raise AssertionError(f"the checker does not know {word!r}")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int | float) and float(value).is_integer()
    return isinstance(value, TYPES[name])


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
