"""Everything that a tenant owns and must give back: table, rings, and a seat at every device it uses."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from io_daemon._native import CompletionRing, Region, SubmissionRing
from io_daemon.disk.swap_file import Owner, SwapFile
from io_daemon.errors import ProtocolError, SwapSpaceError, remedy_against
from io_daemon.machine.limits import naming_limits
from io_daemon.policy.actions import StartIo
from io_daemon.serve.swap_device import Requester, SwapDevice, SwapRequest
from io_daemon.shared.arena import SEALS, adopt_arena, frame_offset
from io_daemon.shared.control import Attach
from io_daemon.shared.protocol import PAGE_BYTES, Cqe, Sqe, align_up
from io_daemon.shared.table import Table, TableGeometry

NUM_SQES: Final = 1024
NUM_CQES: Final = 4096


class Rings:
    """Submission and completion ring of one tenant, on one sealed memfd, as the daemon holds them.

    Daemon and rank wake each other through a pair of datagram sockets, each by an end of its own: nothing that the
    rank does to its end can make the daemon wait (an eventfd is one description for both: O_NONBLOCK is the rank's to
    clear and the counter the rank's to fill)."""

    def __init__(self) -> None:
        self.cq_offset = align_up(SubmissionRing.bytes_required(NUM_SQES), PAGE_BYTES)
        self.num_bytes = align_up(self.cq_offset + CompletionRing.bytes_required(NUM_CQES), PAGE_BYTES)
        with contextlib.ExitStack() as undo:
            self.fd = os.memfd_create("infinity-rings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, self.fd)
            os.ftruncate(self.fd, self.num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._wake, self.rank_wake = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            """The daemon's end, and the rank's."""
            undo.callback(self._wake.close)
            undo.callback(self.rank_wake.close)
            region = Region(self.fd, self.num_bytes)
            self.sq = SubmissionRing(region, 0, NUM_SQES, self.wake_fd, create=True)
            self.cq = CompletionRing(region, self.cq_offset, NUM_CQES, self.wake_fd, create=True)
            undo.pop_all()

    @property
    def wake_fd(self) -> int:
        """Readable when the rank has submitted something after ``sq.prepare_sleep``."""
        return self._wake.fileno()

    def take_wake_up(self) -> None:
        """Never blocks, whether or not there is one, and whatever the rank has done to its end."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            self._wake.recv(1, socket.MSG_DONTWAIT)

    def num_completions(self) -> int:
        """Completions that the rank has not reaped. Raises ProtocolError if the indexes are garbage."""
        try:
            return len(self.cq)
        except ValueError as error:
            raise ProtocolError(f"completion ring: {error}") from error

    def take(self, entries_max: int) -> list[Sqe]:
        """Submissions, at most ``entries_max``. Raises ProtocolError if the indexes are garbage."""
        try:
            return [Sqe(*entry) for entry in self.sq.pop_batch(entries_max)]
        except ValueError as error:
            raise ProtocolError(f"submission ring: {error}") from error

    def answer(self, completion: Cqe) -> None:
        """Raises ProtocolError if there is no room, although room was kept before the submission was taken."""
        try:
            pushed = self.cq.push(*completion)
        except ValueError as error:
            raise ProtocolError(f"completion ring: {error}") from error
        if not pushed:
            raise ProtocolError("completion ring: the room that was kept is gone, so its head was tampered with")

    def close(self) -> None:
        """The mapping goes as well, whoever still holds this object."""
        os.close(self.fd)
        self._wake.close()
        self.rank_wake.close()
        del self.sq, self.cq


@dataclass(eq=False)
class Seat:
    """A tenant's place at one device: its swap file there, and the reactor's indexes of file and arena."""

    device: SwapDevice
    swap_file: SwapFile
    file: int
    buffer: int

    @classmethod
    def take(cls, device: SwapDevice, request: Attach, file_index: int, owner: Owner, arena: Region) -> Seat:
        """Raises SwapSpaceError, DeviceIOError or OSError, and leaves nothing behind then."""
        with contextlib.ExitStack() as undo:
            swap_file = SwapFile.create(
                device.swap_dir.path,
                job=request.job,
                rank=request.rank,
                frame_bytes=request.frame_bytes,
                file_index=file_index,
                owner=owner,
                direct=device.swap_dir.direct,
            )
            undo.callback(swap_file.close)
            undo.callback(swap_file.unlink)
            file = device.reactor.add_file(swap_file.fd)
            undo.callback(device.reactor.remove_file, file)
            buffer = device.reactor.add_buffer(arena)
            undo.pop_all()
        return cls(device, swap_file, file, buffer)

    def request(self, io: StartIo, table: Table, requester: Requester) -> SwapRequest:
        """``io`` as this device takes it."""
        return SwapRequest(
            io=io,
            requester=requester,
            file=self.file,
            buffer=self.buffer,
            buffer_offset=frame_offset(io.frame, table.geometry.frame_bytes),
            checksums=table.region,
            checksums_offset=table.checksum_offset(io.checksum_index),
        )

    def leave(self) -> None:
        """Only when no I/O of the tenant is in flight any more."""
        with contextlib.ExitStack() as steps:  # each is taken, whatever becomes of the others
            steps.callback(self.swap_file.close)
            steps.callback(self.swap_file.give_up_space)
            steps.callback(self.swap_file.unlink)
            steps.callback(self.device.reactor.remove_file, self.file)
            steps.callback(self.device.reactor.remove_buffer, self.buffer)


class Holdings:
    """Everything that a tenant owns and must give back. Making and closing may take seconds (a big arena is registered
    with every reactor, page by page): both belong in a thread."""

    def __init__(
        self, request: Attach, arena_fd: int, devices: Sequence[SwapDevice], block_bytes: int, owner: Owner
    ) -> None:
        """Raises ProtocolError, ConfigError, SwapSpaceError, DeviceIOError, LimitError, OSError; nothing is left."""
        geometry = TableGeometry(request.num_frames, request.frame_bytes, block_bytes, request.chunks_max)
        arena = adopt_arena(arena_fd, request.num_frames, request.frame_bytes)
        with contextlib.ExitStack() as resources:
            with naming_limits("make a rank's table, which is mostly holes"):
                self.table = Table(geometry, request.job, request.rank)
            resources.callback(self.table.close)
            self.rings = Rings()
            resources.callback(self.rings.close)
            self.seats: list[Seat] = []
            for index, device in enumerate(devices):
                self.seats.append(Seat.take(device, request, index, owner, arena))
                resources.callback(self.seats[-1].leave)
            resources.callback(self._stop_looking)
            self._resources = resources.pop_all()

    @property
    def swap_bytes(self) -> int:
        """All its swap files together."""
        return sum(seat.swap_file.file_bytes for seat in self.seats)

    def grow(self, growth_bytes: Sequence[int], budget_bytes: int, spare_bytes: int = 0) -> None:
        """Reserve so much more in each swap file; all or none. Raises SwapSpaceError, also beyond the budget.

        With ``spare_bytes``, which will be free beside what is, the disks are only asked whether they would do."""
        if self.swap_bytes + sum(growth_bytes) > budget_bytes:
            raise SwapSpaceError(
                path=", ".join(str(seat.device.swap_dir.path) for seat in self.seats),
                needed_bytes=sum(growth_bytes),
                free_bytes=max(0, budget_bytes - self.swap_bytes),
                remedy="the daemon grants one rank no more: raise its --swap-budget-bytes",
            )
        with contextlib.ExitStack() as undo:
            if spare_bytes:
                undo.callback(self._look_for(sum(growth_bytes), spare_bytes))
            for seat, num_bytes in zip(self.seats, growth_bytes, strict=True):
                before_bytes = seat.swap_file.file_bytes
                seat.swap_file.grow(before_bytes + num_bytes, reserve=not spare_bytes)
                undo.callback(seat.swap_file.shrink, before_bytes)
            undo.pop_all()

    def reserve(self) -> None:
        """Reserve what the swap files grew by without. Raises SwapSpaceError; some of it may be reserved then."""
        self._stop_looking()
        for seat in self.seats:
            seat.swap_file.reserve()

    def _look_for(self, num_bytes: int, spare_bytes: int) -> Callable[[], None]:
        """Ranks of a job name the same directories in the same order: the first one's device knows of all. Gives what
        undoes it."""
        looked_for = self.seats[0].device.looked_for
        free_bytes = sum({seat.swap_file.device: seat.swap_file.free_bytes for seat in self.seats}.values())
        free_bytes += spare_bytes - sum(looked_for.values())
        if num_bytes > free_bytes:
            raise SwapSpaceError(
                path=", ".join(str(seat.device.swap_dir.path) for seat in self.seats),
                needed_bytes=num_bytes,
                free_bytes=max(0, free_bytes),
                errno=errno.ENOSPC,
                remedy=remedy_against(errno.ENOSPC, "name another directory, or add one"),
            )
        before_bytes = looked_for.get(self, 0)
        looked_for[self] = before_bytes + num_bytes - spare_bytes
        return lambda: looked_for.update({self: before_bytes})

    def _stop_looking(self) -> None:
        self.seats[0].device.looked_for.pop(self, None)

    def close(self) -> None:
        self._resources.close()
