"""The process groups of the ranks that share one model: torch.distributed, started here if nobody has.

Whoever trains joins with ``Peers.join`` and leaves with ``release``. What was started here ends with its last user or
at exit; what the user started stays the user's, and where it is gloo's, it ends at exit at the latest.

Joining, leaving and ending are the same on every rank, or ranks would wait in groups that others do not have. When a
rank's garbage collector finds an engine is its own affair: what is found waits in ``let_go`` until all ranks have.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from infinity.config import Environment, read_environment
from infinity.errors import ConfigError, WorldError


@dataclass(eq=False, kw_only=True)
class Peers:
    """This rank among those that share a model. One object a process group, however many engines use it.

    Reductions have a group of their own: ranks may reach them at different points of their gathers. What ranks agree
    upon travels on the CPU, which the backend of ``data`` may not take.
    """

    data: dist.ProcessGroup
    rank: int
    world_size: int
    reductions: dist.ProcessGroup | None
    """None with one rank."""
    control: dist.ProcessGroup | None
    """The group of gloo; None with one rank."""
    timeout_s: float
    num_users: int = 0
    num_joined: int = 0
    """The number of the user that joined last."""
    num_engines: int = 0
    """Engines that these ranks have begun to make: the same on all of them, as what each of them says is compared."""
    let_go: dict[int, Callable[[], None]] = field(default_factory=dict)
    """By the number of each user that this rank has collected and others may still hold: what ends it."""
    num_reductions: int = 0
    """Reductions that this rank has begun, of whatever engine: where ranks differ, the next ones would meet others."""
    num_spread: int = 0
    """Maxima that this rank has begun to learn from the others, see ``maximum``."""
    num_divergences: int = 0
    """How often ranks were told that they were about to do different things: on all as often."""
    pid: int = field(default_factory=os.getpid)
    """The process that made them: a fork of it has no part in them."""
    results: dist.ProcessGroup | None = None
    """Where the results of all-reduces are handed out, if anybody makes any."""

    _of: ClassVar[dict[dist.ProcessGroup, Peers]] = {}

    @classmethod
    def join(cls, group: dist.ProcessGroup | None = None, environment: Environment | None = None) -> Peers | None:
        """Collective over ``group``, by default all ranks. None where nothing says that there are others.

        Raises ConfigError if torch.distributed and the environment disagree, WorldError if the others do not come.
        """
        environment = environment or read_environment()
        _start_or_check(environment)
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ConfigError("process_group", group, "torch.distributed is not initialised: initialise it first")
            return None
        group = group or dist.group.WORLD
        if group is None or dist.get_rank(group) < 0:
            raise ConfigError(
                "process_group", "without this rank", f"rank {dist.get_rank()} is not in it: pass it where it is"
            )
        _check_backend(group)
        peers = cls._of.get(group)
        if peers is None:
            timeout_s = environment.timeout_s
            if not environment.timeout_as_told:
                timeout_s = max(timeout_s, _timeout_s_of(group))
            peers = cls._of[group] = cls._make(group, timeout_s)
        peers.num_users += 1
        peers.num_joined += 1
        return peers

    @classmethod
    def _make(cls, group: dist.ProcessGroup, timeout_s: float) -> Peers:
        world_size = dist.get_world_size(group)
        alone = world_size == 1
        return cls(
            data=group,
            rank=dist.get_rank(group),
            world_size=world_size,
            reductions=None if alone else _like(group, _backend_of_data(group), timeout_s),
            control=None if alone else _like(group, "gloo", timeout_s),
            timeout_s=timeout_s,
        )

    def add_group_for_results(self) -> None:
        """Make the group that all-reduces need, unless it is there. Collective."""
        if self.results is None:
            self.results = _like(self.data, _backend_of_data(self.data), self.timeout_s)

    @property
    def group_for_reductions(self) -> dist.ProcessGroup:
        return _there(self.reductions)

    @property
    def group_for_control(self) -> dist.ProcessGroup:
        return _there(self.control)

    @property
    def group_for_results(self) -> dist.ProcessGroup:
        return _there(self.results)

    @property
    def root(self) -> int:
        """Rank 0 of these, as torch's broadcasts want it: in the whole world."""
        return dist.get_global_rank(self.data, 0)

    def release(self) -> None:
        """One user less. With the last one of all, what was started here ends."""
        self.num_users -= 1
        if self.num_users == 0 and not (dist.is_initialized() and self.world_size < dist.get_world_size()):
            self._close()
        if not any(peers.num_users for peers in Peers._of.values()):
            _end_started()

    def _close(self) -> None:
        """Let go of the groups. Those of a part of the world stay with the world: their names would be used again."""
        Peers._of.pop(self.data, None)
        for group in (self.reductions, self.control, self.results):
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # the user has destroyed it, with all others
                    dist.destroy_process_group(group)
        # A group that something still refers to outlives destroy_process_group, and a thread of gloo's that lets go of
        # a tensor while the interpreter ends aborts the process (pytorch's AsyncBarrierWork, seen 1 in 9).
        self.reductions = self.control = self.results = None


