"""The environment, read here and nowhere else in ``infinity``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from io_daemon.errors import ConfigError

DEBUG_FLAGS = frozenset({"poison"})


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the launcher and the user's shell say about this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this node."""
    io_socket: Path | None = None
    """INFINITY_IO_SOCKET: the daemon that ``infinity run`` or the cluster team started."""
    debug: frozenset[str] = frozenset()
    """INFINITY_DEBUG, comma-separated. ``poison``: released memory is filled with NaN."""
    runtime_dir: Path | None = None
    """XDG_RUNTIME_DIR, if it is a directory: where per-user sockets belong."""
    temp_dir: Path = Path("/tmp")
    """Parent of private socket directories where there is no ``runtime_dir``."""

    @property
    def poison(self) -> bool:
        return "poison" in self.debug

    @property
    def default_socket(self) -> Path:
        """The per-user socket of a daemon that was started by hand: the same as ``io-daemon serve``'s own default."""
        base = self.runtime_dir / "infinity" if self.runtime_dir else self.temp_dir / f"infinity-{os.getuid()}"
        return base / "io.sock"


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
    socket = env.get("INFINITY_IO_SOCKET", "")
    runtime_dir = env.get("XDG_RUNTIME_DIR", "")
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        io_socket=Path(socket) if socket else None,
        debug=_debug_flags(env.get("INFINITY_DEBUG", "")),
        runtime_dir=Path(runtime_dir) if runtime_dir and os.path.isdir(runtime_dir) else None,
        temp_dir=Path(env.get("TMPDIR") or tempfile.gettempdir()),
    )


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


def _debug_flags(text: str) -> frozenset[str]:
    flags = frozenset(flag.strip() for flag in text.split(",") if flag.strip())
    for flag in sorted(flags - DEBUG_FLAGS):
        raise ConfigError("INFINITY_DEBUG", flag, f"is not one of {', '.join(sorted(DEBUG_FLAGS))}")
    return flags
