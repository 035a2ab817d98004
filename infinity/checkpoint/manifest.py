"""What a checkpoint holds: its tensors, its files, and of which training it is. Pure data, written as JSON.

A tensor is one dimension long: its elements in the order of memory, from which ``shape`` and ``order`` make it whole.
What is kept of a parameter are its *kinds*: ``weight``, the most exact copy there is (the fp32 master weight, or the
weight itself), and ``state.NAME`` for each state of its optimizer. Each kind is cut into *pieces*, which lie in the
files of the ranks that wrote them; where they were cut says nothing about who may read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Final

import torch

FORMAT: Final = "infinity checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SHARED_STATE: Final = "state.pt"
WEIGHT, BUFFER, STATE_PREFIX = "weight", "buffer", "state."
PIECE_NUMEL_MAX: Final = 1 << 20
"""The most elements of one piece, 4 MiB of fp32: what a checksum covers, and what is in memory at once."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without the module's."""
    return str(dtype).removeprefix("torch.")


def pieces_name(rank: int) -> str:
    """The file with what a rank wrote."""
    return f"rank-{rank:05}.pieces"


def index_name(rank: int) -> str:
    """The file that says where each of that rank's pieces lies."""
    return f"rank-{rank:05}.json"


def rank_state_name(rank: int) -> str:
    """The file of what only that rank had: random numbers, the loader's position."""
    return f"rank-{rank:05}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One parameter or buffer."""

    name: str
    aliases: tuple[str, ...] = ()
    """Its other names, where it is shared."""
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions from the one with the longest stride to the one with the shortest."""
    trainable: bool = False
    persistent: bool = True
    """Whether ``state_dict()`` has it; a buffer may be left out there."""
    kinds: Mapping[str, str]
    """Kind -> name of its dtype."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_buffer(self) -> bool:
        return BUFFER in self.kinds

    @property
    def num_bytes(self) -> int:
        return sum(self.numel * DTYPES[dtype].itemsize for dtype in self.kinds.values())

    def lies(self, flat: torch.Tensor) -> torch.Tensor:
        """``flat`` [numel], as the tensor lies; a view."""
        packed = flat.view([self.shape[dim] for dim in self.order])
        return packed.permute([self.order.index(dim) for dim in range(len(self.shape))])


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive elements of one kind of one tensor, in a file of pieces."""

    tensor: str
    kind: str
    first: int
    numel: int
    offset: int
    """The first byte's place in the file."""
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the checkpoint."""

    num_bytes: int
    checksum: int | None = None
    """None for files whose parts have their own: pieces, and the records of ``torch.save``."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole of a checkpoint but for its bytes."""

    tag: str
    written_by: str | None
    world_size: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    """About the training, for people: steps, precision, stage, optimizer."""
    tensors: Sequence[TensorEntry] = ()
    left_out: Sequence[str] = ()
    """Names of frozen parameters whose weights were not saved."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Manifest:
        """Raises ValueError with a reason where it is none of ours or of another version."""
        if content.get("format") != FORMAT:
            raise ValueError(f"it is no {FORMAT}")
        if content.get("version") != VERSION:
            raise ValueError(f"its version is {content.get('version')!r}, this library reads {VERSION}")
        values = {key: value for key, value in content.items() if key not in ("format", "version")}
        values["tensors"] = [_tensor(entry) for entry in content["tensors"]]
        values["files"] = {name: FileEntry(**facts) for name, facts in content["files"].items()}
        return cls(**values)


def _tensor(entry: Mapping[str, Any]) -> TensorEntry:
    tuples = {key: tuple(entry[key]) for key in ("aliases", "shape", "order")}
    return TensorEntry(**{**entry, **tuples})


def index_as_json(pieces: Iterable[Piece]) -> dict[str, list[list[int]]]:
    """``tensor kind`` -> [first, numel, offset, checksum] of each piece: a name stands once."""
    found: dict[str, list[list[int]]] = {}
    for piece in pieces:
        row = [piece.first, piece.numel, piece.offset, piece.checksum]
        found.setdefault(f"{piece.tensor} {piece.kind}", []).append(row)
    return found


def pieces_of_json(content: Mapping[str, list[list[int]]], named: Mapping[str, tuple[str, str]]) -> Iterator[Piece]:
    """The counterpart of ``index_as_json``. ``named``: by their words there (tensor, kind) of all that there may be,
    with spaces or without.

    Raises KeyError for what is none of them."""
    return (Piece(*named[key], *row) for key, rows in content.items() for row in rows)
