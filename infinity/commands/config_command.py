"""``infinity config``: check a file, list the keys, print the schema."""

from __future__ import annotations

import json

from infinity.config import Resolved, resolve_config
from infinity.config.dialect import BY_PATH
from infinity.errors import CombinedConfigError, ConfigError
from io_daemon.command.outcome import EXIT_OK, EXIT_USAGE


def check(file: str, *, world_size: int, check_paths: bool, as_json: bool) -> int:
    """Print the configuration as it is read and where each value comes from. What is wrong with it is all told."""
    try:
        resolved = resolve_config(file, world_size=world_size, check_paths=check_paths)
    except ConfigError as error:
        if not as_json:
            raise
        found = error.complaints if isinstance(error, CombinedConfigError) else (error,)
        print(json.dumps({"complaints": [_complaint(each) for each in found]}, indent=2, default=repr))
        return EXIT_USAGE
    print(json.dumps(_as_json(resolved), indent=2) if as_json else _as_text(resolved, file, world_size))
    return EXIT_OK


def keys(*, as_json: bool) -> int:
    """Print every key of the dialect and what becomes of it."""
    from infinity.config.reference import as_markdown, as_rows

    print(json.dumps(as_rows(), indent=2) if as_json else as_markdown())
    return EXIT_OK


def schema() -> int:
    """Print the JSON Schema of the dialect."""
    from infinity.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return EXIT_OK


def _complaint(error: ConfigError) -> dict[str, object]:
    return {"key": error.key, "value": error.value, "remedy": error.remedy}


def _as_json(resolved: Resolved) -> dict[str, object]:
    return {
        "config": resolved.values(),
        "origins": {
            path: {"origin": origin.origin.value, **({"source": origin.source} if origin.source else {})}
            for path, origin in resolved.provenance.items()
        },
        "subsumed": {path: BY_PATH[path].note for path in resolved.config.subsumed},
        "notes": list(resolved.config.notes),
    }


def _as_text(resolved: Resolved, file: str, world_size: int) -> str:
    config = resolved.config
    rows = [(f"{path} = {json.dumps(value)}", str(origin)) for path, value, origin in resolved.rows()]
    width = max(len(left) for left, _ in rows)
    accumulation = config.gradient_accumulation_steps
    each = f"{config.train_micro_batch_size_per_gpu} x {accumulation} micro-batches x {world_size} ranks"
    return "\n".join(
        [
            f"{file}: every key is served",
            f"  batch: {config.train_batch_size} samples = {each}",
            *(f"  {note}" for note in config.notes),
            *(f"  {path} needs no setting: {BY_PATH[path].note}" for path in config.subsumed),
            *(f"  {left:{width}}  {origin}" for left, origin in rows),
        ]
    )
