"""Access traces of training steps, and a lower bound on the bytes that any policy moves for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from io_daemon.protocol import Access, ChunkSpec, ObjectKind, kinds_of

WEIGHT, GRAD, MASTER = ObjectKind.WEIGHT.mask, ObjectKind.GRAD.mask, ObjectKind.MASTER.mask
EXP_AVG, EXP_AVG_SQ = ObjectKind.EXP_AVG.mask, ObjectKind.EXP_AVG_SQ.mask
STATE = MASTER | EXP_AVG | EXP_AVG_SQ


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


def traffic_bound_bytes(
    accesses: Sequence[Access], specs: Sequence[ChunkSpec], num_frames: int, frame_bytes: int
) -> float:
    """Bytes that every policy reads and writes per pass, repeated for ever, with room for ``num_frames``.

    Between two uses an object may stay (it takes its frames for the accesses between) and save the read at the second
    use; staying from a write until the next overwriting or death saves the write as well, credited here to the
    cheapest of those gaps. The bound relaxes the room at every access to the room summed over the pass, and lets gaps
    be kept in part: a fractional knapsack.
    """
    length = len(accesses)
    room = 0
    uses: dict[tuple[int, int], list[int]] = {}
    for position, access in enumerate(accesses):
        room += num_frames
        for kind in kinds_of(access.read_mask | access.write_mask):
            room -= specs[access.chunk].object_bytes[kind] // frame_bytes
            uses.setdefault((access.chunk, kind), []).append(position)
    total = 0.0
    gaps: list[tuple[float, int]] = []  # bytes saved, frame-accesses taken
    for (chunk, kind), positions in uses.items():
        size = specs[chunk].object_bytes[kind]
        bit = 1 << kind
        chain: list[int] = []  # indices into gaps since the last write whose result is still wanted
        writers = [
            i for i, p in enumerate(positions) if accesses[p].write_mask & bit and not accesses[p].dead_mask & bit
        ]
        first = writers[0] if writers else 0
        for step in range(len(positions)):
            here = positions[(first + step) % len(positions)]
            then = positions[(first + step + 1) % len(positions)]
            distance = (then - here - 1) % length + 1
            if accesses[here].write_mask & bit:
                chain = []
            if accesses[here].dead_mask & bit or not accesses[then].read_mask & bit:
                continue
            total += size
            gaps.append((size, (distance - 1) * size // frame_bytes))
            chain.append(len(gaps) - 1)
            next_step = step + 1 == len(positions) or accesses[then].write_mask & bit or accesses[then].dead_mask & bit
            last_of_chain = next_step or not accesses[positions[(first + step + 2) % len(positions)]].read_mask & bit
            if last_of_chain and accesses[positions[(first + step + 1 - len(chain)) % len(positions)]].write_mask & bit:
                total += size
                cheapest = min(chain, key=lambda index: gaps[index][1])
                gaps[cheapest] = (gaps[cheapest][0] + size, gaps[cheapest][1])
    for saved, taken in sorted(gaps, key=lambda gap: gap[0] / max(gap[1], 1e-9), reverse=True):
        share = 1.0 if taken == 0 else min(1.0, max(room, 0) / taken)
        total -= saved * share
        room -= int(taken * share)
    return total
