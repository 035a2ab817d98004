"""The options that every worker of ``benchmarks.compare`` has. Needs nothing but the standard library."""

from __future__ import annotations

import argparse
from typing import Final

DTYPES: Final = ("bf16", "fp32")


def worker_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--swap-dir", required=True)
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of weights, gradients and products")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--clipping", type=float, default=0.0, help="largest norm of the gradients (default: any)")
    return parser
