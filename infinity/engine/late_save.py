"""A save that is written while the engine trains: a snapshot at a step's end, a thread that writes it, and all ranks
asking one another at the end of each step after it how far they are.

What the thread reads is the store's, chunk by chunk, see ``tiers/snapshot.py``; the rest was copied when it was taken.
So are weights that lie in the parameters themselves: users write to them there, and ask nobody for a lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from contextlib import ExitStack
from typing import Any, Final

import torch

from infinity.checkpoint.manifest import PIECE_NUMEL_MAX
from infinity.checkpoint.writing import Files
from infinity.engine.loop import TrainingLoop
from infinity.engine.saving import Histories, Merged, Saving
from infinity.errors import CheckpointError, EngineStateError
from infinity.plan.sharding import Segment
from infinity.tiers.base import Lease, leased
from infinity.weights.state_io import Seen
from io_daemon.shared.protocol import ObjectKind

STALL_TIMEOUT_S: Final = 300.0
"""Who waits for a save ends it where nothing of it was written for so long."""
FLUSH_TIMEOUT_S: Final = 1200.0
"""Behind its last byte: what the page cache holds goes to the drive, and a former checkpoint from it. Ranks wait for
one another longer (``TIMEOUT_S``): all are told of the drive, not of a rank that never came."""
ABANDON_TIMEOUT_S: Final = 10.0
"""A thread whose save nobody wants any more has so long to see it."""


class _Job:
    """Work in a thread of its own, which ends with the process."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="infinity-save", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and has no new threads
            self._run()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._result = self._work()
        except BaseException as error:  # noqa: BLE001 (raised where somebody asks)
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def result(self) -> Any:
        """What it gave, or its error raised; once it is done."""
        if self._error is not None:
            raise self._error
        return self._result


class _Copied(Lease):
    """A granted lease, with weights that were copied before."""

    def __init__(self, inner: Lease, weights: list[torch.Tensor]) -> None:
        self.chunk = inner.chunk
        self._inner, self._weights = inner, weights

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._weights if kind == ObjectKind.WEIGHT else self._inner.pieces(kind)

    def wait(self) -> None:
        self._inner.wait()

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        self._inner.release(dirty=dirty, dead=dead)


