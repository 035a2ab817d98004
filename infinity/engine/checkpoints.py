"""Saving and loading, as users call them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from infinity.checkpoint.directory import chosen, tags_of
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.engine.late_save import LateSave
from infinity.engine.loading import Loading, Wanted
from infinity.engine.loop import TrainingLoop
from infinity.engine.saving import Saving, WriteMore
from infinity.errors import CheckpointError, DaemonLostError, EngineStateError
from infinity.files.place import local_path
from infinity.states import StepPhase
from infinity.tiers.inference import outside_inference
from infinity.weights.heap import return_freed

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Checkpoints(nn.Module):
    """The calls of an engine that save and load all that it trains."""

    _loop: TrainingLoop
    resumes_loader: ClassVar[bool] = True
    """Whether ``load_checkpoint`` has the loader that ``initialize`` made go on where it was."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool = False,
    ) -> bool:
        """Save everything that training goes on from, into ``save_dir/tag``. Collective, between calls.

        Weights, master weights, optimizer states, buffers, schedule, loss scale, counters, random numbers of every
        rank and the place of the loader that ``initialize`` made. The checkpoint appears whole or not at all, and what
        was there before stays until then; files of your own in ``save_dir/tag`` stay for good. All ranks must see the
        same directory. Within a step that is not over, gradients that were accumulated are in no checkpoint, as in none
        of torch's: that is logged. The loader's place is behind the last batch that a step has taken.

        Args:
            save_dir: a directory, which is made if it is not there.
            tag: its name in there; by default ``global_step{N}``.
            client_state: values of your own that ``load_checkpoint`` gives back, those of rank 0: numbers, strings,
                tensors, arrays, lists and dicts of them.
            save_latest: whether the file ``latest`` names it from now on.
            exclude_frozen_parameters: leave out weights that are not trained.
            asynchronous: return at once, and write what is there now while training goes on. The checkpoint appears at
                a later step, or in ``wait_for_checkpoint``, the next save or ``destroy``, and these raise the
                CheckpointError if it cannot be written.

        Returns:
            True.

        Raises:
            CheckpointError: the disk refuses, on every rank; this one, or the asynchronous save before.
            ConfigError: a tag or a value that cannot be kept.
            EngineStateError: backward has updated some weights of a step that is not over.
        """
        self._save_checkpoint(
            save_dir, tag, client_state, save_latest, exclude_frozen_parameters, asynchronous=asynchronous
        )
        return True

    def _save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
        *,
        asynchronous: bool,
        write_more: WriteMore | None = None,
    ) -> None:
        loop, directory = self._loop, local_path("save_dir", save_dir)
        loop.refuse_before_step("save_checkpoint()")
        with _whole_state(loop):
            loop.background.advance(wait=True)
            begun = time.perf_counter()
            if asynchronous and loop.phases.states_are_away:
                raise EngineStateError(
                    "save_checkpoint(asynchronous=True) while states are offloaded: call reload_states() before it, or "
                    "save without asynchronous"
                )

            def prepared() -> Saving:
                return Saving(
                    loop,
                    directory,
                    tag,
                    client_state,
                    exclude_frozen=exclude_frozen_parameters,
                    write_more=write_more,
                )

            saving = _together(loop, prepared, "prepare a checkpoint", directory)
            if loop.is_within_step and loop.runtime.collectives.rank == 0:
                _log.warning("%s: gradients of the step that is not over are in no checkpoint", directory / saving.tag)
            how = "begin to save" if asynchronous else "save"
            kept = " without frozen weights" * exclude_frozen_parameters + " beside `latest`" * (not save_latest)
            loop.runtime.collectives.agree(f"{how} the checkpoint {saving.tag} in {directory}{kept}")
            if asynchronous:
                loop.background.work = LateSave(loop, saving, latest=save_latest, begun=begun)
            else:
                saving.run(latest=save_latest)
                return_freed()  # what pieces passed through; not of an asynchronous save, for which training waits

    def wait_for_checkpoint(self) -> None:
        """Block until the last asynchronous save is published. Collective, between steps; nothing to wait for is fine.

        Raises:
            CheckpointError: it could not be written, on every rank; the former checkpoint is whole.
        """
        self._loop.background.advance(wait=True)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint. Collective, between steps; of any world size, stage, tier, budget and precision.

        At the same world size training goes on with the bits that it would have had. At another one each rank draws
        the random numbers of the one with its number, and the loader begins its epoch anew. A weight that was shared is
        loaded under each of its names, also where they are several weights now; the optimizer's states, which are of
        all its uses, are refused there.

        Args:
            load_dir: what was given to ``save_checkpoint``, or one of the checkpoints in it.
            tag: which of its checkpoints; by default the one that ``latest`` names.
            load_module_strict: the checkpoint and the model must have the same names; else those of both are loaded.
            load_optimizer_states: also the optimizer's states, options and loss scale.
            load_lr_scheduler_states: also where the schedule stands.
            load_module_only: weights and buffers, and nothing else.
            custom_load_fn: refused: it would need the whole model in memory.

        Returns:
            The checkpoint's path and the client state; (None, None), as DeepSpeed, if there is no ``latest``.

        Raises:
            CheckpointError: it is not there, damaged, or of another model, with every difference. The engine stays as
                it was, or is FAILED if some of it was loaded already.
            EngineStateError: gradients of a running step are there, or weights are gathered.
        """
        if custom_load_fn is not None:
            raise EngineStateError(
                "custom_load_fn would get the whole model's weights: load without it, and change single weights after "
                "that inside infinity.zero.GatheredParameters(param, modifier_rank=0)"
            )
        local_path("load_dir", load_dir)
        loop, directory = self._loop, Path(load_dir)
        wanted = Wanted(
            strict=load_module_strict,
            states=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            position=not load_module_only,
            loader=not load_module_only and self.resumes_loader,
            random=not load_module_only
            and self._rewinds_random_numbers(whole=load_optimizer_states and load_lr_scheduler_states),
        )
        loop.runtime.refuse_over("load_checkpoint")
        loop.phases.refuse_failed()
        if loop.runtime.reducer.has_any:
            raise EngineStateError(
                "load_checkpoint() within a step, whose gradients belong to the weights as they are: call it after the "
                "step() that updates, or drop them with engine.optimizer.zero_grad()"
            )
        with _whole_state(loop) as changed:
            loop.background.advance(wait=True)  # it may be what is to be loaded
            path = self._found(directory, tag)
            if path is not None:
                return str(path), self._load(path, wanted, changed)
        _log.warning(
            "%s has no file `latest`: nothing is loaded. Checkpoints there: %s",
            directory,
            ", ".join(tags_of(directory)) or "none",
        )
        return None, None

    def _rewinds_random_numbers(self, *, whole: bool) -> bool:
        """Whether ``load_checkpoint`` takes the process's random numbers back to where they stood, too. ``whole``: it
        loads all that there is."""
        return True

    def _found(self, directory: Path, tag: str | None) -> Path | None:
        """The checkpoint that is to be loaded. Raises CheckpointError on all ranks where it is not the same: each may
        have looked at a disk of its own."""
        path = _together(self._loop, lambda: chosen(directory, tag), "find a checkpoint", directory)
        name = "no checkpoint" if path is None else path.name
        names = self._loop.runtime.collectives.first_unlike([name], "compare the checkpoints that were found")
        for rank, other in enumerate(names):
            if other != names[0]:
                raise CheckpointError(
                    directory,
                    f"has {names[0]} as its latest on rank 0, and {other} on rank {rank}",
                    "load from a directory that all ranks share",
                )
        return path

    def _load(self, path: Path, wanted: Wanted, changed: Callable[[], None]) -> dict[str, Any]:
        loop = self._loop

        def opened() -> StoredCheckpoint:
            ranks = loop.runtime.collectives
            return StoredCheckpoint(path, reader=ranks.rank, num_readers=ranks.world_size)

        with _together(loop, opened, "open a checkpoint", path) as stored:
            loop.runtime.collectives.agree(
                f"load the checkpoint {path} with checksum {stored.checksum:08x}: {wanted.in_words()}"
            )
            loading = _together(loop, lambda: Loading(loop, stored, wanted), "compare a checkpoint", path)
            loading.run(lambda work, what: _together(loop, work, what, path), changed)
            return_freed()
            return loading.client_state


def _together(loop: TrainingLoop, work: Callable[[], Result], what: str, path: Path) -> Result:
    return loop.runtime.collectives.together(
        work, what, as_error=lambda failure: CheckpointError(path, failure, "see to that rank, then try again")
    )


@contextmanager
def _whole_state(loop: TrainingLoop) -> Iterator[Callable[[], None]]:
    """All state is looked at or replaced inside, where new tensors are on the CPU unless they are asked for elsewhere.
    What is yielded says that it is being replaced: from then on an error leaves the engine FAILED."""
    half_done = False

    def changed() -> None:
        nonlocal half_done
        half_done = True

    loop.phases.go(StepPhase.CHECKPOINT)
    try:
        with torch.device("cpu"), outside_inference():
            yield changed
    except BaseException as error:
        failed = half_done or isinstance(error, DaemonLostError)
        loop.phases.go(StepPhase.FAILED if failed else StepPhase.IDLE)
        raise
    loop.phases.go(StepPhase.IDLE)
