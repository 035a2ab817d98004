"""``infinity as-deepspeed COMMAND …``: any command, whose ``import deepspeed`` is infinity, as that of its children."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from infinity.commands.running import environment_of, run_child

DESCRIPTION = """\
Run a command in which `import deepspeed` is infinity, in it and in all that it starts: accelerate launch …, deepspeed
--num_gpus 2 train.py …, python train.py, pytest. Nothing is installed: a directory is put first on PYTHONPATH and PATH,
and a DeepSpeed that is installed stays as it is. The exit code is the command's."""


def as_deepspeed(words: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="infinity as-deepspeed",
        usage="infinity as-deepspeed COMMAND ...",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if not words or words[0].startswith("-"):
        parser.parse_args(list(words))
        parser.error("no command given")
    return run_child(words, environment_of(as_deepspeed=True))
