"""What ``bench step`` replays, where and beside what; checked once."""

from __future__ import annotations

import argparse
from typing import Annotated, Final, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from io_daemon.bench.settings import WRITE_LIMIT_BYTES, Directories
from io_daemon.command.sizes import parse_bytes
from io_daemon.config import EngineName, is_text
from io_daemon.errors import ConfigError
from io_daemon.policy.step_trace import shipped_names
from io_daemon.shared.protocol import PAGE_BYTES

DEFAULT_SIZE_BYTES: Final = 8 << 30


def _text(name: str) -> str:
    if not is_text(name):
        raise ConfigError("trace", ascii(name), "is no UTF-8, which reports are: give the file another name")
    return name


class StepSettings(BaseModel):
    """Settings of ``bench step``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directories: Directories
    trace: Annotated[str, AfterValidator(_text)]
    """A file, or the name of a trace that ships with the package."""
    engine: EngineName | None = None
    """None, also below: what a sweep found best here, else the daemon's default."""
    bs: Annotated[int, Field(ge=PAGE_BYTES, le=1 << 30, multiple_of=PAGE_BYTES)] | None = None
    iodepth: Annotated[int, Field(ge=1, le=4096)] | None = None
    verify: bool = True
    """Checksums of blocks, as the daemon's default is."""
    size: Annotated[int, Field(ge=1 << 20)] = DEFAULT_SIZE_BYTES
    """Most bytes of swap files, all directories together; a larger model is scaled down to it."""
    steps: Annotated[int, Field(ge=3, le=1000)] = 5
    host_budget_bytes: Annotated[int, Field(ge=PAGE_BYTES)] | None = None
    """The budget of the full model; None = as traced."""
    compute_tflops: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """10^12 a second, of the accelerators of this node together; None = this CPU computes."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """So many threads compute; None = as traced, or all cores but one."""
    tbw: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Rating of each drive, TB written."""
    write_limit_bytes: Annotated[int, Field(ge=0)] = WRITE_LIMIT_BYTES

    @property
    def daemon_engine(self) -> str:
        """The engine's name as ``io-daemon serve`` takes it."""
        return "auto" if self.engine is None else f"require:{self.engine}"


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """What is special to ``bench step``; the rest is that of the other commands."""
    parser.add_argument(
        "--trace",
        required=True,
        metavar="TRACE",
        help=f"a file that `infinity trace` wrote, or one that ships: {', '.join(shipped_names())}",
    )
    parser.add_argument(
        "--engine", choices=("auto", *get_args(EngineName)), default="auto", help="default: auto, as in training"
    )
    parser.add_argument(
        "--bs", type=parse_bytes, metavar="BYTES", help="bytes of one I/O; default: as training would choose"
    )
    parser.add_argument("--iodepth", type=int, help="I/Os in flight per directory; default: likewise")
    parser.add_argument("--verify", type=int, choices=(0, 1), default=1, help="checksums of blocks; default: 1")
    parser.add_argument(
        "--size",
        type=parse_bytes,
        metavar="BYTES",
        default=DEFAULT_SIZE_BYTES,
        help="most bytes of swap files; default: 8G",
    )
    parser.add_argument("--steps", type=int, default=5, help="measured, after those that settle; default: 5")
    parser.add_argument(
        "--host-budget-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="host memory of the full model; default: as traced",
    )
    parser.add_argument(
        "--compute-tflops",
        type=float,
        help="of the accelerators that will train the model, all of this node; default: this CPU computes",
    )
    parser.add_argument("--threads", type=int, help="that compute; default: as traced")
    parser.add_argument("--tbw", type=float, help="terabytes that each drive is rated to have written in its life")
