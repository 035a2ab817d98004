"""The dialect as documentation, from the same table that the parser uses."""

from __future__ import annotations

from collections import Counter

from infinity.config.dialect import KEYS, Key, Standing


def as_rows() -> list[dict[str, str]]:
    """One row per key, in the table's order."""
    return [{"key": key.path, "standing": key.standing.value, "note": note_of(key)} for key in KEYS]


def as_markdown() -> str:
    """A table, works first, then subsumed, then refused."""
    counts = Counter(key.standing for key in KEYS)
    lines = [
        ", ".join(f"{counts[standing]} {standing.value}" for standing in Standing),
        "",
        "| key | | |",
        "|---|---|---|",
    ]
    for standing in Standing:
        lines += [f"| `{key.path}` | {standing.value} | {note_of(key)} |" for key in KEYS if key.standing is standing]
    return "\n".join(lines)


def note_of(key: Key) -> str:
    """What the key does or why not, and what passes of one that is refused."""
    if key.switch:
        return f"{key.note}; passes with `{key.switched_off}`"
    if key.accepts:
        accepted = " or ".join(f"`{_json(value)}`" for value in key.accepts)
        return f"{key.note}; only {accepted} passes"
    return key.note


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')
