"""The dialect as a JSON Schema, for editors and for checks before a file ever reaches a machine.

It is made from the table of keys and the sections' own schemas. It says what one value may be; what several say
together (batch sizes, a path for nvme, what a schedule requires) only ``infinity config check`` knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

from pydantic import BaseModel

from infinity.config.dialect import KEYS, Key, Shape, Standing
from infinity.config.old_names import OLD_NAMES, OldName
from infinity.config.optimizer import SPELLINGS
from infinity.config.sections import Config

Schema = dict[str, Any]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[Shape, Schema] = {
    "boolean": {"type": "boolean"},
    "whole number": {"type": "integer"},
    "number": {"type": "number"},
    "string": {"type": "string"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "any": {},
}
_AUTO: Schema = {"const": "auto", "description": "what a trainer fills in, or the default"}


def json_schema() -> Schema:
    """A schema of every key that is not refused whatever it says; nothing else is allowed."""
    root = _section()
    for key in KEYS:
        _put(root, key.path, _of_key(key))
    for old in sorted(OLD_NAMES, key=lambda old: old.if_boolean):
        _put(root, old.path, _of_old_name(old, root))
    root["properties"] = {name: _or_null(schema) for name, schema in root["properties"].items()}
    return {"$schema": DIALECT, "title": "Configuration of infinity: DeepSpeed's JSON", **root}


def _section() -> Schema:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _of_key(key: Key) -> Schema:
    note = f"{key.note}; {key.remedy}" if key.remedy else key.note
    described = {"description": note}
    if key.switch:
        switched_off = {
            "type": "object",
            "properties": {key.switch: {"enum": [*key.off, None]}},
            "required": [key.switch],
        }
        return {"anyOf": [switched_off, {"const": {}}, {"type": "null"}], **described}
    if key.accepts is not None:
        return {"enum": [*key.accepts, None, *(["auto"] if key.auto == "default" else [])], **described}
    if key.standing is Standing.REFUSED:
        return {"type": "null", **described}
    value = _TYPES[key.shape] if key.standing is Standing.SUBSUMED else _any_of(list(_of_fields(Config, key.path)))
    if key.path == "optimizer.type":
        value = {"enum": [*value["enum"], *SPELLINGS]}
    return {"anyOf": [value, {"type": "null"}, _AUTO], **described}


def _of_old_name(old: OldName, root: Schema) -> Schema:
    deprecated = {"deprecated": True, "description": f"old name: write {old.write}"}
    today = _look_up(root, old.path)
    if old.if_boolean:
        return {"anyOf": [today, {"type": "boolean", **deprecated}]}
    if old.boolean:
        return {"type": ["boolean", "null"], **deprecated}
    return {**(_look_up(root, old.write) or {}), **deprecated}


def _of_fields(model: type[BaseModel], path: str) -> Iterator[Schema]:
    """The schema of a field in every variant of its section that has it."""
    name, _, rest = path.partition(".")
    if name not in model.model_fields:
        return
    if not rest:
        schema = model.model_json_schema()["properties"][name]
        yield {word: value for word, value in schema.items() if word != "title"}
        return
    for section in _models(model.model_fields[name].annotation):
        yield from _of_fields(section, rest)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes in an annotation: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _any_of(schemas: list[Schema]) -> Schema:
    """One schema of several variants; constants of a discriminator become one list."""
    if len(schemas) > 1 and all("const" in schema or "enum" in schema for schema in schemas):
        return {"enum": [word for schema in schemas for word in schema.get("enum", [schema.get("const")])]}
    different = [schema for i, schema in enumerate(schemas) if schema not in schemas[:i]]
    return different[0] if len(different) == 1 else {"anyOf": different}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if schema.get("type") == "object" else schema


def _put(root: Schema, path: str, schema: Schema) -> None:
    *sections, name = path.split(".")
    inner = root
    for section in sections:
        inner = inner["properties"].setdefault(section, _section())
    inner["properties"][name] = schema


def _look_up(root: Schema, path: str) -> Schema:
    schema: Schema = root
    for name in path.split("."):
        schema = schema.get("properties", {}).get(name, {})
    return schema
