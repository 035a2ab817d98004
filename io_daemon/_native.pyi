"""The compiled core (csrc/). It moves bytes and decides nothing; no torch, no policy."""

from collections.abc import Sequence
from typing import Final, TypedDict, final

import numpy as np
from numpy.typing import NDArray

ENGINES: Final[tuple[str, ...]]
"""Engines compiled in, best first: a subset of ("io_uring", "libaio", "posix")."""
WIRE_LAYOUT: Final[dict[str, dict[str, tuple[int, int, int]]]]
"""struct -> field -> (offset, bytes, bytes of one item); the key "" holds (sizeof, alignof, 0)."""
WIRE_CONSTANTS: Final[dict[str, int]]
POSIX_THREADS_MAX: Final[int]
"""So many I/Os the posix engine has in flight at most, however deep its queue."""
NUM_LATENCY_BUCKETS: Final[int]
"""Of a histogram; see io_daemon/bench/latency.py."""

def latency_bucket(ns: int) -> int:
    """Which bucket counts a latency of ``ns`` nanoseconds, 0 to 2**64 - 1."""

def probe_engine(engine: str) -> str | None:
    """None if the engine works on this machine, else one line that says why not."""

def allocate(fd: int, offset: int, num_bytes: int) -> None:
    """fallocate(2): reserve the bytes of a file, which grows with it. OSError with EOPNOTSUPP where the filesystem has
    none: unlike os.posix_fallocate it never reads and rewrites what is there. GIL released."""

def checksum(buffer: NDArray[np.uint8]) -> int:
    """The 32-bit block checksum of contiguous bytes: CRC-32C by the CPU's instructions. GIL released."""

def checksum_portable(buffer: NDArray[np.uint8]) -> int:
    """The same by tables alone, as on a CPU without such instructions; equal on every input. GIL released."""

def join_halves(
    numbers: NDArray[np.int16], rests: NDArray[np.int16], markers: NDArray[np.int32], values: NDArray[np.int32]
) -> list[int]:
    """Write fp32 values, by their bits, from bf16 numbers and rests, and take away the marks in the signs of markers.
    Arrays are 1-D, contiguous and of one length. Returns the places of the marks, in order. GIL released."""

def cut_halves(
    values: NDArray[np.int32], numbers: NDArray[np.int16], rests: NDArray[np.int16], markers: NDArray[np.int32]
) -> list[int] | None:
    """Write numbers, rests and marks. Returns the places of the marks, in order; None where a marker is negative whose
    sign would be a mark: no marker has changed then. GIL released."""

def round_by_chance(values: NDArray[np.int32], dropped: int, seed: int, first: int) -> None:
    """Round fp32 values, given by their bits, in place to those whose lowest ``dropped`` bits are zero, up with the
    chance of what is cut off. The numbers are drawn from ``seed`` (32 bits) and places, which begin at ``first``. What
    is not finite stays. GIL released."""

def narrow_blocks(values: NDArray[np.int32], stored: NDArray[np.uint8], is_signed: bool) -> bool:
    """Write blocks of 64 fp32 values, given by their bits, as a byte a value and, behind all of them, a byte a block.
    Returns whether there was a sign that unsigned codes have no bit for. GIL released.

    Raises ValueError where the lengths do not fit."""

def widen_blocks(stored: NDArray[np.uint8], values: NDArray[np.int32], is_signed: bool) -> None:
    """Write the values that ``narrow_blocks`` stored. GIL released."""

def add_squares(
    values: NDArray[np.float32] | NDArray[np.int16], state: NDArray[np.float32], first: int, count: int
) -> None:
    """Go on summing the squares of a column of ``count`` numbers, fp32 or bf16 by their bits, with those from number
    ``first`` on, as torch's norm of a contiguous fp32 tensor on a CPU does: ``state`` [16], zeros at first, is eight
    sums, the last ``count % 8`` numbers, and 0, or NaN if a number is not finite. GIL released.

    Raises ValueError where ``state`` has another length or the numbers lie beyond ``count``."""

def norms_of_squares(states: NDArray[np.float32], counts: NDArray[np.int64], norms: NDArray[np.float32]) -> None:
    """Write the norms of columns: ``states`` [16 a column], one after another, ``counts`` their numbers' counts.

    Raises ValueError where the lengths do not fit."""

