"""How a job reaches its node's daemon: the one named, the user's own, or a private one as long-lived as the job."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity.config import Config, Environment
from infinity.errors import ConfigError
from infinity.plan.memory_plan import MemoryPlan
from infinity.tiers.base import HostTier
from infinity.tiers.collectives import Collectives
from infinity.tiers.daemon import DaemonStore
from io_daemon.config import DaemonSettings
from io_daemon.disk.kernel_text import read_text
from io_daemon.disk.swap_file import BOOT_ID
from io_daemon.machine.limits import naming_limits
from io_daemon.rank.client import Client
from io_daemon.rank.connection import connect_to
from io_daemon.rank.private_dir import NO_MORE_FILES
from io_daemon.rank.process import DaemonProcess

PROBE_TIMEOUT_S = 1.0
DRAIN_TIMEOUT_S = 30.0
LOST_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """This rank among those of the job on its node."""

    node: str
    local_rank: int
    local_world_size: int

    @classmethod
    def find(cls, collectives: Collectives, environment: Environment) -> NodePlace:
        """Collective. By machine, so that it also holds for ranks that no launcher started, and by launcher: two on
        one machine are two nodes, each with a daemon of its own."""
        node = " ".join(filter(None, (socket.gethostname(), read_text(BOOT_ID), environment.node)))
        nodes = collectives.gather_objects(node, "find the ranks of each node")
        return cls(node=node, local_rank=nodes[: collectives.rank].count(node), local_world_size=nodes.count(node))


class DaemonConnection(HostTier):
    """Finds or starts the daemon, and opens tenants on it. The constructor is collective over the job's ranks."""

    def __init__(self, config: Config, environment: Environment, collectives: Collectives, place: NodePlace) -> None:
        self._config, self._environment = config, environment
        self._rank = collectives.rank
        self._process: DaemonProcess | None = None
        self._clients: list[Client] = []
        self.closed_first: list[Callable[[], None]] = []
        """What ends stores beside the engine's, before the daemon does."""
        self.job: str = collectives.broadcast_object(uuid.uuid4().hex[:16], "name the job")
        own = collectives.together(lambda: self._find_or_start(start=place.local_rank == 0), "find the I/O daemon")
        paths = collectives.gather_objects((place.node, own), "tell the I/O daemon's socket")
        found = [path for node, path in paths if node == place.node and path]
        if not found:
            raise ConfigError(
                "io_daemon.start",
                config.io_daemon.start,
                'no daemon is reachable and none may be started: run `io-daemon serve`, or write "auto"',
            )
        self.socket_path: str = found[0]

    def open(
        self, plan: MemoryPlan, *, job: str, pinned_mask: int, device: torch.device, spare_bytes: int = 0
    ) -> DaemonStore:
        """Attach this rank under the name ``job``, with an arena of ``plan``."""
        client = Client.connect(self.socket_path, job=job, rank=self._rank)
        self._clients.append(client)
        try:
            client.attach(
                num_frames=plan.num_frames,
                frame_bytes=plan.frame_bytes,
                swap_dirs=self._swap_dirs(client),
                chunks_max=plan.chunks_max,
                lock_memory="require" if self._config.pin_memory else "auto",
            )
            return DaemonStore(
                client,
                pinned_mask=pinned_mask,
                device=device,
                spare_bytes=spare_bytes,
                cuts_spinning=not self._environment.spins_as_told,
            )
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        """End the private daemon, if this rank started one. One that was found hung is not waited for again."""
        for close in self.closed_first:
            close()
        self.closed_first.clear()
        if self._process is not None:
            was_lost = any(client.was_lost for client in self._clients)
            self._process.terminate(LOST_TIMEOUT_S if was_lost else DRAIN_TIMEOUT_S)
        self._clients.clear()

    def _find_or_start(self, *, start: bool) -> str | None:
        settings = self._config.io_daemon
        existing = self._existing_socket()
        if existing is not None:
            self._refuse_other_settings(existing)
            return existing
        if settings.start != "auto" or not start:
            return None
        self._process = DaemonProcess(
            swap_dirs=self._config.swap_dirs or (self._environment.temp_dir,),
            options=DaemonSettings.of(settings).options(),
        )
        return str(self._process.socket)

    def _existing_socket(self) -> str | None:
        if self._config.io_daemon.socket != "auto":
            return self._config.io_daemon.socket
        if self._environment.io_socket is not None:
            return str(self._environment.io_socket)
        default = str(self._environment.default_socket)
        return default if _answers(default) else None

    def _refuse_other_settings(self, socket_path: str) -> None:
        """A daemon that runs already has its own I/O settings: the configuration's would be ignored."""
        for name, value in DaemonSettings.of(self._config.io_daemon).chosen().items():
            raise ConfigError(
                f"io_daemon.{name}",
                value,
                f"the daemon at {socket_path} has settings of its own: give this one to `io-daemon serve` or "
                "`infinity run` instead, and remove it here",
            )

    def _swap_dirs(self, client: Client) -> list[str]:
        for path in self._config.swap_dirs:
            if str(path) not in client.swap_dirs:
                raise ConfigError(
                    "io_daemon.swap_dirs",
                    str(path),
                    f"the daemon at {self.socket_path} serves only {', '.join(client.swap_dirs)}: name one of these, "
                    "or start it with this directory",
                )
        return [str(path) for path in self._config.swap_dirs] or list(client.swap_dirs[:1])


def _answers(path: str) -> bool:
    """Whether a daemon is there, be it busy: who connects waits for it, and is told what it does."""
    with naming_limits("look for the I/O daemon"):
        try:
            connect_to(path, PROBE_TIMEOUT_S).close()
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno in NO_MORE_FILES:
                raise
            return False
    return True
