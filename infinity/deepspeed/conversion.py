#!/usr/bin/env python3
"""The weights of a checkpoint in a dtype as files that others load: zero_to_torch.py CHECKPOINT OUT --dtype bf16."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.deepspeed.fp32_weights import OUTPUT_DTYPE_NAMES, convert_zero_checkpoint_to_state_dict
from infinity.deepspeed.recovery import options


def main(args: Sequence[str] | None = None) -> None:
    """Convert by these words of a command line; by default the process's own."""
    parser = options(__doc__)
    parser.add_argument("--dtype", choices=sorted(OUTPUT_DTYPE_NAMES), required=True, help="of floating-point tensors")
    parser.add_argument("-d", "--debug", action="store_true", help="taken for the dialect's sake")
    given = vars(parser.parse_args(args))
    del given["debug"]
    convert_zero_checkpoint_to_state_dict(**given)


if __name__ == "__main__":
    main()