@final
class Region:
    """A shared mapping of a memfd (or any mappable fd). Raises OSError. Unmapped when the last user is gone."""
    def __init__(self, fd: int, region_bytes: int, *, writable: bool = True) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def region_bytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    def array(self) -> NDArray[np.uint8]:
        """1-D view; keeps the mapping alive; read-only if the mapping is."""
    def prefault(self, num_threads: int) -> int:
        """Allocate every page, in parallel, in huge pages of 2 MiB where the kernel has them to give (MADV_COLLAPSE,
        Linux 6.1, whatever its settings; earlier ones only where shmem_enabled allows); contents stay. Returns how many
        bytes were put into huge pages."""
    def lock(self) -> None:
        """mlock; OSError with errno EPERM or ENOMEM where the limit forbids it."""
    def dont_fork(self) -> None:
        """MADV_DONTFORK: children do not inherit the mapping."""
    def zero(self, offset: int, num_bytes: int) -> None:
        """memset to 0, bounds-checked, GIL released."""

@final
class SubmissionRing:
    """SPSC ring of wire::Sqe at ``offset`` of a region. ``create`` formats it; otherwise magic,
    version and geometry are verified (ValueError), and the ring goes on where it stands. Indexes that the other
    process corrupts are a ValueError of whichever verb sees them. ``wake_fd``: this side's end of a pair of Unix
    datagram sockets, duplicated; what the other side does to its end neither blocks this one nor makes it busy.
    The producer side takes a lock: several threads may push."""
    @staticmethod
    def bytes_required(num_entries: int) -> int: ...
    def __init__(self, region: Region, offset: int, num_entries: int, wake_fd: int, *, create: bool) -> None: ...
    def push(
        self,
        seq: int,
        opcode: int,
        flags: int,
        read_mask: int = 0,
        write_mask: int = 0,
        chunk: int = 0,
        arg: int = 0,
        dirty_mask: int = 0,
        dead_mask: int = 0,
    ) -> bool:
        """False if the ring is full. Wakes a sleeping consumer through the sockets. Never blocks."""
    def pop(self) -> tuple[int, int, int, int, int, int, int, int, int] | None: ...
    def pop_batch(self, entries_max: int) -> list[tuple[int, int, int, int, int, int, int, int, int]]: ...
    def prepare_sleep(self) -> bool:
        """Arm the wake-up; True if the ring is still empty and the caller may sleep on the socket (and
        receives what has woken it: one datagram a wake-up)."""
    def wait(self, timeout_ms: int, other_fd: int = -1) -> int:
        """Sleep until an entry is there: 0 ready, 1 timed out, 2 other_fd readable or hung up. GIL released; signal
        handlers run in between. timeout_ms must not be negative."""
    def __len__(self) -> int: ...

@final
class CompletionRing:
    """SPSC ring of wire::Cqe; the same verbs."""
    @staticmethod
    def bytes_required(num_entries: int) -> int: ...
    def __init__(self, region: Region, offset: int, num_entries: int, wake_fd: int, *, create: bool) -> None: ...
    def push(
        self,
        seq: int,
        status: int,
        error_number: int,
        chunk: int,
        file: int,
        kind: int,
        born_mask: int,
        offset: int,
        expected: int,
        actual: int,
    ) -> bool: ...
    def pop(self) -> tuple[int, int, int, int, int, int, int, int, int, int] | None: ...
    def pop_batch(self, entries_max: int) -> list[tuple[int, int, int, int, int, int, int, int, int, int]]: ...
    def prepare_sleep(self) -> bool: ...
    def wait(self, timeout_ms: int, other_fd: int = -1) -> int: ...
    def __len__(self) -> int: ...

class ReactorStats(TypedDict):
    bytes_read: int
    """Moved by the engine, also for requests that failed."""
    bytes_written: int
    num_reads: int
    """Block I/Os that moved bytes, continuations included."""
    num_writes: int
    num_short: int
    """Block I/Os that moved fewer bytes than asked for."""
    num_in_flight: int
    """Requests submitted and not completed."""

class HistogramFields(TypedDict):
    """Nanoseconds. ``counts``: uint64 of shape (NUM_LATENCY_BUCKETS,), a copy. Minimum and maximum are 0 of nothing."""

    counts: NDArray[np.uint64]
    num: int
    sum_ns: int
    min_ns: int
    max_ns: int

class StageFields(TypedDict):
    slat: HistogramFields
    """From when the reactor offers a block to the engine until the engine has taken it."""
    clat: HistogramFields
    """From then until its last byte's completion was reaped."""
    lat: HistogramFields
    """Both."""

class LatencyFields(TypedDict):
    read: StageFields
    write: StageFields

