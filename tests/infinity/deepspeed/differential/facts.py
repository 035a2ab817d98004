"""What a real DeepSpeed returned, kept beside the cases, and what differs from it.

``python -m tests.infinity.deepspeed.differential.facts record FOUND.json`` keeps what ``run`` found under a real one;
``… facts compare FOUND.json`` holds what it found here against that. ``… facts against PLAIN.json FOUND.json`` holds
it against what ``run --plain`` found, number by number and bit by bit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.infinity.deepspeed.differential.case import CASES, differences
from tests.infinity.deepspeed.differential.decided import undecided
from tests.infinity.deepspeed.differential.run import load_cases

FACTS: Final = Path(__file__).with_name("facts.json")
_NUMBERS: Final = re.compile(r": -?[\d.]\S* != -?[\d.]\S*$")
DIGITS: Final = 9
"""Significant ones; the closest comparison takes 6."""


def record(found: Mapping[str, Any]) -> str:
    """Keep the answers of those cases that the real one has passed; how many, in words."""
    load_cases()
    kept = {name: fact for name, fact in read().items() if name in CASES and name not in found}
    kept |= {name: _rounded(each["value"]) for name, each in found.items() if "value" in each and name in CASES}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    FACTS.write_text(f"{{\n{lines}\n}}\n")
    return f"{len(kept)} of {len(CASES)} cases pass on the real one"


def read() -> dict[str, Any]:
    """The answers by the names of their cases."""
    facts: dict[str, Any] = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    return facts


def compare(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of every case that was run and has a fact, where its answer differs; an empty list where it does not."""
    load_cases()
    return {
        name: [_raised(found[name]["error"])]
        if "error" in found[name]
        else differences(fact, found[name]["value"], CASES[name].relative, CASES[name].absolute)
        for name, fact in read().items()
        if name in found
    }


def against(plain: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of every case that plain torch has run, the numbers that are not its bits, or the error, if it is not decided."""
    return {
        name: undecided(name, [_raised(found[name]["error"])])
        if "error" in found[name]
        else [line for line in differences(each["value"], found[name]["value"], 0.0, 0.0) if _NUMBERS.search(line)]
        for name, each in plain.items()
        if "value" in each and name in found
    }


def _raised(traceback: str) -> str:
    """The error and the beginning of its message, of which the rest is indented."""
    return f"raised: {[line for line in traceback.splitlines() if not line.startswith(' ')][-1]}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return {key: _rounded(each) for key, each in value.items()} if isinstance(value, dict) else value


def main(words: list[str]) -> None:
    """The command."""
    what, path, *others = words
    found = json.loads(Path(path).read_text())
    if what == "record":
        print(record(found))
        return
    answers = against(found, json.loads(Path(others[0]).read_text())) if what == "against" else compare(found)
    if "--json" in others:
        print(json.dumps(answers))
        return
    if what == "against":
        for name, lines in answers.items():
            for line in lines[:3]:
                print(f"{name}: {line[:400]}")
        print(f"{sum(not lines for lines in answers.values())} of {len(answers)} cases have plain torch's bits")
        return
    rest = {name: undecided(name, lines) for name, lines in answers.items()}
    for name, lines in rest.items():
        for line in lines[:3]:
            print(f"{name}: {line[:400]}")
    agree = sum(not lines for lines in answers.values())
    decided = sum(bool(lines) and not rest[name] for name, lines in answers.items())
    print(f"{agree} of {len(answers)} cases agree with the real one, {decided} differ as decided")


if __name__ == "__main__":
    main(sys.argv[1:])
