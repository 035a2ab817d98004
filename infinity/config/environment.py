"""The environment, read here and nowhere else in ``infinity``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from io_daemon.config import runtime_dir, temp_dir, user_socket
from io_daemon.errors import ConfigError

DEBUG_FLAGS = frozenset({"poison"})
TIMEOUT_S = 1800.0
"""The time-out is torch's: a rank may well evaluate or write files while the others wait."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the launcher and the user's shell say about this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this node."""
    local_size: int = 0
    """LOCAL_SIZE: what DeepSpeed's launcher calls them; 0: it is not set."""
    launched: bool = False
    """A launcher started this process as one of ``world_size``: RANK and WORLD_SIZE are set."""
    node: str = ""
    """GROUP_RANK: torchrun's number of this node, if torchrun started this process."""
    restart_count: int = 0
    """TORCHELASTIC_RESTART_COUNT: how often torchrun has started ranks again."""
    rendezvous: str = ""
    """MASTER_ADDR:MASTER_PORT, where ranks meet."""
    master_address: str = ""
    """MASTER_ADDR alone."""
    timeout_s: float = TIMEOUT_S
    """INFINITY_TIMEOUT_S: how long ranks wait for one another, to meet and in every collective."""
    timeout_as_told: bool = False
    """INFINITY_TIMEOUT_S is set: ranks wait no longer, whatever the process group of the user's does."""
    io_socket: Path | None = None
    """INFINITY_IO_SOCKET: the daemon that ``infinity run`` or the cluster team started."""
    debug: frozenset[str] = frozenset()
    """INFINITY_DEBUG, comma-separated. ``poison``: released memory is filled with NaN."""
    runtime_dir: Path | None = None
    """XDG_RUNTIME_DIR, if it is a directory: where per-user sockets belong."""
    temp_dir: Path = Path("/tmp")
    """Parent of private socket directories where there is no ``runtime_dir``."""
    accelerator: str = ""
    """DS_ACCELERATOR: what DeepSpeed would compute on."""
    spins_as_told: bool = False
    """OMP_WAIT_POLICY or GOMP_SPINCOUNT: the user has said how long threads that wait for each other spin."""

    @property
    def poison(self) -> bool:
        return "poison" in self.debug

    @property
    def default_socket(self) -> Path:
        """The per-user socket of a daemon that was started by hand: the same as ``io-daemon serve``'s own default."""
        return user_socket(self.runtime_dir, self.temp_dir)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """``variables``: what to read instead of the process's own environment.

    Raises ``ConfigError`` naming the variable."""
    env = os.environ if variables is None else variables
    world_size = _whole(env, "WORLD_SIZE", default=1, least=1)
    rank = _whole(env, "RANK", default=0, least=0)
    local_world_size = _whole(env, "LOCAL_WORLD_SIZE", default=1 if world_size == 1 else world_size, least=1)
    local_rank = _whole(env, "LOCAL_RANK", default=rank % local_world_size, least=0)
    if rank >= world_size:
        raise ConfigError("RANK", rank, f"must be below WORLD_SIZE = {world_size}; start with `infinity run`")
    if local_rank >= local_world_size:
        raise ConfigError(
            "LOCAL_RANK", local_rank, f"must be below LOCAL_WORLD_SIZE = {local_world_size}; start with `infinity run`"
        )
    if world_size > 1 and not env.get("RANK"):
        raise ConfigError("RANK", None, f"must be set beside WORLD_SIZE = {world_size}; start with `infinity run`")
    socket = env.get("INFINITY_IO_SOCKET", "")
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        local_size=_whole(env, "LOCAL_SIZE", default=0, least=0),
        launched=bool(env.get("RANK") and env.get("WORLD_SIZE")),
        node=env.get("GROUP_RANK", ""),
        restart_count=_whole(env, "TORCHELASTIC_RESTART_COUNT", default=0, least=0),
        rendezvous=_rendezvous(env),
        master_address=env.get("MASTER_ADDR", ""),
        timeout_s=_seconds(env, "INFINITY_TIMEOUT_S", default=TIMEOUT_S),
        timeout_as_told=bool(env.get("INFINITY_TIMEOUT_S")),
        io_socket=Path(socket) if socket else None,
        debug=_debug_flags(env.get("INFINITY_DEBUG", "")),
        runtime_dir=runtime_dir(env.get("XDG_RUNTIME_DIR")),
        temp_dir=temp_dir(env.get("TMPDIR")),
        accelerator=env.get("DS_ACCELERATOR", ""),
        spins_as_told=bool(env.get("OMP_WAIT_POLICY") or env.get("GOMP_SPINCOUNT")),
    )


def deepspeeds_timeout_min() -> int:
    """DEEPSPEED_TIMEOUT: how long ranks of DeepSpeed's scripts wait for one another; torch's where it is not set."""
    return _whole(os.environ, "DEEPSPEED_TIMEOUT", default=30, least=1)


def _whole(env: Mapping[str, str], name: str, *, default: int, least: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError(name, text, f"must be a whole number of at least {least}; start with `infinity run`")
    return value


def _seconds(env: Mapping[str, str], name: str, *, default: float) -> float:
    text = env.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(name, text, "must be a number of seconds above 0")
    return value


def _rendezvous(env: Mapping[str, str]) -> str:
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return f"{address}:{port}" if address and port else ""


def _debug_flags(text: str) -> frozenset[str]:
    flags = frozenset(flag.strip() for flag in text.split(",") if flag.strip())
    for flag in sorted(flags - DEBUG_FLAGS):
        raise ConfigError("INFINITY_DEBUG", flag, f"is not one of {', '.join(sorted(DEBUG_FLAGS))}")
    return flags
