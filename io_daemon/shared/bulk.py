"""What is too long for a control message travels beside it, as a memfd: it is read in one piece by whoever has the time
for it, and nothing has to be parsed item by item."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from io_daemon.errors import ProtocolError
from io_daemon.shared.protocol import KINDS_MAX, ChunkSpec

READ_BYTES: Final = 16 << 20
CHUNK_BYTES: Final = 8 * KINDS_MAX + 1
"""One chunk takes so much in ``pack_specs``: the sizes of its kinds, and a mask."""
SPECS_AT_ONCE: Final = 4096
FREED_AT_ONCE: Final = 1024


@contextlib.contextmanager
def as_memfd(data: bytes) -> Iterator[int]:
    """An fd of ``data``, to be sent; closed behind the with block."""
    fd = os.memfd_create("infinity-bulk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        yield fd
    finally:
        os.close(fd)


def read_memfd(fd: int, num_bytes: int) -> bytes:
    """All of it. Raises ProtocolError if it is no memfd (any other file could make us wait for ever) or of another
    size. What the sender writes to it meanwhile does no harm: it is read once, and not mapped."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"what came beside the message is no memfd: {error.strerror}") from error
    if os.fstat(fd).st_size != num_bytes:
        raise ProtocolError(f"what came beside the message holds {os.fstat(fd).st_size} bytes, not {num_bytes}")
    pieces = [os.pread(fd, min(READ_BYTES, num_bytes - start), start) for start in range(0, num_bytes, READ_BYTES)]
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(data) != num_bytes:
        raise ProtocolError("what came beside the message shrank while it was read")
    return data


def pack_specs(specs: Sequence[ChunkSpec]) -> bytes:
    """Raises ValueError for a size or a mask that is out of range, and for more than KINDS_MAX kinds."""
    sizes = np.zeros((len(specs), KINDS_MAX), dtype="<u8")
    masks = np.zeros(len(specs), dtype=np.uint8)
    for index, spec in enumerate(specs):
        object_bytes, pinned_mask = spec
        if len(object_bytes) > KINDS_MAX or min(object_bytes, default=0) < 0 or max(object_bytes, default=0) >> 63:
            raise ValueError(f"{spec}: at most {KINDS_MAX} sizes, none negative or beyond 63 bits")
        if not 0 <= pinned_mask < 1 << KINDS_MAX:
            raise ValueError(f"{spec}: a mask of {KINDS_MAX} bits is needed")
        sizes[index, : len(object_bytes)] = object_bytes
        masks[index] = pinned_mask
    return sizes.tobytes() + masks.tobytes()


def unpack_specs(data: bytes) -> list[ChunkSpec]:
    count = len(data) // CHUNK_BYTES
    sizes = np.frombuffer(data, dtype="<u8", count=count * KINDS_MAX).reshape(count, KINDS_MAX)
    masks = data[sizes.nbytes :]
    specs: list[ChunkSpec] = []
    for start in range(0, count, SPECS_AT_ONCE):  # other threads have a turn in between
        rows = sizes[start : start + SPECS_AT_ONCE].tolist()
        specs += [ChunkSpec(tuple(row), mask) for row, mask in zip(rows, masks[start:], strict=False)]
    return specs


def free_piecemeal(items: list[ChunkSpec]) -> None:
    """Empty a list: freed in one go, hundreds of thousands of objects would keep all threads from running."""
    while items:
        del items[-FREED_AT_ONCE:]
