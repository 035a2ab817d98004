"""The engine: composition of the parts, and the loop that users drive. Only here do they meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Config
from infinity.errors import DaemonLostError
from infinity.report import IoReport, StepTimes, TierTraffic
from infinity.sharded_model import ShardedModel
from infinity.states import PHASE_TRANSITIONS, StepPhase, check_transition
from infinity.tiers.collectives import Collectives
from infinity.tiers.connection import DaemonConnection
from infinity.update.gradients import GradientChunks
from infinity.update.optimizer import ShardedAdam, Update
from infinity.update.reducer import Reducer
from infinity.update.sub_group import SubGroup
from infinity.weights.buffers import FollowedBuffers
from infinity.weights.heap import return_freed
from infinity.weights.hooks import ModuleHooks
from infinity.weights.live_set import LiveSet
from infinity.weights.param_group import ParamGroup
from io_daemon.shared.metrics import TenantStats
from io_daemon.shared.protocol import ObjectKind

_log = logging.getLogger(__name__)

TRAIN_TRACE, EVAL_TRACE = 0, 1


class Engine:
    """Trains one model: ``loss = engine(batch); engine.backward(loss); engine.step()``. Made by ``initialize``.

    ``module``: the user's model. Outside forward and backward its large parameters are sharded: they keep shape and
    dtype and read as NaN.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModel,
        optimizer: ShardedAdam,
        optimizer_groups: Sequence[int],
        *,
        config: Config,
        collectives: Collectives,
        connection: DaemonConnection | None,
    ) -> None:
        self.module = module
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler: LRScheduler | None = None
        self.global_steps = 0
        """Optimizer steps done."""
        self.micro_steps = 0
        """Micro-batches whose gradients the running step has."""
        self._sharded, self._collectives, self._connection = sharded, collectives, connection
        self._store = sharded.store
        self._phase = StepPhase.IDLE
        self._training_pass = False
        self._times = self._last_times = StepTimes()
        self._stall_seconds_before = 0.0
        self._traffic: TierTraffic | None = None
        self._last_traffic: TierTraffic | None = None
        zero = config.zero_optimization
        num_params = len(sharded.params)
        self._gradients = GradientChunks(self._store, sharded.chunks, num_params)
        self._reducer = Reducer(sharded.groups, self._gradients, collectives, num_params)
        self._live_set = LiveSet(
            sharded.groups,
            live_numel_max=zero.stage3_max_live_parameters,
            reuse_distance_max=zero.stage3_max_reuse_distance,
            prefetch_numel_max=zero.stage3_prefetch_bucket_size,
        )
        self._hooks = ModuleHooks(module, sharded.groups, sharded.anchors, self._live_set, self._on_gradient)
        self._update = self._build_update(optimizer_groups)
        optimizer.bind(self._run_update)
        module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
        sharded.refresh_persistent()
        self._buffers_of_rank_0 = FollowedBuffers(module, collectives)
        self._close_traffic()

    # The loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; its output, of any type, but for views of weights, which become copies."""
        training = self.module.training and torch.is_grad_enabled()
        with self._phase_of(StepPhase.FORWARD):
            self._collectives.agree(f"begin a {'training' if training else 'evaluating'} forward").wait()
            self._begin_pass(training)
            self._buffers_of_rank_0.before_forward()
            with self._hooks.forward():
                output = self.module(*args, **kwargs)
            if not training and not self._training_pass:
                self._live_set.reshard_all()
                self._store.complete()
            self._return_freed()
        return output

    forward = __call__

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradients of ``loss / gradient_accumulation_steps``.

        An error leaves the step unapplied, its accumulated gradients dropped: repeat it from its first micro-batch.
        Returns the loss that was differentiated.
        """
        with self._phase_of(StepPhase.BACKWARD):
            self._collectives.agree("begin a backward").wait()
            self._reducer.norms = self._update.wants_norms and self.is_gradient_accumulation_boundary()
            accumulated = self.config.gradient_accumulation_steps
            scaled = loss / accumulated if accumulated > 1 else loss
            with self._hooks.backward():
                scaled.backward()  # type: ignore[no-untyped-call]
            self._reducer.finish()
            self._hooks.reset()
            self._live_set.settle()
            self.micro_steps += 1
        return scaled.detach()

    def step(self) -> None:
        """Update the parameters if ``gradient_accumulation_steps`` micro-batches were seen; nothing before that."""
        if self._phase is not StepPhase.IDLE:
            self._go(StepPhase.OPTIMIZER)  # refused: the message says what the engine is in
        if self.micro_steps < self.config.gradient_accumulation_steps:
            return
        with self._phase_of(StepPhase.OPTIMIZER):
            self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.global_steps += 1
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self._collectives.rank == 0:
            _log.info("step %d, lr %s, %.3f s", self.global_steps, self.get_lr(), self._times.seconds)
        self._last_times = self._close_times()
        self._close_traffic()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next (or just finished) micro-batch is the last before an update."""
        return self.micro_steps >= self.config.gradient_accumulation_steps - 1

    def zero_grad(self) -> None:
        """Drop what the running step has accumulated."""
        self._reducer.clear()
        self.micro_steps = 0

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # What it knows

    @property
    def training(self) -> bool:
        return self.module.training

    @property
    def device(self) -> torch.device:
        return self._sharded.params[0].full.device

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping; None without ``gradient_clipping``."""
        return self._update.grad_norm

    def io_report(self) -> IoReport:
        """The last step of this rank: traffic per tier and kind, hits, stalls, times, memory."""
        return IoReport.of(
            step=self.global_steps,
            times=self._last_times,
            live_numel_peak=self._live_set.live_numel_peak,
            last_step=self._last_traffic,
            tenant=self._tenant_stats(),
        )

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Name -> full weight on the CPU, shared parameters under each name, buffers included. Collective.

        Every rank holds the whole result.
        """
        full = {}
        for group in self._sharded.groups:
            full.update(group.gather(ObjectKind.WEIGHT, self._sharded.precision.weight))
        return {**self._named(full), **self._buffers()}

    def full_master_state_dict(self) -> dict[str, torch.Tensor]:
        """Name -> full fp32 master weight on the CPU, trainable parameters only. Collective."""
        full = {}
        for group in self._sharded.groups:
            if group.placement.trainable:
                full.update(group.gather(self._sharded.precision.stepped, torch.float32))
        return self._named(full)

    # The end

    def destroy(self) -> None:
        """Give everything back: hooks, arena, swap files, the private daemon. Parameters stay sharded. Idempotent."""
        if self._phase is StepPhase.CLOSED:
            return
        self._phase = StepPhase.CLOSED
        self._collectives.part()
        self._hooks.remove()
        self._reducer.clear()
        self._store.close()
        if self._connection is not None:
            self._connection.close()
        self._collectives.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.destroy()

    # Parts of the loop

    def _begin_pass(self, training: bool) -> None:
        if self._training_pass:
            return  # an evaluation between micro-batches runs inside the training pass
        self._training_pass = training
        self._store.mark(TRAIN_TRACE if training else EVAL_TRACE)
        self._live_set.begin_pass(training=training)

    def _on_gradient(self, group: ParamGroup) -> None:
        if self._phase is not StepPhase.BACKWARD:
            raise RuntimeError(
                "call engine.backward(loss) instead of loss.backward(): the engine must see the backward"
            )
        if group.has_all_gradients:
            self._reducer.complete(group)
            self._hooks.release(group)

    def _run_update(self) -> None:
        self._live_set.reshard_all(persistent=True)
        self._update.run(self._reducer.used)
        self._reducer.clear()
        self._sharded.refresh_persistent()
        self._store.complete()
        self._return_freed()
        self.micro_steps = 0
        self._training_pass = False

    def _return_freed(self) -> None:
        """Weights come and go all the time: without this, what a process holds would grow with the model's depth."""
        if self._sharded.host_store is not None and self.device.type == "cpu":
            return_freed()

    def _build_update(self, optimizer_groups: Sequence[int]) -> Update:
        sharded = self._sharded
        sub_groups = [
            SubGroup(chunk_id, chunk, master=sharded.precision.master, group_of=optimizer_groups)
            for chunk_id, chunk in enumerate(sharded.chunks)
            if sharded.layout.placements[chunk.group].trainable
        ]
        return Update(
            # last chunks first: the first ones, which the next forward needs first, are the ones left resident
            sub_groups[::-1],
            self.optimizer,
            self._gradients,
            store=self._store,
            collectives=self._collectives,
            num_params=len(sharded.params),
            max_norm=self.config.gradient_clipping,
            sub_groups_ahead=sharded.sub_groups_ahead,
        )

    @contextmanager
    def _phase_of(self, phase: StepPhase) -> Iterator[None]:
        """Be in ``phase``; an error leaves the engine IDLE where the step may be repeated, else FAILED."""
        self._go(phase)
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._abort(phase, error)
            raise
        name = {StepPhase.FORWARD: "forward", StepPhase.BACKWARD: "backward", StepPhase.OPTIMIZER: "update"}[phase]
        key = f"{name}_seconds"
        elapsed: Mapping[str, Any] = {key: getattr(self._times, key) + time.perf_counter() - start}
        self._times = replace(self._times, **elapsed)
        self._go(StepPhase.IDLE)

    def _abort(self, phase: StepPhase, error: BaseException) -> None:
        half_applied = phase is StepPhase.OPTIMIZER and self._update.num_updated > 0
        if half_applied or isinstance(error, DaemonLostError):
            self._go(StepPhase.FAILED)
            _log.error("the engine has failed in %s: destroy() it and resume from the last checkpoint", phase.name)
            return
        self._hooks.reset()
        self._live_set.reshard_all()
        self._store.abandon()
        if phase is not StepPhase.OPTIMIZER:
            self.zero_grad()
            self._training_pass = False
        self._go(StepPhase.IDLE)

    def _go(self, phase: StepPhase) -> None:
        if self._phase is StepPhase.FAILED and phase is not StepPhase.CLOSED:
            raise RuntimeError("the engine has failed, its state is half a step ahead: resume from the last checkpoint")
        self._phase = check_transition(PHASE_TRANSITIONS, self._phase, phase)

    def _close_times(self) -> StepTimes:
        stall_seconds = self._store.stats().get("stall_seconds", 0.0)
        times = replace(self._times, stall_seconds=stall_seconds - self._stall_seconds_before)
        self._stall_seconds_before = stall_seconds
        self._times = StepTimes()
        return times

    def _close_traffic(self) -> None:
        tenant = self._tenant_stats()
        if tenant is not None:
            total = TierTraffic.of(tenant.total)
            self._last_traffic = None if self._traffic is None else total.since(self._traffic)
            self._traffic = total

    def _tenant_stats(self) -> TenantStats | None:
        host = self._sharded.host_store
        return None if host is None else host.tenant_stats()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The persistent ones, as ``state_dict`` has them."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer.detach().cpu().clone()
            for prefix, module in self.module.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    def _named(self, by_index: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        index_of = self._sharded.layout.index_of
        return {
            name: by_index[index_of[id(param)]].view(param.shape)
            for name, param in self.module.named_parameters(remove_duplicate=False)
            if index_of[id(param)] in by_index
        }


def _refuse_state_dict(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    """The module's own state dict would hold NaN for every sharded weight, and be saved without a word."""
    raise RuntimeError(
        f"the weights of {type(module).__name__} are sharded: call engine.full_state_dict() (before engine.destroy()) "
        "instead of module.state_dict()"
    )
