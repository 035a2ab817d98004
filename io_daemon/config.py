"""Settings of the daemon, and the only place of this package that reads the environment."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from io_daemon.errors import ConfigError
from io_daemon.shared.protocol import PAGE_BYTES

EngineName = Literal["io_uring", "libaio", "posix"]
EngineChoice = Literal["auto", "require:io_uring", "require:libaio", "require:posix"]
ENGINES_BY_RANK: Final[tuple[EngineName, ...]] = get_args(EngineName)
"""The daemon's engines, best first: here they have their names, and nowhere else in Python."""
FaultKind = Literal[
    "errno_read", "errno_write", "short_read", "short_write", "flip_read", "flip_write", "delay", "break"
]
FaultNumber = Annotated[int, Field(ge=0, lt=1 << 63)]
Fault = tuple[FaultKind, FaultNumber, FaultNumber]
"""(what, which block I/O, value), as ``_native.Reactor`` takes it."""

SOCKET_PATH_BYTES_MAX: Final = 107
"""The sockaddr_un of the kernel holds 108 bytes, the last of them NUL."""
TIMEOUT_S_MAX: Final = 86_400.0
"""A day: whoever waits for longer would not be believed, and no clock of the C++ side overflows."""
Timeout = Annotated[float, Field(gt=0, le=TIMEOUT_S_MAX, allow_inf_nan=False)]
UNLIMITED_BYTES: Final = (1 << 63) - 1
BLOCK_BYTES: Final = 512 << 10
QUEUE_DEPTH: Final = 32
"""Where nobody says otherwise and no sweep is remembered."""


class ServeConfig(BaseModel):
    """What ``io-daemon serve`` runs with. The swap budget is per tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    socket_path: Path
    swap_dirs: Annotated[tuple[Path, ...], Field(min_length=1, max_length=256)]
    engine: EngineChoice = "auto"
    block_bytes: Annotated[int, Field(ge=PAGE_BYTES, le=1 << 30)] = BLOCK_BYTES
    queue_depth: Annotated[int, Field(ge=1, le=4096)] = QUEUE_DEPTH
    verify_checksums: bool = True
    """False: no checksums are kept at all."""
    private: bool = False
    """End when the last tenant has left."""
    parent_pidfd: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """End when the process that this inherited pidfd names is gone."""
    host_budget_bytes: Annotated[int, Field(ge=PAGE_BYTES, le=UNLIMITED_BYTES)] = UNLIMITED_BYTES
    """Most arena bytes of all tenants together; never more than the machine's memory allows."""
    swap_budget_bytes: Annotated[int, Field(ge=PAGE_BYTES, le=UNLIMITED_BYTES)] = UNLIMITED_BYTES
    """Most swap-file bytes of one tenant, over all directories."""
    lock_timeout_s: Timeout = 60.0
    """Longest wait for the last I/O of a dead daemon to land."""
    drain_timeout_s: Timeout = 10.0
    """Longest wait for in-flight I/O at shutdown."""
    faults: tuple[Fault, ...] = ()
    """Injected I/O faults, for tests."""

    @field_validator("block_bytes")
    @classmethod
    def _whole_pages(cls, value: int) -> int:
        if value % PAGE_BYTES:
            raise ValueError(f"must be a multiple of {PAGE_BYTES}")
        return value

    @field_validator("swap_dirs")
    @classmethod
    def _resolved(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        paths = tuple(resolved(path, "swap_dirs") for path in value)
        if len(set(paths)) != len(paths):
            raise ValueError("the same directory is named twice")
        return paths


class DaemonSettings(BaseModel):
    """What a job chooses of a daemon that it starts. A field is a key of the ``io_daemon`` section and, by the same
    name, an option of ``io-daemon serve`` and ``infinity run``: whoever passes settings on passes this."""

    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)

    engine: EngineChoice = "auto"
    block_size: int | Literal["auto"] = "auto"
    queue_depth: int | Literal["auto"] = "auto"
    verify_checksums: bool = True

    @classmethod
    def of(cls, section: object) -> Self:
        """Those of ``section``'s attributes that are fields here."""
        return cls.model_validate(section, from_attributes=True)

    def chosen(self) -> dict[str, object]:
        """By name, what differs from the default."""
        fields = type(self).model_fields
        return {name: getattr(self, name) for name in fields if getattr(self, name) != fields[name].default}

    def options(self) -> list[str]:
        """The settings as ``io-daemon serve`` takes them."""
        words: list[str] = []
        for name, value in self.chosen().items():
            option = name.replace("_", "-")
            words += [f"--no-{option}"] if value is False else [f"--{option}", str(value)]
        return words


