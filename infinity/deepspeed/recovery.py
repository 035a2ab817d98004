#!/usr/bin/env python3
"""The fp32 weights of a checkpoint as files that others load: zero_to_fp32.py CHECKPOINT OUT."""

from __future__ import annotations

import argparse

from infinity.deepspeed.fp32_weights import convert_zero_checkpoint_to_fp32_state_dict


def options(description: str | None) -> argparse.ArgumentParser:
    """What both converters of checkpoints are asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint_dir", help="what was given to save_checkpoint")
    parser.add_argument("output_dir", help="made where it is not there")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch's files")
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the one called latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    return parser


def main() -> None:
    convert_zero_checkpoint_to_fp32_state_dict(**vars(options(__doc__).parse_args()))


if __name__ == "__main__":
    main()
