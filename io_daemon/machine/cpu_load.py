"""Work for the CPU, in amounts and not in seconds, so that it takes longer beside I/O as real work does.

Two kinds: arithmetic that stays in the cache (stacks of small matrix products, for forward and backward), and passes
over memory (copies of weights and gradients, the update in place). Each thread works on its own part; NumPy lets go of
the interpreter meanwhile. The products are small enough that no BLAS starts threads of its own.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from io_daemon.policy.step_trace import CpuRates

MATRIX_ROWS: Final = 64
STACK: Final = 8
UNIT_FLOPS: Final = STACK * 2 * MATRIX_ROWS**3
"""The work of about 0.1 ms of one core."""
PIECE_UNITS: Final = 10
"""Each of several threads is given so much at a time, and all wait for the last of them, as after each of training's
loops: for one unit, handing out would take half as long; for many, they would not wait for whoever lost its core."""
SCRATCH_BYTES: Final = 128 << 20
"""Larger than caches: what is copied comes from memory and goes there."""
PIECE_BYTES: Final = 4 << 20
NOISE_BYTES: Final = 256 << 10
"""Stays in the cache."""
CALIBRATION_S: Final = 0.05
CALIBRATION_ROUNDS: Final = 5

Bytes = NDArray[np.uint8]


class Load(Protocol):
    """What a rank does between its requests."""

    def compute(self, flops: float) -> None: ...

    def copy(self, frames: Sequence[Bytes], *, into: bool) -> None:
        """All of ``frames``, in or out, once."""

    def update(self, frames: Sequence[Bytes]) -> None:
        """Change every byte of ``frames`` in place, once. Lengths are multiples of 8."""


class CpuLoad:
    """``num_threads`` of this process. A context manager."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        random = default_rng(0)
        shape = (num_threads, STACK, MATRIX_ROWS, MATRIX_ROWS)
        self._left = random.random(shape, np.float32)
        self._right = random.random(shape, np.float32)
        self._product = np.empty(shape, np.float32)
        self._scratch = np.frombuffer(bytearray(random.bytes(SCRATCH_BYTES)), np.uint8)
        self._scratch_at = 0
        self._noise = self._scratch[:NOISE_BYTES].view(np.uint64).copy()
        self._owed_flops = 0.0
        self._piece_units = PIECE_UNITS if num_threads > 1 else 1
        self._piece_flops = self._piece_units * UNIT_FLOPS * num_threads
        # no executor: an interrupt raised within a future's lock leaves the thread that ends it waiting for ever
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: SimpleQueue[Exception | None] = SimpleQueue()
        for _ in range(num_threads if num_threads > 1 else 0):
            threading.Thread(target=self._work, name="infinity-load", daemon=True).start()

    def __enter__(self) -> CpuLoad:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for _ in range(self.num_threads):
            self._given.put(None)

    def compute(self, flops: float) -> None:
        """What is less than a piece is owed to the next call."""
        self._owed_flops += flops
        while self._owed_flops >= self._piece_flops:
            self._owed_flops -= self._piece_flops
            self._on_threads(self._multiply)

    def copy(self, frames: Sequence[Bytes], *, into: bool) -> None:
        pairs = [(frame, self._next_scratch(len(frame))) for frame in frames]
        if into:
            pairs = [(scratch, frame) for frame, scratch in pairs]
        self._on_threads(lambda thread: _copy(pairs[thread :: self.num_threads]))

    def update(self, frames: Sequence[Bytes]) -> None:
        self._on_threads(lambda thread: _update(frames[thread :: self.num_threads], self._noise))

    def calibrate(self) -> CpuRates:
        """Takes about a second."""
        pieces = self._scratch.reshape(-1, PIECE_BYTES)
        other = np.ones_like(self._scratch).reshape(-1, PIECE_BYTES)
        return CpuRates(
            num_threads=self.num_threads,
            flops=_rate(lambda: self.compute(self._piece_flops), self._piece_flops),
            copied_bytes=_rate(lambda: self.copy(list(other), into=False), SCRATCH_BYTES),
            updated_bytes=_rate(lambda: self.update(list(pieces)), SCRATCH_BYTES),
        )

    def _multiply(self, thread: int) -> None:
        for _ in range(self._piece_units):
            np.matmul(self._left[thread], self._right[thread], out=self._product[thread])

    def _next_scratch(self, num_bytes: int) -> Bytes:
        """The next part of the scratch, round and round."""
        if num_bytes > len(self._scratch):
            self._scratch = np.resize(self._scratch, num_bytes)
        if self._scratch_at + num_bytes > len(self._scratch):
            self._scratch_at = 0
        start = self._scratch_at
        self._scratch_at += num_bytes
        return self._scratch[start : start + num_bytes]

    def _on_threads(self, work: Callable[[int], None]) -> None:
        if self.num_threads == 1:
            work(0)
            return
        for thread in range(self.num_threads):
            self._given.put(partial(work, thread))
        for error in [self._ended.get() for _ in range(self.num_threads)]:
            if error is not None:
                raise error

    def _work(self) -> None:
        for work in iter(self._given.get, None):
            try:
                work()
            except Exception as error:  # noqa: BLE001 (raised where the work is waited for)
                self._ended.put(error)
            else:
                self._ended.put(None)


class AcceleratorLoad:
    """Arithmetic on a device of ``flops`` a second, for which the CPU only waits; passes over memory are the CPU's."""

    def __init__(self, cpu: CpuLoad, flops: float) -> None:
        self._cpu, self._flops = cpu, flops
        self._owed_s = 0.0

    def compute(self, flops: float) -> None:
        """What is too short to sleep, or was overslept, goes to the next call."""
        self._owed_s += flops / self._flops
        if self._owed_s > SLEEP_MIN_S:
            start = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - start

    def copy(self, frames: Sequence[Bytes], *, into: bool) -> None:
        self._cpu.copy(frames, into=into)

    def update(self, frames: Sequence[Bytes]) -> None:
        self._cpu.update(frames)


SLEEP_MIN_S: Final = 0.0005


def _copy(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    for source, target in pairs:
        np.copyto(target, source)


def _update(frames: Sequence[Bytes], noise: NDArray[np.uint64]) -> None:
    """Adds noise, which a drive that compresses finds as hard as numbers in training."""
    for frame in frames:
        words = frame.view(np.uint64)
        for start in range(0, len(words), len(noise)):
            part = words[start : start + len(noise)]
            np.add(part, noise[: len(part)], out=part)


def _rate(work: Callable[[], None], amount: float) -> float:
    """Amount a second: median of some rounds."""
    rates = []
    for _ in range(CALIBRATION_ROUNDS):
        count, start = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start) < CALIBRATION_S:
            work()
            count += 1
        rates.append(count * amount / elapsed_s)
    return statistics.median(rates)
