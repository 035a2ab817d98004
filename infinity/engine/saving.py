"""An engine's state to a checkpoint: each rank streams its own shards into a file of its own, rank 0 publishes them.

What is in memory at once are the store's frames and one piece.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
from infinity.engine.described import described_buffers, described_params, extra_states, kind_names
from infinity.engine.loop import TrainingLoop
from infinity.errors import CheckpointError
from infinity.plan.sharding import Segment
from infinity.update.dry_run import options_of
from infinity.weights.param import flattened, memory_order
from io_daemon.machine.facts import package_version
from io_daemon.shared.protocol import ObjectKind

_log = logging.getLogger(__name__)


class Saving:
    """One save. Everything that can be refused is refused before the first byte is written.

    ``histories``: what ``gathered_histories`` gives.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        directory: Path,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        exclude_frozen: bool,
        histories: Mapping[str, tuple[float, ...]],
    ) -> None:
        self._loop, self._runtime, self._collectives = loop, loop.runtime, loop.runtime.collectives
        self._directory = directory
        self.tag = check_tag(f"global_step{loop.global_steps}" if tag is None else tag)
        self._params = described_params(self._runtime)
        self._left_out = [name for name, entry in self._params.items() if exclude_frozen and not entry.trainable]
        self._buffers = described_buffers(self._runtime.module)
        shared = {"client_state": dict(client_state), "histories": dict(histories), **self._shared_state()}
        self._shared = plain.to_bytes(shared)
        self._own = plain.to_bytes(self._rank_state())

    def run(self, *, latest: bool) -> None:
        """Write and publish. Collective: it fails on all ranks or on none."""
        rank, started = self._collectives.rank, time.perf_counter()
        with ExitStack() as stack:
            aside = self._together(
                lambda: stack.enter_context(written_aside(self._directory, self.tag)) if rank == 0 else None,
                "make the checkpoint's directory",
            )
            aside = Path(self._collectives.broadcast_object(str(aside), "name the checkpoint's directory"))
            mine = self._together(lambda: self._write_own(aside), "write the checkpoint's pieces")
            files: Files = {}
            for each in self._collectives.gather_objects(mine, "gather the checkpoint's files"):
                files |= each
            self._together(
                lambda: self._publish(aside, files, latest=latest) if rank == 0 else None, "publish the checkpoint"
            )
        seconds, total = time.perf_counter() - started, sum(file.num_bytes for file in files.values())
        if rank == 0:
            rate = total / seconds / 1e9
            _log.info("saved %s: %.2f GB in %.1f s, %.2f GB/s", self._directory / self.tag, total / 1e9, seconds, rate)

    def _together(self, work: Callable[[], Any], what: str) -> Any:
        return self._collectives.together(
            work, what, as_error=lambda failure: CheckpointError(self._directory, failure, "the former one is whole")
        )

    def _write_own(self, aside: Path) -> Files:
        rank, params = self._collectives.rank, self._runtime.sharded.params
        names = kind_names(self._runtime.sharded.precision)
        wanted = {param.index for param in params if param.name not in self._left_out}
        if rank >= self._runtime.sharded.sharers.world_size:
            wanted = set()  # every rank has everything: rank 0 writes it
        own_bytes = self._runtime.io.lasting_bytes(wanted)
        with disk_errors(aside, "written"), Progress("saving", own_bytes, shown=rank == 0) as progress:

            def write(writer: PieceWriter) -> None:
                def add(kind: ObjectKind, segment: Segment, values: torch.Tensor) -> None:
                    writer.add(params[segment.param].name, names[kind], segment.param_offset, values)
                    progress.advance(values.nbytes)

                self._runtime.io.scan(wanted, add, numel_max=PIECE_NUMEL_MAX)
                for name, (_, buffer) in self._buffers.items() if rank == 0 else ():
                    writer.add_all(name, BUFFER, flattened(buffer.detach(), memory_order(buffer)))

            return write_rank(aside, rank, write, self._own)

    def _publish(self, aside: Path, files: Files, *, latest: bool) -> None:
        files |= write_state(aside / SHARED_STATE, self._shared)
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
            facts=self._facts(),
            tensors=[
                *(entry for name, entry in self._params.items() if name not in self._left_out),
                *(entry for entry, _ in self._buffers.values()),
            ],
            left_out=self._left_out,
            files=files,
        )
        write_sealed(aside / MANIFEST, manifest.as_json(), indent=1)
        publish(aside, self._directory, self.tag, latest=latest)

    def _facts(self) -> dict[str, Any]:
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
            "loss_scale": {} if update is None else update.scale.state_dict(),
            "extra_states": extra_states(self._runtime.module),
        }

    def _rank_state(self) -> dict[str, Any]:
        loader = self._loop.training_loader
        return {
            "random": random_states(self._runtime.device),
            "loader": None if loader is None else loader.state_dict(),
        }


def gathered_histories(loop: TrainingLoop) -> dict[str, tuple[float, ...]]:
    """What the optimizer's rule keeps for each parameter that was stepped, by name. Collective: a rank without a part
    of a parameter has only that it was."""
    mine = [] if loop.update is None else loop.update.histories
    merged: dict[str, tuple[float, ...]] = {}
    for histories in loop.runtime.collectives.gather_objects(mine, "gather the optimizer's histories"):
        for param, history in zip(loop.runtime.sharded.params, histories, strict=False):
            if history is not None:
                merged[param.name] = max(history, merged.get(param.name, ()), key=len)
    return merged
