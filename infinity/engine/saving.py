"""An engine's state to a checkpoint: each rank streams its own shards into a file of its own, rank 0 publishes them.

What is in memory at once are the store's frames and one piece.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any, Final

import torch

from infinity.checkpoint import plain
from infinity.checkpoint.directory import check_tag, publish, written_aside
from infinity.checkpoint.disk import disk_errors
from infinity.checkpoint.manifest import (
    BUFFER,
    MANIFEST,
    PIECE_NUMEL_MAX,
    SHARED_STATE,
    Manifest,
)
from infinity.checkpoint.pieces import PieceWriter
from infinity.checkpoint.progress import Progress
from infinity.checkpoint.random_numbers import random_states
from infinity.checkpoint.sealed import write_sealed
from infinity.checkpoint.writing import Files, write_rank, write_state
from infinity.engine.described import described_buffers, described_groups, described_params, extra_states, kind_names
from infinity.engine.loop import TrainingLoop
from infinity.errors import CheckpointError, ConfigError
from infinity.plan.sharding import Segment
from infinity.update.dry_run import options_of
from infinity.weights.param import flattened, memory_order
from infinity.weights.state_io import Seen
from io_daemon.machine.facts import package_version
from io_daemon.shared.protocol import ObjectKind

_log = logging.getLogger(__name__)

WriteMore = Callable[[Path], Files]
"""Adds files of a dialect's own to a checkpoint's directory; called on every rank, for the files of that rank."""
Histories = Sequence[tuple[float, ...] | None]
Merged = dict[str, tuple[float, ...]]

_REMEDIES: Final = {
    "lr_scheduler": "have the schedule's state_dict() and load_state_dict() do without it, or ",
    "extra_states": "have the module's get_extra_state() and set_extra_state() do without it, or ",
    "param_groups": "leave it out of the optimizer's group, or ",
}
"""What may be done about a value that no checkpoint can hold, beside what of any."""


class Saving:
    """One save. Everything that can be refused is refused before the first byte is written."""

    def __init__(
        self,
        loop: TrainingLoop,
        directory: Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        *,
        exclude_frozen: bool,
        write_more: WriteMore | None = None,
    ) -> None:
        self._loop, self._runtime, self._collectives = loop, loop.runtime, loop.runtime.collectives
        self._directory, self._write_more = directory, write_more
        self.tag = check_tag(f"global_step{loop.global_steps}" if tag is None else tag)
        self._runtime.check_readable("save_checkpoint")
        self._params = described_params(self._runtime)
        frozen = (name for name, entry in self._params.items() if exclude_frozen and not entry.trainable)
        self._left_out = dict.fromkeys(frozen)
        """Names, in order."""
        kept = [p.index for p in self._runtime.sharded.params if p.name not in self._left_out]
        # by all ranks, of which not every one may have a part
        self._runtime.sharded.refuse_away(sum({kind.mask for p in kept for kind in self._runtime.io.lasting(p)}))
        self._buffers = described_buffers(self._runtime.module)
        self._facts = self._facts_now()
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ConfigError("client_state", type(client_state).__name__, "pass a dict of what is to be kept")
        self._shared = plain.kept({"client_state": dict(client_state or {}), **self._shared_state()}, _REMEDIES)
        self._own = plain.to_bytes(self._rank_state())
        # where every rank has everything, rank 0 writes it
        writes = self._collectives.rank < self._runtime.sharded.sharers.world_size
        self.params = {p.index for p in self._runtime.sharded.params if writes and p.name not in self._left_out}
        """Those of which this rank writes its part."""

    def run(self, *, latest: bool) -> None:
        """Write and publish. Collective: it fails on all ranks or on none."""
        rank, started, io = self._collectives.rank, time.perf_counter(), self._runtime.io
        histories = [] if self._loop.update is None else self._loop.update.histories
        with ExitStack() as stack:
            aside = self.make_aside(stack)
            with Progress("saving", io.lasting_bytes(self.params), shown=rank == 0) as progress:

                def scan(use: Seen) -> None:
                    def seen(kind: ObjectKind, segment: Segment, values: torch.Tensor) -> None:
                        use(kind, segment, values)
                        progress.advance(values.nbytes)

                    io.scan(self.params, seen, numel_max=PIECE_NUMEL_MAX)

                mine = self.together(lambda: self.write_own(aside, scan), "write the checkpoint's pieces")
            files, merged = self.gathered(mine, histories)
            self.together(
                lambda: self.publish(aside, files, merged, latest=latest) if rank == 0 else None,
                "publish the checkpoint",
            )
        self.tell(files, time.perf_counter() - started)

    def make_aside(self, stack: ExitStack) -> Path:
        """The directory that all ranks write into; rank 0's ``stack`` removes what was not published. Collective."""

        def make() -> Path | None:
            return (
                stack.enter_context(written_aside(self._directory, self.tag)) if self._collectives.rank == 0 else None
            )

        made = self.together(make, "make the checkpoint's directory")
        return Path(self._collectives.broadcast_object(str(made), "name the checkpoint's directory"))

    def keep_buffers(self) -> None:
        """They may change before they are written: keep copies."""
        self._buffers = {name: (entry, buffer.detach().clone()) for name, (entry, buffer) in self._buffers.items()}

    def gathered(self, mine: Files, histories: Histories) -> tuple[Files, Merged]:
        """The files of all ranks, and by name what the optimizer's rule keeps for each parameter that was stepped: a
        rank without a part of a parameter has only that it was. Collective; what neighbours have alike, as most do, is
        sent once, and merged once for all ranks that sent the same."""
        runs = tuple((history, len(list(alike))) for history, alike in groupby(histories))
        sent = self._collectives.gather_objects((mine, runs), "gather the checkpoint's files")
        files = {name: file for theirs, _ in sent for name, file in theirs.items()}
        merged: Merged = {}
        for each in dict.fromkeys(runs for _, runs in sent):
            in_full = chain.from_iterable(repeat(history, count) for history, count in each)
            for param, history in zip(self._runtime.sharded.params, in_full, strict=False):
                if history is not None:
                    merged[param.name] = max(history, merged.get(param.name, ()), key=len)
        return files, merged

    def tell(self, files: Files, seconds: float, note: str = "") -> None:
        """Log what was saved, on rank 0."""
        if self._collectives.rank == 0:
            total = sum(file.num_bytes for file in files.values()) / 1e9
            path = self._directory / self.tag
            _log.info("saved %s: %.2f GB in %.1f s, %.2f GB/s%s", path, total, seconds, total / seconds, note)

    def together(self, work: Callable[[], Any], what: str) -> Any:
        return self._collectives.together(
            work, what, as_error=lambda failure: CheckpointError(self._directory, failure, "the former one is whole")
        )

    def write_own(self, aside: Path, scan: Callable[[Seen], None]) -> Files:
        """Write this rank's files; ``scan`` shows all that it keeps of ``params``."""
        rank, params = self._collectives.rank, self._runtime.sharded.params
        names = kind_names(self._runtime.sharded.precision)
        with disk_errors(aside, "written"):

            def write(writer: PieceWriter) -> None:
                scan(lambda kind, s, values: writer.add(params[s.param].name, names[kind], s.param_offset, values))
                for name, (_, buffer) in self._buffers.items() if rank == 0 else ():
                    writer.add_all(name, BUFFER, flattened(buffer.detach(), memory_order(buffer)))

            files = write_rank(aside, rank, write, self._own)
        return files if self._write_more is None else files | self._write_more(aside)

    def publish(self, aside: Path, files: Files, histories: Merged, *, latest: bool) -> None:
        """Every rank has written its files: make them the checkpoint. Rank 0 calls it."""
        files |= write_state(aside / SHARED_STATE, plain.to_bytes({**self._shared, "histories": histories}))
        for name, file in files.items():
            with disk_errors(aside / name, "read"):
                found = (aside / name).stat().st_size if (aside / name).exists() else None
            if found != file.num_bytes:
                raise CheckpointError(
                    aside / name,
                    f"was written with {file.num_bytes} bytes, rank 0 sees {found}",
                    "save to a directory that all ranks share",
                )
        manifest = Manifest(
            tag=self.tag,
            written_by=package_version(),
            world_size=self._collectives.world_size,
            facts=self._facts,
            tensors=[
                *(entry for name, entry in self._params.items() if name not in self._left_out),
                *(entry for entry, _ in self._buffers.values()),
            ],
            left_out=list(self._left_out),
            files=files,
        )
        write_sealed(aside / MANIFEST, manifest.as_json(), indent=1)
        publish(aside, self._directory, self.tag, latest=latest)

    def _facts_now(self) -> dict[str, Any]:
        loop, precision = self._loop, self._runtime.sharded.precision
        return {
            **loop.counters,
            "stage": loop.config.zero_optimization.stage,
            "weights": str(precision.weight).removeprefix("torch."),
            "optimizer": None if loop.optimizer is None else loop.optimizer.rule.name,
        }

    def _shared_state(self) -> dict[str, Any]:
        loop, update = self._loop, self._loop.update
        schedule: Any = loop.lr_scheduler
        if schedule is not None and not hasattr(schedule, "state_dict"):
            _log.warning("%s has no state_dict(): where it stands is not saved", type(schedule).__name__)
            schedule = None
        return {
            "counters": loop.counters,
            "lr_scheduler": None if schedule is None else [type(schedule).__name__, schedule.state_dict()],
            "param_groups": [] if loop.optimizer is None else [dict(group) for group in options_of(loop.optimizer)],
            "members": described_groups(self._runtime, loop.optimizer),
            "loss_scale": {} if update is None else update.scale.state_dict(),
            "extra_states": extra_states(self._runtime.module),
        }

    def _rank_state(self) -> dict[str, Any]:
        loader = self._loop.training_loader
        return {
            "random": random_states(self._runtime.device),
            "loader": None if loader is None else loader.state_dict(),
        }