def _like(group: dist.ProcessGroup, backend: str, timeout_s: float) -> dist.ProcessGroup | None:
    """A group of the same ranks. Collective. Raises WorldError if they do not come."""
    ranks = dist.get_process_group_ranks(group)
    # groups of a part of the world must not wait for the rest of it
    is_part = len(ranks) < dist.get_world_size()
    try:
        made: dist.ProcessGroup | None = dist.new_group(
            ranks, backend=backend, timeout=timedelta(seconds=timeout_s), use_local_synchronization=is_part
        )
    except RuntimeError as error:
        raise WorldError(
            f"rank {dist.get_rank(group)} did not meet the other {len(ranks) - 1} ranks in infinity.initialize() or "
            f"Init, as each of them must call it: {error}"
        ) from error
    return made


def _there(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise AssertionError("these ranks have no such process group, or have left it")
    return group


_store: Any = None
"""The launcher's store: it outlives the process groups, and a second one needs other keys in it."""
_num_started = 0
_started: dist.ProcessGroup | None = None
"""The default process group, where it was started here."""
_has_parents = False
"""Whether the default process group was there when this process was forked, without its threads."""


def _start_or_check(environment: Environment) -> None:
    if not environment.launched:
        return
    if not dist.is_available():
        if environment.world_size > 1:
            raise ConfigError("WORLD_SIZE", environment.world_size, "this torch has no torch.distributed: install it")
        return
    if not dist.is_initialized():
        _choose_device(environment)
        if environment.rendezvous:
            _start(environment)
        elif environment.world_size > 1:
            raise ConfigError(
                "MASTER_ADDR, MASTER_PORT",
                None,
                f"RANK and WORLD_SIZE = {environment.world_size} say that there are others, but not where to meet "
                "them: start with `infinity run`, or unset RANK and WORLD_SIZE",
            )
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size != environment.world_size:
        raise ConfigError(
            "WORLD_SIZE",
            environment.world_size,
            f"torch.distributed was initialised with {world_size}: let infinity.initialize() or Init do it, initialise "
            "it with WORLD_SIZE ranks, or start with `infinity run --nproc-per-node "
            f"{max(world_size, environment.world_size)}`",
        )
    if rank != environment.rank:
        raise ConfigError(
            "RANK",
            environment.rank,
            f"torch.distributed was initialised as rank {rank}: let infinity.initialize() or Init do it, or give it "
            "the rank that the launcher set",
        )


def _choose_device(environment: Environment) -> None:
    """Before any backend is started: NCCL takes the current device for the rank's."""
    if not torch.accelerator.is_available():
        return
    num_devices = torch.accelerator.device_count()
    if environment.local_rank >= num_devices:
        raise ConfigError(
            "LOCAL_RANK",
            environment.local_rank,
            f"this process sees {num_devices} devices: start at most so many ranks on a node (--nproc-per-node)",
        )
    torch.accelerator.set_device_index(environment.local_rank)


def _start(environment: Environment) -> None:
    global _store, _num_started, _started
    timeout = timedelta(seconds=environment.timeout_s)
    try:
        if _store is None:
            _store = next(rendezvous("env://", timeout=timeout))[0]
        dist.init_process_group(
            _backends(),
            # ranks that are started again may meet in the store of those before them
            store=dist.PrefixStore(  # type: ignore[attr-defined]
                f"infinity/{environment.restart_count}/{_num_started}", _store
            ),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    except RuntimeError as error:  # what torch's distributed errors have in common
        raise WorldError(
            f"rank {environment.rank} did not meet the other {environment.world_size - 1} ranks at "
            f"{environment.rendezvous} within {environment.timeout_s:g} s: {error}"
        ) from error
    _num_started += 1
    _started = dist.group.WORLD


def start_for_user(
    environment: Environment,
    *,
    backend: str | None = None,
    init_method: str | None = None,
    port: int,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta,
) -> None:
    """Start torch.distributed as the user would: it is not ended with its last engine.

    Args:
        backend: by default what ``Peers`` would start.
        init_method: as torch's; by default the environment's meeting place.
        port: where ranks meet if MASTER_PORT is not set.
        rank, world_size: instead of the environment's.

    Raises ConfigError if nothing says where several ranks meet, WorldError if the others do not come.
    """
    rank = environment.rank if rank is None else rank
    world_size = environment.world_size if world_size is None else world_size
    if environment.launched:
        _choose_device(environment)
    address = environment.rendezvous.rpartition(":")[0] or environment.master_address
    if init_method is None and world_size > 1:
        if not address:
            raise ConfigError("MASTER_ADDR", None, "must say where ranks meet: start with `infinity run`")
        init_method = f"tcp://{environment.rendezvous or f'{address}:{port}'}"
    where: dict[str, Any] = {"init_method": init_method}
    if init_method is None:
        where = {"store": dist.HashStore()}  # type: ignore[attr-defined]
    elif environment.rendezvous and init_method == f"tcp://{environment.rendezvous}":
        where = {"init_method": "env://"}  # torchrun's own store serves it
    try:
        dist.init_process_group(backend or _backends(), rank=rank, world_size=world_size, timeout=timeout, **where)
    except RuntimeError as error:
        raise WorldError(f"rank {rank} of {world_size} did not meet the others at {init_method}: {error}") from error


def _backends() -> str:
    """gloo on the CPU, and what torch takes on the accelerator (NCCL on NVIDIA's)."""
    used = used_device().type
    return "gloo" if used == "cpu" else f"cpu:gloo,{used}:{dist.get_default_backend_for_device(used)}"


def _backend_of(group: dist.ProcessGroup) -> str:
    """The backend as ``new_group`` takes it: one name, or device:name pairs where they differ."""
    config: str = dist.distributed_c10d.get_backend_config(group)
    names = {pair.partition(":")[2] for pair in config.split(",")}
    return names.pop() if len(names) == 1 else config


def _backend_of_data(group: dist.ProcessGroup) -> str:
    """The backend of ``group`` that takes what is on the device where weights are used, and no other: each rank has a
    connection to every other one in a group of gloo's."""
    config: str = dist.distributed_c10d.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(","))[used_device().type]


def used_device() -> torch.device:
    """Where weights are used."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else accelerator


def _timeout_s_of(group: dist.ProcessGroup) -> float:
    """How long whoever made the group has its ranks wait, as by Accelerate's InitProcessGroupKwargs; 0 where its
    backend does not say."""
    try:
        options: Any = group._get_backend(used_device()).options
        timeout: timedelta = options._timeout
    except (AttributeError, RuntimeError):
        return 0.0
    return timeout.total_seconds()


def _check_backend(group: dist.ProcessGroup) -> None:
    """Weights travel where they are used."""
    config: str = dist.distributed_c10d.get_backend_config(group)
    used = used_device().type
    if used not in {pair.partition(":")[0] for pair in config.split(",")}:
        raise ConfigError(
            "process_group",
            config,
            f"its backend takes no {used} tensors, and weights are used there: "
            f'make it with backend="{dist.get_default_backend_for_device(used)}"',
        )


def _end_started() -> None:
    global _started
    group, _started = _started, None
    if group is None:
        return
    for peers in list(Peers._of.values()):
        peers._close()
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def _note_fork() -> None:
    global _has_parents
    _has_parents = dist.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


@atexit.register
def _leave() -> None:
    """A script may end without ``destroy()``; what still refers to a group then must not."""
    everyone = list(Peers._of.values())
    if any(peers.pid != os.getpid() for peers in everyone):
        return
    _end_started()
    for peers in everyone:
        peers._close()
        while peers.let_go:
            peers.let_go.pop(min(peers.let_go))()
    # scripts for DeepSpeed do not end the group that they start, and gloo then aborts every 40th process or so
    ends_users = dist.is_initialized() and _backend_of(_there(dist.group.WORLD)) == "gloo" and not _has_parents
    if ends_users:
        dist.destroy_process_group()
    if everyone or ends_users:  # a group within a circle of references goes now, and not while the interpreter ends
        gc.collect()
