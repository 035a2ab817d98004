"""Which I/O goes to a reactor next, when several tenants have some. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, Protocol, TypeVar

QUANTUM_BYTES: Final = 1 << 20


class Transfer(Protocol):
    """What the queue needs to know of a request; a StartIo is one."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def write(self) -> bool: ...
    @property
    def demand(self) -> bool: ...


Request = TypeVar("Request", bound=Transfer)


class _Backlog(Generic[Request]):
    """I/O of one tenant that has not been started: demand, prefetch and write-behind, each in order of arrival."""

    __slots__ = ("deficit_bytes", "queues")

    def __init__(self) -> None:
        self.queues: tuple[deque[Request], deque[Request], deque[Request]] = (deque(), deque(), deque())
        self.deficit_bytes = 0

    def first(self) -> deque[Request] | None:
        return next((queue for queue in self.queues if queue), None)


class FairQueue(Generic[Request]):
    """Deficit round robin by bytes between tenants; within a tenant demand, then prefetch, then write-behind.

    Over any time in which two tenants both have a backlog, the bytes started for them differ by less than one
    quantum and one largest request. At most ``in_flight_bytes_max`` are started and not completed; one request is
    always allowed, however large.

    ``push`` what the schedulers return; ``pop`` until None and start it; ``complete`` when it has ended, then ``pop``
    again.
    """

    def __init__(self, in_flight_bytes_max: int, *, quantum_bytes: int = QUANTUM_BYTES) -> None:
        if in_flight_bytes_max <= 0 or quantum_bytes <= 0:
            raise ValueError(f"in_flight_bytes_max = {in_flight_bytes_max}, quantum_bytes = {quantum_bytes}")
        self.in_flight_bytes_max = in_flight_bytes_max
        self.in_flight_bytes = 0
        self._quantum_bytes = quantum_bytes
        self._backlogs: dict[int, _Backlog[Request]] = {}
        self._turns: deque[int] = deque()
        """Tenants with a backlog; the first one's turn it is."""
        self._num_waiting = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def push(self, tenant: int, action: Request) -> None:
        backlog = self._backlogs.get(tenant)
        if backlog is None:
            backlog = self._backlogs[tenant] = _Backlog()
            self._turns.append(tenant)
        backlog.queues[0 if action.demand else 2 if action.write else 1].append(action)
        self._num_waiting += 1

    def pop(self) -> tuple[int, Request] | None:
        """(tenant, request) to start now; None if none waits or enough are in flight."""
        while self._turns:
            tenant = self._turns[0]
            backlog = self._backlogs[tenant]
            queue = backlog.first()
            if queue is None:
                self._turns.popleft()
                del self._backlogs[tenant]
                continue
            num_bytes = queue[0].num_bytes
            if self.in_flight_bytes and self.in_flight_bytes + num_bytes > self.in_flight_bytes_max:
                return None
            if backlog.deficit_bytes < num_bytes:
                backlog.deficit_bytes += self._quantum_bytes
                self._turns.rotate(-1)
                continue
            backlog.deficit_bytes -= num_bytes
            self.in_flight_bytes += num_bytes
            self._num_waiting -= 1
            return tenant, queue.popleft()
        return None

    def complete(self, num_bytes: int) -> None:
        """A popped request has ended, well or not."""
        if num_bytes > self.in_flight_bytes:
            raise ValueError(f"{num_bytes} bytes completed, {self.in_flight_bytes} are in flight")
        self.in_flight_bytes -= num_bytes

    def remove(self, tenant: int) -> list[Request]:
        """Forget a tenant that has left: what of it had not been started."""
        backlog = self._backlogs.pop(tenant, None)
        if backlog is None:
            return []
        self._turns.remove(tenant)
        actions = [action for queue in backlog.queues for action in queue]
        self._num_waiting -= len(actions)
        return actions
