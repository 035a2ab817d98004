"""One rank of ``deepspeed train.py``: the variables and the argument that DeepSpeed gives it, then the script itself.

Torchrun starts ``python -m infinity.commands.deepspeed_rank [--module] [--no_python] [--no_local_rank] script …``; it
becomes the script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from infinity.commands.running import EXIT_NOT_FOUND, environment_of


def command_of(parsed: argparse.Namespace, local_rank: str) -> list[str]:
    """What the rank runs."""
    python = [] if parsed.no_python else [sys.executable, "-u", *(["-m"] if parsed.module else [])]
    number = [] if parsed.no_local_rank else [f"--local_rank={local_rank}"]
    return [*python, parsed.script, *number, *parsed.arguments]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deepspeed", description=__doc__)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_python", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(words)
    own = environment_of()
    variables = {
        **own,
        "LOCAL_SIZE": own["LOCAL_WORLD_SIZE"],
        "CROSS_RANK": own["GROUP_RANK"],
        "CROSS_SIZE": own["GROUP_WORLD_SIZE"],
    }
    command = command_of(parsed, own["LOCAL_RANK"])
    program = shutil.which(command[0], path=variables.get("PATH"))
    if program is None:
        print(f"deepspeed: {command[0]}: no such program", file=sys.stderr)
    else:
        os.execve(program, command, variables)
    return EXIT_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main())
