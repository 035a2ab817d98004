"""The JSON schema of ``--json``. ``python -m io_daemon.bench.report.schema [FILE]`` writes it; default: the docs'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from io_daemon.bench.result import Report
from io_daemon.machine.facts import MachineFacts

DEFAULT_PATH: Final = Path("docs/bench-schema.json")
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def report_schema() -> dict[str, Any]:
    """The schema of a whole report. ``machine`` is described too, though a reader takes it as it comes."""
    _, schema = models_json_schema([(Report, "serialization"), (MachineFacts, "serialization")])
    definitions = schema["$defs"]
    for definition in definitions.values():
        definition["required"] = list(definition["properties"])  # what is written has every field, also with a default
    definitions["Report"]["properties"]["machine"] = {"$ref": "#/$defs/MachineFacts"}
    return {"$schema": DIALECT, "title": "Report of io-daemon bench", "$ref": "#/$defs/Report", "$defs": definitions}


def schema_text() -> str:
    return json.dumps(report_schema(), indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else DEFAULT_PATH
    path.write_text(schema_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