class LateSave:
    """One such save. Its constructor, ``is_ready`` and ``go_on`` are collective."""

    def __init__(self, loop: TrainingLoop, saving: Saving, *, latest: bool, begun: float) -> None:
        """``begun``: when training began to wait for it, in seconds of ``time.perf_counter``."""
        self._begun = begun
        self._loop, self._runtime, self._saving, self._latest = loop, loop.runtime, saving, latest
        self._files: Files | None = None
        """Those of all ranks, when they are written."""
        self._histories: Histories = []
        self._num_bytes = 0
        """This rank's pieces that were written."""
        self._is_scanned = False
        self._waited_s = 0.0
        """Seconds in which the drive took nothing."""
        self._cleanup = ExitStack()
        self._aside = saving.make_aside(self._cleanup)
        masks = self._runtime.io.lasting_chunks(saving.params)
        try:
            self._lent = saving.together(lambda: self._copies(masks), "copy what training will change")
        except BaseException:
            self._cleanup.close()
            raise
        self._snapshot = self._runtime.store.snapshot(masks, self._note_histories)
        self._job = _Job(lambda: saving.write_own(self._aside, self._scan))
        self._held_up_s = time.perf_counter() - self._begun

    def is_ready(self, *, wait: bool) -> bool:
        """Whether all ranks have done their part of what comes now; with ``wait``, after it, or where it stalls."""
        begun = time.perf_counter()
        if wait:
            self._runtime.changes.settle()
            self._wait()
        is_late = torch.tensor([not (self._job.is_done or wait)], dtype=torch.uint8, device="cpu")
        self._runtime.collectives.max(is_late, "see how far a save is")
        ready = not bool(is_late)
        self._held_up_s += 0.0 if wait else time.perf_counter() - begun
        return ready

    def go_on(self) -> bool:
        """Begin what comes next. Whether it is over: the checkpoint is published.

        Raises the error of the rank that it failed on, and a CheckpointError on the others; it is over then, too.
        """
        begun = time.perf_counter()
        try:
            if self._files is None:
                mine = self._saving.together(self._result, "write the checkpoint's pieces")
                self._files, histories = self._saving.gathered(mine, self._histories)
                self._job = self._publishing(self._files, histories)
                return False
            self._saving.together(self._result, "publish the checkpoint")
        except BaseException:
            self.abandon("the save has failed")
            raise
        finally:
            self._held_up_s += time.perf_counter() - begun
        self._cleanup.close()
        note = f", while training went on; {self.held_up_s:.3f} s of that it waited"
        self._saving.tell(self._files, time.perf_counter() - self._begun, note)
        return True

    def _wait(self) -> None:
        """Until this rank's part is done, or nothing of it is written any more."""
        before = -1
        while not self._job.is_done and self._num_bytes > before:
            before = self._num_bytes
            self._waited_s = FLUSH_TIMEOUT_S if self._is_scanned else STALL_TIMEOUT_S
            self._job.wait(self._waited_s)

    def _result(self) -> Any:
        """What this rank's part gave. Raises its error, or CheckpointError where it has come to no end."""
        if not self._job.is_done:
            problem = f"is not written: its drive took nothing for {self._waited_s:.0f} s"
            raise CheckpointError(self._aside, problem, "see to the drive, or save to another one")
        return self._job.result()

    @property
    def held_up_s(self) -> float:
        """Seconds that training has waited for it, those aside in which it was asked to."""
        return self._held_up_s + self._snapshot.waited_s

    def abandon(self, reason: str) -> None:
        """Nobody wants it any more: the former checkpoint stays, and nothing of this one."""
        self._snapshot.end(reason)
        self._job.wait(ABANDON_TIMEOUT_S)
        self._cleanup.close()

    def _publishing(self, files: Files, histories: Merged) -> _Job:
        def publish() -> None:
            if self._runtime.collectives.rank == 0:
                self._saving.publish(self._aside, files, histories, latest=self._latest)

        return _Job(publish)

    def _copies(self, chunks: Container[int]) -> dict[int, list[torch.Tensor]]:
        """The weights of those of ``chunks`` that lie in the parameters themselves, copied; so are all buffers."""
        self._saving.keep_buffers()
        copies = {}
        for group in self._runtime.sharded.groups:
            for chunk in (chunk for chunk, _ in group.chunks if group.is_lent and chunk in chunks):
                with leased(self._runtime.store, chunk, read=ObjectKind.WEIGHT.mask) as lease:
                    copies[chunk] = [piece.to("cpu", copy=True) for piece in lease.pieces(ObjectKind.WEIGHT)]
        return copies

    def _note_histories(self) -> None:
        """All chunks are as they are to be kept."""
        update = self._loop.update
        self._histories = [] if update is None or not self._saving.params else list(update.histories)

    def _scan(self, use: Seen) -> None:
        io, params = self._runtime.io, self._saving.params

        def counted(kind: ObjectKind, segment: Segment, values: torch.Tensor) -> None:
            use(kind, segment, values)
            self._num_bytes += values.nbytes

        def show(lease: Lease) -> None:
            if self._runtime.sharded.copies.is_beside:  # this thread's stream waits for nobody's who trains
                torch.accelerator.synchronize(self._runtime.device)
            copied = self._lent.pop(lease.chunk, None)
            io.show(lease if copied is None else _Copied(lease, copied), params, counted, numel_max=PIECE_NUMEL_MAX)

        try:
            self._snapshot.read_all(show)
        except BaseException as error:
            self._snapshot.end(f"it was not written: {error}")
            if isinstance(error, EngineStateError):
                problem = f"was not finished: {error}"
                raise CheckpointError(self._aside, problem, "save again, or to another disk") from error
            raise
        self._is_scanned = True