def from_root(path: Path, key: str) -> Path:
    """The path from the root on. Raises ConfigError about ``key`` where nobody can tell."""
    try:
        return path.absolute()
    except FileNotFoundError as error:
        remedy = "the current directory is gone: cd to one that is there, or write the path from / on"
        raise ConfigError(key, str(path), remedy) from error


def resolved(path: Path, key: str) -> Path:
    """The path from the root on, without links; a circle of them stays, and whoever looks there is told of it. Raises
    ConfigError about ``key`` where nobody can tell."""
    return Path(os.path.realpath(from_root(path, key)))


def is_text(path: str) -> bool:
    """Whether its bytes are UTF-8: to the kernel it may be any, to messages and reports it may not."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def default_socket_path() -> Path:
    """``$INFINITY_IO_SOCKET``, or the per-user default."""
    named = os.environ.get("INFINITY_IO_SOCKET")
    return Path(named) if named else user_socket(_runtime_dir(), _temp_dir())


def user_socket(runtime_dir: Path | None, temp_dir: Path) -> Path:
    """Where a user's own daemon listens: in the first of these directories that nobody else has taken or may write to.
    In ``temp_dir`` anybody may make it first; what lies beside the state of this user nobody can."""
    directories = [temp_dir / f"infinity-{os.geteuid()}", state_dirs()[0]]
    if runtime_dir is not None and _is_ours(runtime_dir):
        directories.insert(0, runtime_dir / "infinity")
    return next((each for each in directories if _is_ours(each)), directories[-1]) / "io.sock"


def _is_ours(directory: Path) -> bool:
    """Also if it is yet to be made."""
    try:
        status = os.stat(directory, follow_symlinks=False)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def runtime_dir(named: str | None) -> Path | None:
    """``named``, which is what $XDG_RUNTIME_DIR says, if it is a directory."""
    return Path(named) if named and os.path.isdir(named) else None


def temp_dir(named: str | None) -> Path:
    """``named``, which is what $TMPDIR says, if this process may write there: what a batch system has named is often
    gone when the job's next step runs. Else where Python finds room, and /tmp where it finds none. Daemon and ranks
    look for each other below it, so both ask here."""
    if named and os.path.isdir(named) and os.access(named, os.W_OK | os.X_OK):
        return Path(os.path.abspath(named))
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # nobody may write to any of those that it knows
        return Path("/tmp")


def _runtime_dir() -> Path | None:
    return runtime_dir(os.environ.get("XDG_RUNTIME_DIR"))


def _temp_dir() -> Path:
    return temp_dir(os.environ.get("TMPDIR"))


def socket_parents() -> list[Path]:
    """Where directories for private sockets may be made, best first."""
    parents = (_runtime_dir(), _temp_dir(), Path("/tmp"))
    return [parent for parent in parents if parent is not None]


def state_dirs() -> tuple[Path, ...]:
    """Where what was learnt about this machine is kept: looked for in this order, written to the first.

    ``$INFINITY_STATE_DIR`` alone where it is set; else the user's own directory (not root's, and not of one who has no
    home) and the machine's."""
    named = os.environ.get("INFINITY_STATE_DIR")
    if named:
        return (Path(named),)
    machine = Path("/var/lib/infinity")
    if os.getuid() == 0:
        return (machine,)
    try:
        user = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:  # a container's user whom no passwd file knows, and no $HOME
        return (machine,)
    return user / "infinity", machine


def use_one_blas_thread() -> None:
    """NumPy's OpenBLAS, which is yet to be loaded, starts no thread a core: what is multiplied here is small. (Each
    takes 40 MiB of addresses and counts for ``ulimit -u``; where one cannot be had, OpenBLAS sends us SIGINT.)"""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def notify_socket() -> str | None:
    """Where systemd waits for READY=1."""
    return os.environ.get("NOTIFY_SOCKET")


def first_problem(error: Any) -> ConfigError:
    """A pydantic ValidationError as the ConfigError of its first finding."""
    finding = error.errors(include_url=False)[0]
    raised = finding.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):  # by a validator of ours, with a key of its own
        return raised
    key = ".".join(str(part) for part in finding["loc"]) or "config"
    remedy = finding["msg"].removeprefix("Input ") if raised is None else str(raised)
    return ConfigError(key, finding.get("input"), remedy)
