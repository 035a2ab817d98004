"""Copies between host and device beside the computation. A CPU has one timeline, meta none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from infinity.tiers.base import is_beside


class CopyStream:
    """A stream for copies and collectives, ordered against the computing stream.

    Memory that is allocated while it is current belongs to it: copies there wait for nothing that is computed, and
    whoever computes with it says so by ``join``. The host may then be far ahead of what the device does, and what it
    gives up is still in use: ``limit`` holds it back.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device) if is_beside(device) else None
        self._given_up: deque[tuple[int, torch.Event]] = deque()
        """Elements of weights that were given up, and when the device is done with them."""

    @property
    def is_beside(self) -> bool:
        """Whether there is another timeline."""
        return self._stream is not None

    def _current(self) -> torch.Stream:
        """The stream that computes on the engine's device, whichever device is the thread's."""
        if self._stream is None:
            raise AssertionError("there is one timeline")
        return torch.accelerator.current_stream(self._stream.device)

    @contextmanager
    def issue(self, *, after_current: bool) -> Iterator[None]:
        """Queue work on the copy stream; ``after_current``: once all is done that the current stream holds now."""
        if self._stream is None:
            yield
            return
        if after_current:
            self._stream.wait_stream(self._current())
        with self._stream:
            yield

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] on the host, of undefined contents, to which a copy from the device needs nobody's help."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.is_beside)

    def mark(self) -> torch.Event:
        """What is reached once all is done that was issued."""
        if self._stream is None:
            raise AssertionError("nothing is issued beside the computation")
        return self._stream.record_event()

    def join(self, used: Iterable[torch.Tensor] = ()) -> None:
        """The current stream waits for the copies, and the host does not; it goes on with ``used``, whose memory is
        nobody else's before it is done."""
        if self._stream is None:
            return
        current = self._current()
        current.wait_stream(self._stream)
        for tensor in used:
            tensor.record_stream(current)

    def note_given_up(self, numel: int) -> None:
        """The host has given up so many elements of weights; what the current stream holds may still read them."""
        if self._stream is None:
            return
        with suppress(RuntimeError):  # of a device that is lost, which says so where it is computed with
            self._given_up.append((numel, self._current().record_event()))

    def limit(self, numel_max: int) -> None:
        """Block while the device holds more than ``numel_max`` elements that were given up, but for those of the last
        time: it computes with them while the next ones come."""
        numel = sum(numel for numel, _ in self._given_up)
        while len(self._given_up) > 1 and (numel > numel_max or self._given_up[0][1].query()):
            given_up, event = self._given_up.popleft()
            event.synchronize()
            numel -= given_up
