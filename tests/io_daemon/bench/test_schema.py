"""The documented schema is that of the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from io_daemon.bench.report.schema import DEFAULT_PATH, main, report_schema, schema_text
from tests.support.bench_reports import RESULTS, report

ROOT = Path(__file__).resolve().parents[3]


def test_the_committed_schema_is_current() -> None:
    committed = (ROOT / DEFAULT_PATH).read_text()
    assert committed == schema_text(), "run: python -m io_daemon.bench.report.schema"


def test_writes_where_it_is_told(tmp_path: Path) -> None:
    assert main([str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == report_schema()


@pytest.mark.parametrize("kind", RESULTS)
def test_every_field_of_a_report_is_in_the_schema(kind: str) -> None:
    schema = report_schema()
    definitions = schema["$defs"]
    made = json.loads(report(kind).model_dump_json())
    assert set(made) == set(definitions["Report"]["required"])
    name = type(report(kind).result).__name__
    assert set(made["result"]) == set(definitions[name]["required"])
    assert set(made["machine"]) == set(definitions["MachineFacts"]["required"])
    assert {"$ref": f"#/$defs/{name}"} in definitions["Report"]["properties"]["result"]["anyOf"]


def test_every_reference_is_defined() -> None:
    schema = report_schema()
    definitions = {f"#/$defs/{name}" for name in schema["$defs"]}

    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if "$ref" in node else set()
            return own.union(*map(references, node.values()))
        return set().union(*map(references, node)) if isinstance(node, list) else set()

    assert references(schema) <= definitions
