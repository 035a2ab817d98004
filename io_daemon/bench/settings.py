"""What to measure, in fio's words, checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from io_daemon._native import POSIX_THREADS_MAX
from io_daemon.bench.engines.engine import Memory
from io_daemon.config import EngineName, Fault, resolved
from io_daemon.errors import ConfigError
from io_daemon.shared.protocol import PAGE_BYTES

Rw = Literal["read", "write", "rw", "randread", "randwrite", "randrw"]
BenchEngine = Literal[EngineName, "kvikio", "aiofiles"]
RW: Final[tuple[str, ...]] = get_args(Rw)
T = TypeVar("T")

TRAINING_READ_PERCENT: Final = 53
"""An Adam step that streams everything reads 2 + 2 + 12 and writes 2 + 12 bytes per parameter: 16 of 30."""
WRITE_LIMIT_BYTES: Final = 100 << 30
FREE_SHARE_KEPT: Final = 0.05


def _resolved(directories: tuple[Path, ...]) -> tuple[Path, ...]:
    found = tuple(resolved(path, "directories") for path in directories)
    for place, path in enumerate(found):
        if path in found[:place]:
            raise ConfigError("directories", str(path), "the same directory is named twice")
    return found


def _once(values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


Each = Annotated[tuple[T, ...], Field(min_length=1), AfterValidator(_once)]
"""What is measured one after the other: one or more, and each once, however often it was named."""
Directories = Annotated[tuple[Path, ...], Field(min_length=1, max_length=64), AfterValidator(_resolved)]


class IoSettings(BaseModel):
    """Settings of ``bench io``. ``size`` and ``iodepth`` are per job; every directory runs ``numjobs`` jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directories: Directories
    rw: Rw = "read"
    rwmixread: Annotated[int, Field(ge=0, le=100)] = TRAINING_READ_PERCENT
    """Percent of I/Os that read, for rw and randrw."""
    bs: Annotated[int, Field(ge=512, le=1 << 30, multiple_of=512)] = 1 << 20
    iodepth: Annotated[int, Field(ge=1, le=4096)] = 32
    numjobs: Annotated[int, Field(ge=1, le=64)] = 1
    direct: bool = True
    runtime_s: Annotated[float, Field(ge=0.01, le=30 * 86400)] = 10.0
    ramp_time_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    size: Annotated[int, Field(ge=PAGE_BYTES)] = 2 << 30
    engine: BenchEngine = "io_uring"
    memory: Memory = "host"
    """Where the buffers lie; "gpu" with kvikio: cuFile's GPUDirect Storage where the machine has it."""
    verify: bool = True
    seed: Annotated[int, Field(ge=0, lt=1 << 47)] = 1
    write_limit_bytes: Annotated[int, Field(ge=0)] = WRITE_LIMIT_BYTES
    """The measurement ends early once this much has been written, laying out included."""
    faults: tuple[Fault, ...] = ()
    """Injected I/O faults, for tests."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.direct and self.bs % PAGE_BYTES:
            raise ConfigError(
                "bs", self.bs, f"is no multiple of {PAGE_BYTES}, which direct I/O needs: or say --direct 0"
            )
        if self.bs > PAGE_BYTES and self.bs % PAGE_BYTES:
            raise ConfigError("bs", self.bs, f"is neither below {PAGE_BYTES} nor a multiple of it")
        if self.engine == "posix" and self.iodepth > POSIX_THREADS_MAX:
            raise ConfigError(
                "iodepth",
                self.iodepth,
                f"posix has a thread for each I/O in flight, at most {POSIX_THREADS_MAX}: raise --numjobs instead",
            )
        if self.memory == "gpu" and self.engine != "kvikio":
            raise ConfigError("memory", self.memory, f"{self.engine} only knows host memory: say --engine kvikio")
        if self.num_blocks < 2 * self.iodepth:
            raise ConfigError(
                "size",
                self.size,
                f"holds {self.num_blocks} blocks of {self.bs} bytes, fewer than two for each of {self.iodepth} in "
                "flight: raise size",
            )
        return self

    @property
    def num_blocks(self) -> int:
        """Blocks of each job; a rest of ``size`` below one block is left alone."""
        return self.size // self.bs

    @property
    def reads(self) -> bool:
        return self.rw in ("read", "randread") or (self.mixed and self.rwmixread > 0)

    @property
    def writes(self) -> bool:
        return self.rw in ("write", "randwrite") or (self.mixed and self.rwmixread < 100)

    @property
    def mixed(self) -> bool:
        return self.rw in ("rw", "randrw")

    @property
    def random(self) -> bool:
        return self.rw.startswith("rand")

    @property
    def num_all_jobs(self) -> int:
        return self.numjobs * len(self.directories)

    @property
    def layout_bytes(self) -> int:
        """Bytes that are written before anything is measured."""
        return self.num_all_jobs * self.num_blocks * self.bs


def check_limit(settings: IoSettings) -> None:
    """Raises ConfigError if laying out the files alone would pass the limit."""
    if settings.layout_bytes > settings.write_limit_bytes:
        raise ConfigError(
            "write_limit",
            settings.write_limit_bytes,
            f"laying out {settings.num_all_jobs} files writes {settings.layout_bytes} bytes: lower --size, raise "
            "--write-limit, or say --yes",
        )


def refused_buffers(settings: IoSettings, problem: str) -> ConfigError:
    """The error names the setting that is the furthest above its default: that one somebody typed."""
    defaults = {name: IoSettings.model_fields[name].default for name in ("bs", "iodepth", "numjobs")}
    blamed = max(defaults, key=lambda name: getattr(settings, name) / defaults[name])
    return ConfigError(
        blamed,
        getattr(settings, blamed),
        f"{settings.iodepth} blocks of {settings.bs} bytes in flight for each of {settings.num_all_jobs} jobs: "
        f"{problem}: lower it",
    )
