"""Copies between host and device beside the computation. A CPU has one timeline, meta none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyStream:
    """A stream for host-to-device copies and collectives, ordered against the computing stream.

    Memory is allocated on the computing stream, so a copy may start only after what was queued there before.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device) if device.type not in ("cpu", "meta") else None

    @contextmanager
    def issue(self) -> Iterator[None]:
        """Queue work on the copy stream, after all that the current stream holds now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def finish(self) -> None:
        """Block until the copies are done: their host memory may be given back."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """The current stream waits for the copies; the host does not."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
