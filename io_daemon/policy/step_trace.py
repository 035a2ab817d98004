"""What one rank asks of its daemon in one optimizer step, and what it does meanwhile: the file of ``--trace``.

A step is a list of events: a lease is acquired, waited for, or released. Before each event the rank does some work,
the event's *gap*. ``infinity trace`` writes such files, since what is sharded how is decided there; ``bench step``
replays them, for all ranks of a node. A file is gzipped JSON of ``StepTrace``. Fields are only ever added.
"""

from __future__ import annotations

import gzip
import io
import zlib
from enum import IntEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from io_daemon.config import first_problem
from io_daemon.errors import ConfigError
from io_daemon.policy.trace import Trace
from io_daemon.shared.protocol import KINDS_MAX, PAGE_BYTES, Access, ChunkSpec, ObjectKind, kinds_of

STEP_TRACE_VERSION: Final = 1
SUFFIX: Final = ".json.gz"
TRACE_BYTES_MAX: Final = 256 << 20
"""The JSON is at most this long: a file that unpacks to more is none of ours."""
ACQUIRE, WAIT, RELEASE = "a", "w", "r"
FEW_UPDATES: Final = 0.01
"""So small a share of what is updated in a step, at either end, does not count as its updates' beginning or end: biases
and norms are updated when ``step()`` is called, all else in the forward that follows."""

