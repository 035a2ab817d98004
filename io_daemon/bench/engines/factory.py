"""Opens a block engine by its name, or says why it does not work here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from io_daemon._native import Region, probe_engine
from io_daemon.bench.engines.engine import BlockEngine, Memory
from io_daemon.bench.engines.reactor_engine import ReactorEngine
from io_daemon.config import ENGINES_BY_RANK
from io_daemon.errors import ConfigError

REACTOR_ENGINES: Final = ENGINES_BY_RANK
"""Those that training uses."""
ENGINES: Final = (*REACTOR_ENGINES, "kvikio", "aiofiles")


def engine_problem(name: str, memory: Memory = "host") -> str | None:
    """None if the engine works on this machine with its slots in this kind of memory, else one line of why not, with
    the remedy where there is one. Raises ConfigError for an unknown name."""
    if name not in ENGINES:
        raise ConfigError("engine", name, f"is none of {', '.join(ENGINES)}")
    if name == "kvikio":
        from io_daemon.bench.engines.kvikio_engine import kvikio_problem

        return kvikio_problem(memory)
    if memory == "gpu":
        return f"{name} moves host memory only: kvikio is the engine for GPU memory"
    return probe_engine(name) if name in REACTOR_ENGINES else None


def open_engine(
    name: str,
    fd: int,
    arena: Region,
    bs: int,
    iodepth: int,
    path: str,
    *,
    memory: Memory = "host",
    faults: Sequence[tuple[str, int, int]] = (),
) -> BlockEngine:
    """The engine of that name over the file that ``fd`` refers to, which stays the caller's; I/O is direct if the
    descriptor is. ``arena``: slots of ``bs`` bytes, ``2 * iodepth`` or more. ``path`` names the file in errors.
    ``memory="gpu"``: the I/O is between the file and GPU memory, and each block copied to or from its slot outside of
    the time that is counted.
    ``faults``, for tests of what stands above: as ``Reactor`` takes them, and only for the reactor's engines.
    Raises ConfigError if the engine does not work on this machine, OSError if it cannot start."""
    if (problem := engine_problem(name, memory)) is not None:
        raise ConfigError("engine", name, problem)
    if name in REACTOR_ENGINES:
        return ReactorEngine(name, fd, arena, bs, iodepth, path, faults)
    if faults:
        raise ConfigError("engine", name, f"takes no faults; {', '.join(REACTOR_ENGINES)} do")
    if name == "kvikio":
        from io_daemon.bench.engines.kvikio_engine import KvikioEngine

        return KvikioEngine(fd, arena, bs, iodepth, path, memory)
    from io_daemon.bench.engines.aiofiles_engine import AiofilesEngine

    return AiofilesEngine(fd, arena, bs, iodepth, path)
