"""A checkpoint into an engine: each rank reads what its own shards need, from whichever ranks wrote it.

Everything is looked at before anything changes: names, shapes, dtypes, sizes, schedule. From then on an error leaves
the engine FAILED on all ranks, since what it holds is of two trainings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from infinity.checkpoint.compare import Groups, differences, group_differences, listed, matched
from infinity.checkpoint.manifest import BUFFER, PIECE_NUMEL_MAX, STATE_PREFIX, TensorEntry
from infinity.checkpoint.progress import Progress
from infinity.checkpoint.random_numbers import restore_random_states
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.engine.described import (
    described_buffers,
    described_groups,
    described_params,
    extra_state_names,
    kind_names,
    set_extra_states,
)
from infinity.engine.loop import TrainingLoop
from infinity.errors import CheckpointError
from infinity.plan.sharding import Segment
from infinity.update.dry_run import options_of
from infinity.update.rule import Options
from infinity.update.stand_in import NOT_OPTIONS
from infinity.weights.buffers import write_buffer
from io_daemon.shared.protocol import ObjectKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What of a checkpoint is loaded, beside weights and buffers."""

    strict: bool = True
    states: bool = True
    schedule: bool = True
    position: bool = True
    """Counters: what makes it the same training."""
    loader: bool = True
    """The place of the loader that ``initialize`` made."""
    random: bool = True
    """Random numbers, which are the whole process's."""

    def in_words(self) -> str:
        """Equal on ranks that load the same."""
        parts = {
            "the optimizer's states": self.states,
            "schedule": self.schedule,
            "counters": self.position,
            "random numbers": self.random,
        }
        beside = ", ".join(name for name, is_wanted in parts.items() if is_wanted)
        return f"{'all' if self.strict else 'known'} weights{beside and ', '}{beside}"