class Reactor:
    """One I/O thread over one engine: cuts requests into blocks, keeps ``queue_depth`` of them in
    flight, computes or verifies block checksums, reads every completion's result."""

    READ: Final[int]
    WRITE: Final[int]
    def __init__(
        self, engine: str, queue_depth: int, block_bytes: int, *, faults: Sequence[tuple[str, int, int]] = ()
    ) -> None:
        """faults, for tests: (what, nth block I/O from 0, value) with what in
        "errno_read" | "errno_write" (value = errno), "short_read" | "short_write" (value = bytes
        transferred), "flip_read" | "flip_write" (value = byte index), "delay" (value = microseconds), "break" (the
        engine as a whole fails; value = errno). Reads and writes are counted apart, "delay" and "break" count both;
        continuations and retries count too.
        Raises OSError if the engine cannot start; ValueError unless queue_depth is in 1..4096 and block_bytes a
        multiple of 4096 up to 1 GiB."""
    @property
    def event_fd(self) -> int:
        """Readable when completions wait; read it (8 bytes) before reap()."""
    @property
    def engine(self) -> str: ...
    def add_file(self, fd: int) -> int:
        """Duplicates fd (same open file description: a flock lives on) and registers it with the engine."""
    def remove_file(self, index: int) -> None:
        """RuntimeError while requests use it; does nothing once the reactor has ended."""
    def add_buffer(self, region: Region) -> int:
        """Registers the region with the engine where it has registered buffers (pieces of at most 1 GiB) and the
        memlock limit allows; without, I/O works as well. GIL released: pinning takes a while."""
    def remove_buffer(self, index: int) -> None:
        """RuntimeError while requests use it; does nothing once the reactor has ended."""
    def submit(
        self,
        tag: int,
        op: int,
        file: int,
        offset: int,
        buffer: int,
        buffer_offset: int,
        num_bytes: int,
        checksums: Region | None = None,
        checksums_offset: int = 0,
        verify: bool = False,
    ) -> None:
        """Queue one request; never blocks. Blocks start at multiples of block_bytes from the request's own start.
        WRITE stores one uint32 per block at checksums_offset (of the bytes as they are when the block is handed to
        the engine: they must not change meanwhile), READ verifies against them if ``verify``. Bounds are checked
        (ValueError). RuntimeError once closed, or with 65536 requests not reaped."""
    def reap(self, completions_max: int) -> list[tuple[int, int, int, int, int, int]]:
        """(tag, status, error_number, offset, expected, actual); status as protocol.Status: OK, IO_ERROR,
        SHORT_IO or INTEGRITY. One entry per request, after its last block. OK: the request's own offset and bytes
        (twice). Otherwise of the first block that failed: its offset in the file, its bytes and those
        moved, or the stored checksum and the one found. event_fd stays readable while more are there.
        OSError once nothing is left to reap of an engine that has broken down. What was in flight then is never
        reported, and its memory and files are held until the process ends: the kernel may still write there."""
    def stats(self) -> ReactorStats: ...
    def close(self, timeout_ms: int = 10_000) -> bool:
        """Refuse new requests, perform those accepted, end the thread. True: engine, files and buffers are released.
        False if it timed out (the thread goes on and ends by itself; close() may be called again), and at once if the
        engine has broken down (only the end of the process releases anything then). What has completed
        can still be reaped. A reactor that is dropped unclosed does the same without anybody waiting."""

@final
class BenchReactor(Reactor):
    """A reactor that times its block I/Os and takes requests of single blocks: what only the bench needs."""
    def submit_blocks(
        self,
        tag: int,
        file: int,
        writes: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
        buffer: int,
        buffer_offsets: NDArray[np.uint64] | None,
        num_bytes: int,
        headers: NDArray[np.uint8] | None = None,
    ) -> None:
        """Queue one request of single blocks, each ``num_bytes`` (1 to block_bytes) at its own place; never blocks.
        ``writes``: 1 for WRITE, 0 for READ. The arrays are of one length n, 1 to 65536, contiguous, and copied.
        Blocks start in the order given and have no checksums. Completes as any request: OK with the first block's
        offset and the bytes of all (twice), otherwise with the first block, in the order given, that failed. Raises as
        ``submit``; TypeError for other dtypes.
        ``buffer_offsets`` None: each block goes through a piece of ``num_bytes`` at the beginning of the buffer that
        no block in flight uses: one of ``queue_depth`` for a WRITE, of as many behind them for a READ. ``headers``,
        only then: [n, h], h up to 4096; row i is copied over the beginning of every page of its piece just before
        block i is written. Such requests in flight together are of one ``num_bytes``."""
    def latencies(self) -> LatencyFields:
        """A copy of what has been counted since the last reset: block I/Os whose bytes have all moved, each once, from
        its first submission to its last completion."""
    def clat(self) -> HistogramFields:
        """Of ``latencies`` the clat of reads and writes together: less to copy."""
    def reset_latencies(self) -> None: ...
