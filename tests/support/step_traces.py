"""Access traces of training steps. Pure."""

from __future__ import annotations

from io_daemon.shared.protocol import Access, ChunkSpec, ObjectKind

WEIGHT, GRAD, MASTER = ObjectKind.WEIGHT.mask, ObjectKind.GRAD.mask, ObjectKind.MASTER.mask
STATE = MASTER | ObjectKind.STATE_0.mask | ObjectKind.STATE_1.mask


def chunk_specs(num_chunks: int, frame_bytes: int) -> list[ChunkSpec]:
    """16-bit weights and gradients in one frame, fp32 state in two frames each."""
    return [ChunkSpec((frame_bytes, frame_bytes, *(2 * frame_bytes,) * 3))] * num_chunks


def cyclic_scan(chunks: range) -> list[Access]:
    return [Access(chunk, WEIGHT, 0, 0) for chunk in chunks]


def fill(chunks: range, mask: int = WEIGHT | MASTER) -> list[Access]:
    """The first contents of every chunk."""
    return [Access(chunk, 0, mask, 0) for chunk in chunks]


def training_step(chunks: range, *, micro_batches: int = 1) -> list[Access]:
    """Forward, backward with gradients, update in the order that backward ended in."""
    accesses: list[Access] = []
    for micro_batch in range(micro_batches):
        accesses += [Access(chunk, WEIGHT, 0, 0) for chunk in chunks]
        for chunk in reversed(chunks):
            accesses.append(Access(chunk, WEIGHT, 0, 0))
            accesses.append(Access(chunk, GRAD if micro_batch else 0, GRAD, 0))
    accesses += [Access(chunk, GRAD | STATE, STATE | WEIGHT, GRAD) for chunk in chunks]
    return accesses


def evaluation(chunks: range) -> list[Access]:
    return [Access(chunk, WEIGHT, 0, 0) for chunk in chunks]
