"""Samples of values that parameters are to have, by which ranks find that they are given the same.

Every rank asks for its own parts alone. Of two models each would take a part of another, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from zlib import crc32

from infinity.errors import WeightsFileError
from infinity.files.pieces import bytes_of
from infinity.tiers.collectives import Collectives
from infinity.weights.owners import Values

SAMPLE_NUMEL: Final = 64
"""Elements that are looked at, at the beginning, in the middle and at the end: a page of the file each."""

Samples = Mapping[str, tuple[str, int]]
"""By parameter's name: the file or index that gives the values, and their checksum."""


def samples_of(given: Iterable[tuple[str, str, int, Values]]) -> Samples:
    """``given``: (parameter's name, file or index, numel, values) of each."""
    return {name: (source, _checksum(values, numel)) for name, source, numel, values in given}


def compare(samples: Samples, collectives: Collectives, what: str) -> None:
    """Raises WeightsFileError unless all ranks have the same, wherever each has it from. Collective."""
    lines = [f"{name} {checksum:08x}" for name, (_, checksum) in samples.items()]
    unlike = collectives.first_unlike(lines, what)
    for name in dict.fromkeys(line.rpartition(" ")[0] for line in unlike if " " in line):
        _refuse_unlike(name, collectives.gather_objects(samples.get(name), what))


def _refuse_unlike(name: str, told: Sequence[tuple[str, int] | None]) -> None:
    """``told``: of each rank, which has it from where, and the checksum."""
    found = [(rank, *sample) for rank, sample in enumerate(told) if sample is not None]
    first, source, checksum = found[0]
    if len(found) < len(told):
        raise WeightsFileError(
            source,
            f"gives {name} its weights on rank {first}, and nothing does on rank {told.index(None)}",
            "make the same calls of infinity.load_pretrained() on every rank, with the same files",
        )
    for rank, other, others in found:
        if others != checksum:
            raise WeightsFileError(
                other,
                f"has other weights of {name} on rank {rank} than {source} has on rank {first}",
                "copy the same files to every node, or name a directory that all of them see",
            )


def _checksum(values: Values, numel: int) -> int:
    size = min(numel, SAMPLE_NUMEL)
    checksum = 0
    for first in sorted({0, (numel - size) // 2, numel - size}):
        part = values(first, size).contiguous()
        checksum = crc32(bytes_of(part), crc32(str(part.dtype).encode(), checksum))
    return checksum