class Loading:
    def __init__(self, loop: TrainingLoop, stored: StoredCheckpoint, wanted: Wanted) -> None:
        """Raises CheckpointError with every difference, EngineStateError where what it would load was offloaded by the
        user; nothing has changed then."""
        self._loop, self._runtime, self._stored, self._wanted = loop, loop.runtime, stored, wanted
        self._names = {
            kind: name
            for kind, name in kind_names(self._runtime.sharded.precision).items()
            if wanted.states or not name.startswith(STATE_PREFIX)
        }
        self._runtime.sharded.refuse_away(sum(kind.mask for kind in self._names))
        self._params = described_params(self._runtime)
        self._buffers = described_buffers(self._runtime.module)
        self._model = {**self._params, **{name: entry for name, (entry, _) in self._buffers.items()}}
        self._found = matched(stored.entries, self._model)
        """Which of the checkpoint's tensors goes where, by the engine's names."""
        self._shared = stored.shared_state()
        rank, self._saved_ranks = self._runtime.collectives.rank, stored.manifest.world_size
        self._own = stored.rank_state(rank) if rank < self._saved_ranks else None
        self._refuse_differences()
        params = [param for param in self._runtime.sharded.params if param.name in self._found]
        self._entries = {param.index: self._found[param.name] for param in params}
        """The checkpoint's, by the index of the parameter here."""
        self._began = {param.index for param in params if self._began_to_train(param.name)}
        io = self._runtime.io
        self._kinds: dict[ObjectKind, Container[int]] = {
            kind: {
                index
                for index, entry in self._entries.items()
                if kind in io.lasting(index) and (name in entry.kinds or index in self._began)
            }
            for kind, name in self._names.items()
        }
        """The parameters of which each kind is loaded."""
        buffers = ((saved.name, BUFFER, 0, saved.numel) for saved, _ in self._found_buffers())
        for part in chain(self._parts(), buffers):
            stored.look(*part)

    @property
    def client_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._shared["client_state"]
        return state

    def run(self, together: Callable[[Callable[[], Any], str], Any], changed: Callable[[], None]) -> None:
        """Load. Collective: ``together`` runs work on all ranks and raises on all if it fails on one; ``changed`` is
        called when there is no way back."""
        started = time.perf_counter()
        together(self._runtime.changes.begin_rewrite, "begin to load a checkpoint")
        changed()
        num_bytes = together(self._fill, "read the checkpoint's pieces")
        self._runtime.changes.end_rewrite()
        together(self._restore_rest, "take over the checkpoint's state")
        if self._runtime.collectives.rank == 0:
            self._tell_left_out()
            seconds = time.perf_counter() - started
            rate = num_bytes / seconds / 1e9
            _log.info("loaded %s: %.2f GB in %.1f s, %.2f GB/s", self._stored.path, num_bytes / 1e9, seconds, rate)

    def _tell_left_out(self) -> None:
        """Which names are not the same: where they need not be, and of frozen parameters that were not saved."""
        loaded = {entry.name for entry in self._found.values()}
        absent, unused = self._model.keys() - self._found.keys(), self._stored.entries.keys() - loaded
        if self._wanted.strict:
            absent, unused = absent & self._params.keys(), set()
        for names, where in ((absent, "the checkpoint"), (unused, "the model")):
            if names:
                _log.warning("not loaded from %s: %s not in %s", self._stored.path, listed(sorted(names)), where)

    def _refuse_differences(self) -> None:
        wanted = self._wanted
        found = self._differences(strict=wanted.strict, states=wanted.states)
        remedies = ["initialize the model that was saved"] if found else []
        if found and wanted.strict and len(self._differences(strict=False, states=wanted.states)) < len(found):
            remedies.append("pass load_module_strict=False")
        if wanted.states:
            others = group_differences(self._saved_groups(), self._groups())
            if others or (found and len(self._differences(strict=wanted.strict, states=False)) < len(found)):
                remedies.append("pass load_optimizer_states=False")
            found += others
        if wanted.schedule:
            saved = self._shared["lr_scheduler"]
            there_name, here_name = saved and saved[0], self._schedule_name()
            if there_name != here_name:
                found.append(f"the schedule was {there_name}, it is {here_name}")
                remedies.append("pass load_lr_scheduler_states=False")
        if found:
            count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
            lines = "".join(f"\n  {line}" for line in found)
            raise CheckpointError(
                self._stored.path, f"does not fit this engine, {count}:{lines}", " or ".join(remedies)
            )

    def _differences(self, *, strict: bool, states: bool) -> list[str]:
        """Those of tensors."""
        saved, left_out = self._stored.entries, self._stored.manifest.left_out
        found = differences(saved, self._model, strict=strict, states=states, left_out=left_out)
        there, here = self._shared["extra_states"].keys(), extra_state_names(self._runtime.module)
        for names, words in (
            (here - there, "the model has it, the checkpoint"),
            (there - here, "the checkpoint has it, the model"),
        ):
            if strict and names:
                found.append(f"{listed(sorted(name or 'the model' for name in names))} extra state: {words} has not")
        if not strict and not self._params.keys() & self._found.keys():
            found.append("no parameter of the model is in the checkpoint: no name of one is that of another")
        return found

    def _groups(self) -> Groups:
        optimizer = self._loop.optimizer
        return Groups(
            name=None if optimizer is None else optimizer.rule.name,
            options=[] if optimizer is None else [_of_steps(each) for each in options_of(optimizer)],
            members=described_groups(self._runtime, optimizer),
        )

    def _saved_groups(self) -> Groups:
        """The names of parameters are the engine's, where it has them."""
        mine = {theirs.name: name for name, theirs in reversed(self._found.items())}
        mine |= {name: name for name in self._found}  # one of several is called as it was
        return Groups(
            name=self._stored.manifest.facts.get("optimizer"),  # of an imported one nobody knows
            options=[_of_steps(each) for each in self._shared["param_groups"]],
            members=[[mine.get(name, name) for name in names] for names in self._shared.get("members", ())],
        )

    def _schedule_name(self) -> str | None:
        schedule = self._loop.lr_scheduler
        return type(schedule).__name__ if hasattr(schedule, "load_state_dict") else None

    def _parts(self) -> Iterator[tuple[str, str, int, int]]:
        """What this rank reads of weights and states, by the checkpoint's names, in order."""
        for kind, part in self._runtime.io.asked_for(self._kinds, numel_max=PIECE_NUMEL_MAX):
            if not self._is_new(part.param, kind):
                yield self._entries[part.param].name, self._names[kind], part.param_offset, part.numel

    def _is_new(self, param: int, kind: ObjectKind) -> bool:
        return param in self._began and self._names[kind].startswith(STATE_PREFIX)

    def _fill(self) -> int:
        """This rank's part of all weights, and of the optimizer's states; the bytes that were read."""
        io, names, total = self._runtime.io, self._names, 0
        num_bytes, shown = io.lasting_bytes(self._entries), self._runtime.collectives.rank == 0
        with Progress("loading", num_bytes, shown=shown) as progress:

            def values(kind: ObjectKind, segment: Segment) -> torch.Tensor:
                nonlocal total
                if self._is_new(segment.param, kind):
                    return torch.zeros(segment.numel, device="cpu")
                name = self._entries[segment.param].name
                found = self._stored.read(name, names[kind], segment.param_offset, segment.numel)
                total += found.nbytes
                progress.advance(found.nbytes)
                return found

            with self._stored.reading(self._parts()):
                io.fill(self._kinds, values, numel_max=PIECE_NUMEL_MAX)
        return total

    def _began_to_train(self, name: str) -> bool:
        """Whether the parameter was frozen when it was saved, and is trained now: its states begin as new."""
        return self._params[name].trainable and not self._found[name].trainable

    def _restore_rest(self) -> None:
        with torch.no_grad():
            for saved, buffer in self._found_buffers():
                write_buffer(buffer, self._stored.read_whole(saved.name, BUFFER).to(buffer.device, buffer.dtype))
        with self._told("the module's set_extra_state()", "write one that takes what get_extra_state() gave"):
            set_extra_states(self._runtime.module, self._shared["extra_states"])
        schedule: Any = self._loop.lr_scheduler
        if self._wanted.schedule and self._shared["lr_scheduler"] is not None:
            with self._told("the schedule's load_state_dict()", "pass load_lr_scheduler_states=False"):
                schedule.load_state_dict(self._shared["lr_scheduler"][1])
        if self._wanted.states:  # behind the schedule, which may set its rate: the next step's is that of the groups
            self._restore_optimizer()
        if self._wanted.position:
            self._restore_position()

    def _found_buffers(self) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        for name, (mine, buffer) in self._buffers.items():
            saved = self._found.get(name)
            is_wanted = mine.persistent or self._wanted.position  # others are the training's, not the module's
            if saved is not None and saved.shape == mine.shape and is_wanted:
                yield saved, buffer

    @contextmanager
    def _told(self, whose: str, remedy: str) -> Iterator[None]:
        """What users' code raises inside becomes a CheckpointError."""
        try:
            yield
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise CheckpointError(self._stored.path, f"{whose} did not take its part ({words})", remedy) from error

    def _restore_optimizer(self) -> None:
        optimizer, update = self._loop.optimizer, self._loop.update
        if optimizer is None or update is None:
            return
        for group, options in zip(optimizer.param_groups, self._shared["param_groups"], strict=True):
            group.update(_of_steps(options))  # the same dict: schedules and the user's own optimizer hold it
        saved, histories = self._shared["histories"], update.histories
        for param in self._runtime.sharded.params:
            if param.name in self._found:
                histories[param.index] = saved.get(self._found[param.name].name)
        update.scale.load_state_dict(self._shared["loss_scale"])

    def _restore_position(self) -> None:
        self._loop.restore_counters(**self._shared["counters"])
        world_size, rank = self._runtime.collectives.world_size, self._runtime.collectives.rank
        if self._saved_ranks != world_size and rank == 0:
            _log.warning(
                "%s was saved by %d ranks, these are %d: random numbers go on where those of the same rank stood "
                "(others draw as they would have), and the loader begins its epoch anew",
                self._stored.path,
                self._saved_ranks,
                world_size,
            )
        if self._own is not None and "random" in self._own:  # DeepSpeed's, imported, has none
            loader, place = self._loop.training_loader, self._own["loader"]
            is_same = self._wanted.loader and self._saved_ranks == world_size
            if loader is not None and place is not None and is_same:
                loader.load_state_dict(place)
            if self._wanted.random:
                restore_random_states(self._own["random"], self._runtime.device)


def _of_steps(group: Options) -> dict[str, Any]:
    """What a param group says of its steps, whatever parameters it has."""
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}
