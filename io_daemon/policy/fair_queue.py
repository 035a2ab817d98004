"""Which I/O goes to a reactor next, when several tenants have some. Pure."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Generic, Protocol, TypeVar

QUANTUM_BYTES: Final = 1 << 20
SHARES: Final = 32
"""Each tenant at work brings this part of the maximum in flight to the window that all have while one reads on demand:
two blocks of a depth of 32. Half of the window may be writes."""
LINGER: Final = 4
"""Maxima in flight that are started before a tenant is taken to be at work, or to read on demand, no more."""
ENOUGH: Final = 0.75
"""A tenant that has had this part of an equal share lately does not come off badly."""

_DEMAND_READ, _DEMAND_WRITE, _PREFETCH, _WRITE_BEHIND = range(4)
_URGENT: Final = (_DEMAND_READ, _DEMAND_WRITE, _PREFETCH)
_LATER: Final = (_WRITE_BEHIND,)


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
    """I/O of one tenant that has not been started, each lane in order of arrival."""

    __slots__ = ("deficit_bytes", "lanes")

    def __init__(self) -> None:
        self.lanes: tuple[deque[Request], ...] = (deque(), deque(), deque(), deque())
        self.deficit_bytes = 0


class FairQueue(Generic[Request]):
    """Deficit round robin by bytes between tenants.

    **What goes first.** All that somebody waits for, or soon will, goes before anybody's write-behind; within a tenant
    reads on demand, then writes on demand, then prefetch. A tenant whose leases have come to wait for its own
    write-behind says so (``hurry``), and then that is on demand as well: so write-behind may be passed over for as
    long as nobody needs it, and nobody starves. Over any time in which two tenants both have a backlog of the same
    urgency and neither is held back, the bytes started for them differ by less than one quantum and one largest
    request.

    **How much is in flight.** At most ``in_flight_bytes_max`` are started and not completed. While somebody reads on
    demand, others are at work and it has had less than ENOUGH of an equal share, much less, since that rank stands
    still and its read waits for all that is in flight: one part in SHARES for each tenant at work, of which half may be
    writes. Within so small a window it is the turns that decide who has how much of the drive. Tenants that ask for as
    much as each other have their shares without it, and the drive its depth. "While" and "lately" are counted in bytes,
    as there is no clock here: LINGER maxima started since. One request is always allowed, however large.

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
        self._written_bytes = 0
        """In flight, of all tenants."""
        self._started_bytes = 0
        """In all: the time of this place."""
        self._last_push: dict[int, int] = {}
        """The time at which each tenant last asked for anything."""
        self._last_demand_read: dict[int, int] = {}
        """The time at which each tenant last asked for a read that it waits for."""
        self._paces: dict[int, tuple[float, int]] = {}
        """Bytes started for each tenant lately (what is LINGER maxima old counts a third), and when that was so."""

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def push(self, tenant: int, request: Request) -> None:
        backlog = self._backlogs.get(tenant)
        if backlog is None:
            backlog = self._backlogs[tenant] = _Backlog()
            self._turns.append(tenant)
        self._last_push[tenant] = self._started_bytes
        if request.demand and not request.write:
            self._last_demand_read[tenant] = self._started_bytes
        lane = (_DEMAND_WRITE if request.write else _DEMAND_READ) if request.demand else (
            _WRITE_BEHIND if request.write else _PREFETCH)  # fmt: skip
        backlog.lanes[lane].append(request)
        self._num_waiting += 1

    def hurry(self, tenant: int) -> None:
        """Leases of the tenant wait for what it writes behind."""
        if (backlog := self._backlogs.get(tenant)) is not None:
            backlog.lanes[_DEMAND_WRITE].extend(backlog.lanes[_WRITE_BEHIND])
            backlog.lanes[_WRITE_BEHIND].clear()

    def pop(self) -> tuple[int, Request] | None:
        """(tenant, request) to start now; None if none waits, or none may start before another has ended."""
        window_bytes = self._window_bytes()
        for lanes in _URGENT, _LATER:
            num_passed_over = 0
            while num_passed_over < len(self._turns):
                tenant = self._turns[0]
                backlog = self._backlogs[tenant]
                lane = self._first_lane(backlog, lanes, window_bytes)
                if lane is None:
                    num_passed_over += 1
                    self._turns.rotate(-1)
                    continue
                num_bytes = lane[0].num_bytes
                if self.in_flight_bytes and self.in_flight_bytes + num_bytes > window_bytes:
                    return None
                if backlog.deficit_bytes >= num_bytes:
                    backlog.deficit_bytes -= num_bytes
                    return tenant, self._start(tenant, backlog, lane)
                backlog.deficit_bytes += self._quantum_bytes
                num_passed_over = 0
                self._turns.rotate(-1)
        return None

    def complete(self, request: Request) -> None:
        """A popped request has ended, well or not."""
        if request.num_bytes > self.in_flight_bytes:
            raise ValueError(f"{request.num_bytes} bytes completed, {self.in_flight_bytes} are in flight")
        self.in_flight_bytes -= request.num_bytes
        if request.write:
            self._written_bytes -= request.num_bytes

    def remove(self, tenant: int) -> list[Request]:
        """Forget a tenant that has left: what of it had not been started."""
        for of_tenant in self._last_push, self._last_demand_read, self._paces:
            of_tenant.pop(tenant, None)
        backlog = self._backlogs.pop(tenant, None)
        if backlog is None:
            return []
        self._turns.remove(tenant)
        requests = [request for lane in backlog.lanes for request in lane]
        self._num_waiting -= len(requests)
        return requests

    def _start(self, tenant: int, backlog: _Backlog[Request], lane: deque[Request]) -> Request:
        request = lane.popleft()
        if not any(backlog.lanes):  # an idle tenant saves up nothing
            del self._backlogs[tenant]
            self._turns.remove(tenant)
        self._num_waiting -= 1
        self._paces[tenant] = (self._pace(tenant) + request.num_bytes, self._started_bytes)
        self._started_bytes += request.num_bytes
        self.in_flight_bytes += request.num_bytes
        if request.write:
            self._written_bytes += request.num_bytes
        return request

    def _first_lane(
        self, backlog: _Backlog[Request], lanes: tuple[int, ...], window_bytes: int
    ) -> deque[Request] | None:
        """The first of ``lanes`` that has a request, and not a write too many."""
        writes_max = self.in_flight_bytes_max if window_bytes == self.in_flight_bytes_max else window_bytes // 2
        for index in lanes:
            lane = backlog.lanes[index]
            if lane and not (
                lane[0].write and self._written_bytes and self._written_bytes + lane[0].num_bytes > writes_max
            ):
                return lane
        return None

    def _window_bytes(self) -> int:
        """So many bytes may be in flight now."""
        since = self._started_bytes - LINGER * self.in_flight_bytes_max
        at_work = [tenant for tenant, at in self._last_push.items() if at >= since]
        standing = [tenant for tenant in at_work if self._last_demand_read.get(tenant, -math.inf) >= since]
        if not standing or min(map(self._pace, standing)) >= ENOUGH * sum(map(self._pace, at_work)) / len(at_work):
            return self.in_flight_bytes_max
        return min(self.in_flight_bytes_max, len(at_work) * self.in_flight_bytes_max // SHARES)

    def _pace(self, tenant: int) -> float:
        """Bytes started for the tenant lately."""
        num_bytes, at = self._paces.get(tenant, (0.0, 0))
        return num_bytes * math.exp((at - self._started_bytes) / (LINGER * self.in_flight_bytes_max))