Mask = Annotated[int, Field(ge=0, lt=1 << KINDS_MAX)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CpuRates(Table):
    """What a machine's CPU does in a second at a number of threads, by the loops of ``cpu_load``."""

    num_threads: Annotated[int, Field(ge=1)]
    flops: Positive
    """Single-precision operations on operands that stay in the cache."""
    copied_bytes: Positive
    """From memory to memory, each byte counted once."""
    updated_bytes: Positive
    """Read, changed and written back in place, each byte counted once."""


class Leases(Table):
    """Columns of equal length, in the order of acquisition."""

    chunk: list[Annotated[int, Field(ge=0)]]
    read: list[Mask]
    write: list[Mask]
    dirty: list[Mask]
    dead: list[Mask]


class Events(Table):
    """``ops``: one letter an event. ``lease``: which one. ``gap``: the work before the event."""

    ops: Annotated[str, Field(pattern="^[awr]+$")]
    lease: list[Annotated[int, Field(ge=0)]]
    gap: list[NonNegative]


class StepTrace(Table):
    format: Literal["infinity step trace"] = "infinity step trace"
    version: Literal[1] = STEP_TRACE_VERSION
    model: str
    num_params: Annotated[int, Field(ge=1)]
    tokens_per_step: Annotated[int, Field(ge=1)] | None
    """Tokens of all ranks together; None where the batch is not of tokens."""
    num_nodes: Annotated[int, Field(ge=1)] = 1
    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    """Each asks for a part of its own, of the same sizes in the same order."""
    gap_unit: Literal["seconds", "flops"]
    """Seconds as measured on a machine of ``rates``; or FLOPs, of a model that was not run."""
    tail: NonNegative
    """The gap after the last event."""
    rates: CpuRates | None
    """Rates of the machine that the seconds were measured on; None with FLOPs."""
    machine: str
    """Where it was recorded, for people."""
    config: dict[str, Any]
    """The training configuration, for people."""
    host_budget_bytes: Annotated[int, Field(ge=PAGE_BYTES)]
    """The budget as configured, for all ranks of a node."""
    staging_bytes: Annotated[int, Field(ge=0)]
    """A model under construction takes this part (``infinity.Init``); the memory plan got the rest."""
    frame_bytes: Annotated[int, Field(ge=PAGE_BYTES, multiple_of=PAGE_BYTES)]
    num_frames: Annotated[int, Field(ge=1)]
    chunks: Annotated[list[tuple[list[Annotated[int, Field(ge=0)]], Mask]], Field(min_length=1)]
    """(bytes by object kind, mask of pinned kinds) of every chunk."""
    accesses: list[tuple[int, Mask, Mask, Mask]]
    """What the rank tells the daemon after its first step: (chunk, read, write, dead)."""
    leases: Leases
    events: Events

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.rates is None) != (self.gap_unit == "flops"):
            raise ValueError("seconds come with the rates of the machine, FLOPs without")
        if any(len(sizes) > KINDS_MAX for sizes, _ in self.chunks):
            raise ValueError(f"a chunk has more than {KINDS_MAX} kinds")
        columns = vars(self.leases).values()
        if len({len(column) for column in columns}) != 1:
            raise ValueError("the columns of leases differ in length")
        if not len(self.events.ops) == len(self.events.lease) == len(self.events.gap):
            raise ValueError("the columns of events differ in length")
        self._check_order()
        self.access_trace().validate(np.array([_kind_mask(sizes) for sizes, _ in self.chunks], np.uint8))
        return self

    def _check_order(self) -> None:
        """Every lease is acquired once, in order, then waited for at most once, then released."""
        before: dict[int, str] = {}
        num_acquired = 0
        allowed = {ACQUIRE: ("",), WAIT: (ACQUIRE,), RELEASE: (ACQUIRE, WAIT)}
        for index, (op, lease) in enumerate(zip(self.events.ops, self.events.lease, strict=True)):
            if before.get(lease, "") not in allowed[op] or (op == ACQUIRE and lease != num_acquired):
                raise ValueError(f"event {index}, {op!r} of lease {lease}, comes out of turn")
            before[lease] = op
            num_acquired += op == ACQUIRE
        if num_acquired != len(self.leases.chunk) or any(op != RELEASE for op in before.values()):
            raise ValueError("some leases are not released, or not used")
        for chunk, read, write in zip(self.leases.chunk, self.leases.read, self.leases.write, strict=True):
            wanted = read | write
            if chunk >= len(self.chunks) or not wanted or wanted & ~_kind_mask(self.chunks[chunk][0]):
                raise ValueError(f"a lease asks kinds {wanted:#x} of chunk {chunk}, which does not have them")

    def access_trace(self) -> Trace:
        return Trace.from_accesses([Access(*row) for row in self.accesses])

    def specs(self) -> list[ChunkSpec]:
        padded = ((*sizes, *[0] * (KINDS_MAX - len(sizes))) for sizes, _ in self.chunks)
        return [ChunkSpec(sizes, pinned) for sizes, (_, pinned) in zip(padded, self.chunks, strict=True)]

    def object_bytes(self, chunk: int, mask: int) -> int:
        sizes = self.chunks[chunk][0]
        return sum(sizes[kind] for kind in kinds_of(mask))

    def object_frames(self, chunk: int, mask: int) -> int:
        sizes = self.chunks[chunk][0]
        return sum(-(-sizes[kind] // self.frame_bytes) for kind in kinds_of(mask))

    @property
    def swap_bytes(self) -> int:
        """On disk: every kind that is not pinned."""
        return sum(self.object_bytes(chunk, ~pinned & _kind_mask(sizes)) for chunk, (sizes, pinned) in self._numbered())

    @property
    def pinned_frames(self) -> int:
        return sum(self.object_frames(chunk, pinned) for chunk, (_, pinned) in self._numbered())

    @property
    def total_frames(self) -> int:
        return sum(self.object_frames(chunk, _kind_mask(sizes)) for chunk, (sizes, _) in self._numbered())

    @property
    def update_leases(self) -> list[bool]:
        """Whether each lease is an update's: forward and backward write gradients alone."""
        return [bool(mask & ~ObjectKind.GRAD.mask) for mask in self.leases.write]

    def _numbered(self) -> list[tuple[int, tuple[list[int], int]]]:
        return list(enumerate(self.chunks))


def _kind_mask(sizes: list[int]) -> int:
    return sum(1 << kind for kind, size in enumerate(sizes) if size)


class Part(IntEnum):
    """What a rank's work belongs to."""

    APART = 0
    """Forward and backward before the updates of a step, or behind them."""
    BETWEEN = 1
    """Forward and backward between updates, whose reads and writes they hide."""
    UPDATE = 2


class Work(NamedTuple):
    """What the rank does before an event. ``share``: of one pass over all frames of the lease that it holds since the
    event before, 0 where that event was no wait. ``flops``: beside or after that."""

    share: float
    flops: float
    part: Part = Part.APART


def work_before(trace: StepTrace) -> list[Work]:
    """One entry an event, and one for the tail.

    What follows a wait works on the lease's frames: they are passed over once, as memory is too slow for more, and what
    the gap lasts longer is arithmetic."""
    gaps = [*trace.events.gap, trace.tail]
    work = []
    for index, (gap, part) in enumerate(zip(gaps, _parts(trace), strict=True)):
        if index == 0 or trace.events.ops[index - 1] != WAIT:
            work.append(Work(0.0, gap * trace.rates.flops if trace.rates else gap, part))
            continue
        lease = trace.events.lease[index - 1]
        if trace.rates is None:
            work.append(Work(1.0, gap, part))
            continue
        read, write = trace.leases.read[lease], trace.leases.write[lease]
        num_bytes = trace.object_bytes(trace.leases.chunk[lease], read | write)
        pass_s = num_bytes / (trace.rates.updated_bytes if read and write else trace.rates.copied_bytes)
        share = min(1.0, gap / pass_s)
        work.append(Work(share, max(0.0, gap - pass_s) * trace.rates.flops, part))
    return work


def _parts(trace: StepTrace) -> list[Part]:
    """One entry an event, for the work before it, and one for the tail. An update works while it has what it waited
    for."""
    is_update, events = trace.update_leases, trace.events
    held: set[int] = set()
    parts: list[Part] = []
    waits: list[int] = []
    written: list[int] = []
    for index, (op, lease) in enumerate(zip(events.ops, events.lease, strict=True)):
        parts.append(Part.UPDATE if held else Part.APART)
        if op == WAIT and is_update[lease]:
            held.add(lease)
            waits.append(index)
            written.append(trace.object_bytes(trace.leases.chunk[lease], trace.leases.write[lease]))
        elif op == RELEASE:
            held.discard(lease)
    parts.append(Part.APART)
    up_to, all_bytes = np.cumsum(written), sum(written)
    least, most = FEW_UPDATES * all_bytes, (1 - FEW_UPDATES) * all_bytes
    inner = [index for index, up, own in zip(waits, up_to, written, strict=True) if up > least and up - own < most]
    for index in range(inner[0] + 1, inner[-1] + 1) if inner else ():
        parts[index] = max(parts[index], Part.BETWEEN)
    return parts


def save(trace: StepTrace, path: Path) -> None:
    """The same trace gives the same bytes."""
    path.write_bytes(gzip.compress(trace.model_dump_json(exclude_defaults=False).encode(), mtime=0))


def load(name: str) -> StepTrace:
    """A file, or the name of a trace that ships with the package. Raises ConfigError."""
    path = Path(name)
    try:
        packed = path.read_bytes() if path.is_file() else _shipped()[name].read_bytes()
    except KeyError:
        raise ConfigError(
            "trace", name, f"is no file; traces that ship with the package: {', '.join(shipped_names())}"
        ) from None
    except OSError as error:
        raise ConfigError("trace", name, f"cannot be read ({error.strerror})") from error
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            text = file.read(TRACE_BYTES_MAX + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("trace", name, f"is no step trace ({error}): write one with `infinity trace`") from error
    if len(text) > TRACE_BYTES_MAX:
        raise ConfigError("trace", name, f"unpacks to more than {TRACE_BYTES_MAX} bytes: it is no step trace")
    try:
        return StepTrace.model_validate_json(text)
    except ValidationError as error:
        problem = first_problem(error)
        raise ConfigError("trace", name, f"is no step trace ({problem.key}: {problem.remedy})") from error


def shipped_names() -> list[str]:
    return sorted(_shipped())


def _shipped() -> dict[str, Any]:
    files = resources.files("io_daemon.bench.steps").joinpath("traces").iterdir()
    return {file.name.removesuffix(SUFFIX): file for file in files if file.name.endswith(SUFFIX)}


def world_text(num_nodes: int, ranks_per_node: int) -> str:
    """Who trains together."""
    num_ranks = num_nodes * ranks_per_node
    if num_ranks == 1:
        return "one rank"
    where = " on one node" if num_nodes == 1 else f", {ranks_per_node} on each of {num_nodes} nodes"
    return f"{num_ranks} ranks{where}"
