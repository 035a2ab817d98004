"""What users touch: an ``nn.Module`` around theirs, with the calls of a training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from infinity.config import Config
from infinity.engine.checkpoints import Checkpoints
from infinity.engine.compiling import Compiled
from infinity.engine.exports import Exports
from infinity.engine.loop import TrainingLoop
from infinity.engine.offloading import OffloadedStates, OffloadStateTypeEnum
from infinity.engine.phases import Phases
from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError, EngineStateError
from infinity.loader import PlacedLoader, is_training, make_loader
from infinity.observe.observer import Observers
from infinity.tiers.base import HostTier
from infinity.tiers.collectives import Collectives
from infinity.update.optimizer import ShardedOptimizer
from infinity.weights.sharded_model import ShardedModel


class Engine(Checkpoints, Exports):
    """Trains one model: ``loss = engine(batch); engine.backward(loss); engine.step()``. Made by ``initialize``.

    ``module`` is the user's model, which may also be called directly; attributes that the engine lacks are its. Outside
    calls its large parameters are sharded: they keep shape and dtype, every use of one brings its weights for that use,
    and what cannot be served is refused by name with ``WeightsError``.
    """

    buffers_follow_weights: ClassVar[bool] = True
    """Whether fp32 buffers of the state dict of an fp32 model are cast where the configuration casts its weights."""
    deals_to_one: ClassVar[bool] = False
    """Whether a rank that is alone has the order of ``DistributedSampler``, instead of a seed of torch's generator."""

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModel,
        optimizer: ShardedOptimizer | None,
        optimizer_groups: Sequence[int],
        *,
        config: Config,
        collectives: Collectives,
        tier: HostTier | None,
        observers: Observers | None = None,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        phases = Phases(type(module).__name__)
        self._runtime = Runtime(module, sharded, phases, config=config, collectives=collectives)
        self._loop = TrainingLoop(
            self._runtime,
            phases,
            optimizer,
            optimizer_groups,
            config=config,
            tier=tier,
            observers=observers or Observers(),
        )
        self._compiled = Compiled(self._runtime)
        self._offloaded = OffloadedStates(self._runtime, phases)
        self.module = module
        self.training = module.training
        # also at exit, and when nobody holds the engine any more: nothing below refers back to it
        ending = partial(self._end_collected, self._compiled, self._loop)
        self._let_go = weakref.finalize(self, self._runtime.collectives.let_go, ending)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, and its output."""
        return self._loop.forward(self.module, args, kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        create_graph: bool = False,
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss / gradient_accumulation_steps``, in fp16 times the loss scale.

        An error leaves the step unapplied. One that comes after the first gradient takes what was accumulated with it:
        until that is repeated, or the step begun anew after ``zero_grad()``, an EngineStateError says so.

        Args:
            loss: a scalar of a graph that the model's call built.
            retain_graph: keep the graph for another backward, as in ``torch.Tensor.backward``.
            scale_wrt_gas: whether to divide by the number of micro-batches.
            create_graph: build the graph of the gradients, too.

        Returns:
            The loss that was differentiated, without history.
        """
        return self._loop.backward(loss, retain_graph=retain_graph, scale=scale_wrt_gas, create_graph=create_graph)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """The end of a micro-batch; the ``gradient_accumulation_steps``-th updates the parameters.

        Args:
            lr_kwargs: what the schedule's ``step`` is called with after the update.
        """
        self._loop.step(lr_kwargs or {})

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step`` updates."""
        return self._loop.is_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what the running step has accumulated.

        Args:
            set_to_none: False where parameters that have no gradient in the next step would be stepped by one of zeros,
                as by torch's optimizers; ``step`` refuses these by name, with a WeightsError.
        """
        self._loop.zero_grad(set_to_none=set_to_none)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide, instead of the number of micro-batches, whether the coming ``step`` updates.

        It holds until it is called again. ``backward`` goes on dividing by ``gradient_accumulation_steps`` unless it is
        told not to.
        """
        self._loop.boundary = bool(is_boundary)

    def was_step_applied(self) -> bool:
        """Whether the last call of ``step`` has updated the parameters."""
        return self._loop.was_step_applied

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients of ``backward`` stay whole on their rank; the next one outside reduces them with its own.

        Raises:
            EngineStateError: at stages 2 and 3, whose sharded gradients have no place where one rank could keep all of
                its own; or ``step`` is called inside.
        """
        if not self._runtime.policy.may_skip_reduction:
            raise EngineStateError(
                f"no_sync context manager is incompatible with stage {self.zero_optimization_stage()}, which shards "
                "the gradients that it keeps whole on every rank: leave it out, and write "
                "gradient_accumulation_steps into the configuration; micro-batches are reduced while backward goes on"
            )
        return self._loop.without_reduction()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Between the last backward and ``step``: clip this step's gradients to a global norm, as
        ``torch.nn.utils.clip_grad_norm_`` would. Collective.

        Returns:
            The norm before clipping, 0-D fp32 on the CPU.

        Raises:
            EngineStateError: called twice in a step, before its last micro-batch, or beside ``gradient_clipping``.
        """
        return self._loop.clip_grad_norm(max_norm)

    def compile(
        self, backend: str | Callable[..., Any] = "inductor", compile_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Have torch's compiler take the model's forward.

        Its weights must stay in memory, as they do below stage 3, or where all of them are persistent.

        Args:
            backend: as ``torch.compile`` takes it.
            compile_kwargs: other arguments of ``torch.compile``.

        Raises:
            EngineStateError: weights come and go, and a graph would keep what stands for them.
        """
        self._compiled.compile(backend, compile_kwargs or {})

    def join(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Ranks whose batches come to an end before the others'.

        Raises:
            EngineStateError: always. A rank takes part in every gather of weights.
        """
        raise EngineStateError(
            f"ranks that train {type(self.module).__name__} take part in all of its gathers, and none can end before "
            "the others: give each as many batches (drop_last=True, DistributedSampler), or train on while all have one"
        )

    join_hook = join
    """What ``torch.distributed.algorithms.Join`` asks for."""

    @property
    def is_compiled(self) -> bool:
        """Whether ``compile`` was called."""
        return self._compiled.is_compiled

    # Batches

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change ``gradient_accumulation_steps`` so that a step takes ``train_batch_size`` samples of all ranks.

        Raises:
            ConfigError: it is no multiple of the micro-batches of all ranks.
            EngineStateError: called within a step.
        """
        micro_batch = self._loop.config.train_micro_batch_size_per_gpu
        per_micro_batch = micro_batch * self._runtime.collectives.world_size
        if train_batch_size < 1 or train_batch_size % per_micro_batch:
            raise ConfigError(
                "train_batch_size",
                train_batch_size,
                f"must be a multiple of {per_micro_batch}: {micro_batch} on each of "
                f"{self._runtime.collectives.world_size} ranks",
            )
        self._loop.set_accumulation(
            micro_batch=micro_batch,
            accumulation=train_batch_size // per_micro_batch,
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward on one rank; ``gradient_accumulation_steps`` stays.

        Raises:
            ConfigError: it is below 1.
            EngineStateError: called within a step.
        """
        if micro_batch_size < 1:
            raise ConfigError("train_micro_batch_size_per_gpu", micro_batch_size, "must be at least 1")
        self._loop.set_accumulation(
            micro_batch=micro_batch_size, accumulation=self._loop.config.gradient_accumulation_steps
        )

    def get_batch_info(self) -> tuple[int, int, int]:
        """``train_batch_size``, ``train_micro_batch_size_per_gpu``, ``gradient_accumulation_steps``."""
        config = self._loop.config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> PlacedLoader:
        """A loader of this rank's micro-batches of ``dataset``.

        Args:
            dataset: its samples are dealt out to the ranks.
            batch_size: samples of a batch; by default ``train_micro_batch_size_per_gpu``.
            route: "train" shuffles, "eval" and "predict" keep the order.
            pin_memory: batches lie in page-locked memory.
            data_sampler: which samples this rank gets, instead of its share of all.
            collate_fn: makes a batch of samples; by default torch's own.
            num_local_io_workers: processes that load.

        Raises:
            ConfigError: an unknown ``route``.
        """
        return make_loader(
            dataset,
            batch_size=batch_size or self._loop.config.train_micro_batch_size_per_gpu,
            shuffle=is_training(route),
            drop_last=self._loop.config.dataloader_drop_last,
            collectives=self._runtime.collectives,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory,
            deals_to_one=self.deals_to_one,
        )

    def make_training_loader(
        self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> PlacedLoader:
        """The loader whose place checkpoints hold, as ``initialize`` makes it of its ``training_data``."""
        loader = self._loop.training_loader = self.deepspeed_io(dataset, collate_fn=collate_fn)
        return loader

    # Weights in memory, weights and state out

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Give device memory back between steps. What needs it is refused until ``reload_states``.

        Args:
            include: members of ``infinity.zero.OffloadStateTypeEnum``, or their names; by default all.
            device: "cpu".
            pin_memory: they wait in page-locked memory.
            non_blocking: do not wait for the copies.
        """
        self.wait_for_checkpoint()
        self._offloaded.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Take back what ``offload_states`` gave."""
        self._offloaded.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Give up weights that are kept on the device for their next use."""
        self._runtime.empty_cache()

    # The end

    def destroy(self) -> None:
        """Give everything back: hooks, arena, swap files, the private daemon. Parameters stay sharded. Idempotent.

        An asynchronous save is waited for, and its CheckpointError raised when all is given back. In a forked child it
        does nothing: all of that is the parent's.
        """
        if self._runtime.collectives.is_forked:
            return
        try:
            if not self._loop.phases.is_over:
                self.wait_for_checkpoint()
        finally:
            self._end()

    @staticmethod
    def _end_collected(compiled: Compiled, loop: TrainingLoop) -> None:
        """Nobody holds the engine any more."""
        compiled.undo()
        loop.close()

    def _end(self) -> None:
        if self._runtime.collectives.is_forked:
            return
        self._let_go.detach()
        Engine._end_collected(self._compiled, self._loop)

    def __reduce__(self) -> NoReturn:
        raise EngineStateError(
            f"the engine of {type(self.module).__name__} cannot be copied or pickled, with what it has open: keep its "
            "weights, by engine.full_state_dict(), by engine.save_checkpoint(), or, where they are whole (stages 0 to "
            "2), by copy.deepcopy(engine.module)"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            self.destroy()
        else:  # the other ranks may be elsewhere
            self._end()
