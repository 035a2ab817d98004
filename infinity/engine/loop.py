"""The loop that users drive: forward, backward, step, each a phase that an error leaves in a known place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Config
from infinity.engine.background import Background
from infinity.engine.build_update import build_update
from infinity.engine.casting import Casting
from infinity.engine.lost import Lost
from infinity.engine.optimizer_states import OptimizerStates
from infinity.engine.phases import Phases
from infinity.engine.runtime import Runtime
from infinity.engine.step_record import StepRecord
from infinity.errors import ConfigError, DaemonLostError, EngineStateError, WeightsError
from infinity.loader import PlacedLoader
from infinity.observe.observer import Observers, StepFacts
from infinity.report import IoReport
from infinity.states import StepPhase
from infinity.tiers.base import HostTier
from infinity.tiers.collectives import EVALUATING
from infinity.tiers.spinning import spinning
from infinity.update.in_backward import InBackward, refuse_before_step, refuse_norm
from infinity.update.optimizer import ShardedOptimizer
from infinity.update.update import Outcome, Update
from infinity.weights import access, transforms
from infinity.weights.buffers import FollowedBuffers, mixed_dtypes_named
from infinity.weights.param import ShardedParam
from infinity.weights.saved_tensors import stale_graphs_named
from infinity.weights.sharded_model import ShardedModel

_log = logging.getLogger(__name__)


class TrainingLoop:
    """``optimizer``: None where nothing trains."""

    def __init__(
        self,
        runtime: Runtime,
        phases: Phases,
        optimizer: ShardedOptimizer | None,
        optimizer_groups: Sequence[int],
        *,
        config: Config,
        tier: HostTier | None,
        observers: Observers,
    ) -> None:
        self.runtime, self.phases, self.optimizer, self.config = runtime, phases, optimizer, config
        self.lr_scheduler: LRScheduler | None = None
        self.training_loader: PlacedLoader | None = None
        """The loader whose place a checkpoint holds."""
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._casting = Casting(config, runtime.device)
        self.tier = tier
        self.global_samples = 0
        self._num_without_reduction = 0
        self.was_step_applied = False
        """Whether the last call of ``step`` has changed the weights."""
        self.settle_backward: Callable[[], None] = lambda: None
        """Ends a backward that failed half-way, where not the engine runs it."""
        self.boundary: bool | None = None
        """What the user says the next ``step`` is; None: the number of micro-batches decides."""
        self.background = Background()
        self.observers = observers
        self._sharded: ShardedModel = runtime.sharded
        self.num_backwards = 0
        """Since the last update, or since gradients were dropped."""
        self._is_between = False
        """Whether ``step`` has ended a micro-batch, and the next has had no backward yet."""
        self._num_anew = 0
        """How often ``zero_grad`` has begun the step anew there since the last update."""
        self._lost = Lost.NOTHING
        self._followed_buffers = FollowedBuffers(runtime.module, runtime.collectives)
        self.update: Update | None = None
        """None where nothing trains."""
        if optimizer is not None:
            self.update = build_update(runtime, optimizer, optimizer_groups, config)
            in_memory = config.zero_optimization.offload_optimizer.device != "nvme"
            states = OptimizerStates(runtime, self.update, optimizer) if in_memory else None
            optimizer.bind(self.run_update, self.drop_gradients, self.update.scale, states)
            runtime.states.keeps_states = self.update.keeps_states
            runtime.states.refuse_clipped = self.update.refuse_clipped
        self._in_backward: InBackward | None = None
        if self.update is not None and config.io_daemon.update_in_backward:
            self._in_backward = InBackward(self.update, runtime.gradients, runtime.changes.make_ready)
        self._record = StepRecord(runtime.sharded, runtime.device if observers.wants_times else None)
        self._stepped: tuple[bool, ...] = ()
        """Whether the last update stepped it, for each parameter."""
        self._to_zero: set[int] = set()
        """Parameters that torch's own ``zero_grad`` has not come to since a backward failed."""
        self._zeroed: set[int] = set()
        """Parameters whose gradient would be one of zeros by now."""
        runtime.user_gradients.forget = self._forget_gradient
        runtime.user_gradients.note_zeroed = self._note_zeroed_one

    def forward(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.phases.phase is StepPhase.BACKWARD:  # checkpointing calls the engine again
            return self._called(module, args, kwargs)
        training = module.training and torch.is_grad_enabled()
        self.refuse_before_step("forward")
        with self._phase_of(StepPhase.FORWARD):
            with transforms.outside():
                self.runtime.collectives.agree("begin a training forward" if training else EVALUATING)
                self._followed_buffers.before_forward(in_no_sync=self._num_without_reduction > 0)
            with self.observers.around_forward(self.global_steps + 1):
                return self._called(module, args, kwargs)

    def _called(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = self._casting.inputs((args, kwargs))
        with self._casting.around_forward(), mixed_dtypes_named(module, (args, kwargs)):
            return module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, scale: bool, create_graph: bool) -> torch.Tensor:
        loss_scale = self._trained("backward").scale.value
        with self.around_backward("backward()", may_be_last=not (retain_graph or create_graph)):
            accumulated = self.config.gradient_accumulation_steps
            scaled = loss / accumulated if scale and accumulated > 1 else loss
            differentiated = scaled if loss_scale == 1.0 else scaled.float() * loss_scale
            with stale_graphs_named(type(self.runtime.module).__name__):
                differentiated.backward(retain_graph=retain_graph, create_graph=create_graph)  # type: ignore[no-untyped-call]
            self.observers.after_backward(loss)
        return scaled.detach()

    @contextmanager
    def around_backward(self, call: str, *, may_be_last: bool, divisor: int = 1) -> Iterator[None]:
        """One backward through the model, whoever runs it.

        Args:
            may_be_last: no other one may follow in this graph.
            divisor: what every parameter's gradient is divided by; 1 where the loss was divided.
        """
        update = self._trained("backward")
        self.refuse_before_step(call)
        self._refuse_lost(call)  # plain torch would add to what the backward that failed has left
        if self._in_backward is not None:
            self._refuse_modes(call, "updates weights")
        elif self.runtime.reducer.has_any:
            self._refuse_modes(call, "adds to earlier gradients")
        elif self.runtime.streams:
            self._refuse_modes(call, "has weights brought back", of_functions=False)
        update.refuse_clipped(call)
        with self._phase_of(StepPhase.BACKWARD):
            self._begin_backward(may_be_last=may_be_last, divisor=divisor)
            yield
            self._end_backward()
        self.num_backwards += 1
        self._is_between = False

    @transforms.apart
    def _begin_backward(self, *, may_be_last: bool, divisor: int) -> None:
        reducer = self.runtime.reducer
        reducer.has_taken = False
        self.runtime.collectives.agree(f"begin a backward ({self._place()}, {reducer.told})")
        reduces = self._sharded.policy.reduces(boundary=self.is_boundary())
        reducer.puts_off = self._num_without_reduction > 0 or not reduces
        reducer.norms = self._trained("backward").wants_norms and self.is_boundary()
        reducer.divisor = divisor
        is_last = self.is_boundary() and may_be_last and not reducer.puts_off
        reducer.in_backward = self._in_backward if is_last else None
        if reducer.in_backward is not None:
            self.runtime.changes.check_written()
            reducer.in_backward.begin()

    @transforms.apart
    def _end_backward(self) -> None:
        self.runtime.reducer.finish()
        self.runtime.leaves.end_backward()
        self.runtime.live_set.settle()

    def _place(self) -> str:
        last = ", the last" if self.is_boundary() else ""
        return f"micro-batch {self.micro_steps + 1}{last} of step {self.global_steps + 1}"

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        self._num_without_reduction += 1
        try:
            yield
        finally:
            self._num_without_reduction -= 1

    def step(self, scheduled: Mapping[str, Any]) -> None:
        """``scheduled``: what the schedule's own step is called with, if this step updates."""
        self._trained("step")
        if scheduled and self.lr_scheduler is None:
            raise ConfigError(
                "lr_kwargs", dict(scheduled), "there is no schedule whose step could take it: leave it out"
            )
        if self._num_without_reduction:
            raise EngineStateError(
                "It is illegal to call Engine.step() inside no_sync context manager, where gradients are not reduced "
                "yet: call it outside"
            )
        if self.phases.phase is not StepPhase.IDLE:
            self.phases.check(StepPhase.OPTIMIZER)  # the message says what the engine is in
        self.was_step_applied = False
        if not self.is_boundary():
            self.refuse_before_step("step() that does not update")
            self._refuse_lost("step()")
            self.micro_steps += 1
            self._is_between = True
            return
        if self.optimizer is None:
            raise AssertionError("an update without an optimizer")
        self._refuse_modes("step()", "updates weights")
        self.background.advance()
        with self._phase_of(StepPhase.OPTIMIZER):
            self.optimizer.step()
        self.global_steps += 1
        self.global_samples += self._samples_of_update()
        if self.training_loader is not None:
            self.training_loader.note_step()
        if self.was_step_applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**scheduled)
        else:
            self.skipped_steps += 1
            self._log_skipped(self.optimizer.loss_scale)
        self._tell_observers()
        self._record.close()

    def _samples_of_update(self) -> int:
        """The configuration's, or what was really accumulated where the user decides on that."""
        num_backwards, self.num_backwards = self.num_backwards, 0
        config = self.config
        if config.managed_gradient_accumulation:
            return config.train_batch_size
        return config.train_batch_size // config.gradient_accumulation_steps * num_backwards

    @transforms.apart
    def run_update(self) -> None:
        """The update of every chunk; what the optimizer's own ``step`` calls."""
        update = self._trained("step")
        self.settle_backward()
        self._refuse_lost("step()")
        self._gather_gradients()
        if not self.config.zero_optimization.ignore_unused_parameters:
            self._refuse_unused()
        self._refuse_zeroed()
        self.runtime.changes.check()
        update.agree(self.runtime.collectives, self.global_steps + 1, self.runtime.reducer.used)
        if update.begin(self.runtime.reducer.used) is Outcome.APPLIED:
            self.runtime.changes.begin()
            at_once = self.config.io_daemon.update == "in_step" or update.is_foreign
            update.apply(None if at_once else self.runtime.changes.chunks_that_stay)
        self._stepped = tuple(update.grouped(self.runtime.reducer.used))
        self.was_step_applied = update.finish() is Outcome.APPLIED
        if self.was_step_applied:
            self.runtime.changes.end()
        else:
            self.runtime.changes.skip()
        self.micro_steps, self._is_between, self._num_anew = 0, False, 0

    def _gather_gradients(self) -> None:
        """All gradients of the step are where the update reads them. Collective."""
        self.runtime.user_gradients.take()
        self.runtime.reducer.settle()

    def _tell_observers(self) -> None:
        update, optimizer = self.update, self.optimizer
        if update is None or optimizer is None:
            raise AssertionError("an update without an optimizer")
        self.observers.after_step(
            StepFacts(
                step=self.global_steps,
                samples=self.global_samples,
                loss=self.observers.take_loss(),
                learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
                loss_scale=optimizer.loss_scale,
                grad_norm=update.grad_norm,
                forward_s=self._record.times.forward_seconds,
                backward_s=self._record.times.backward_seconds,
                update_s=self._record.times.update_seconds,
            )
        )

    def set_accumulation(self, *, micro_batch: int, accumulation: int) -> None:
        """Batch sizes are these from the next step on. Raises EngineStateError within a step."""
        if self.is_within_step:
            raise EngineStateError("batch sizes change between steps, not while gradients accumulate")
        if accumulation > 1 and not self._sharded.precision.accumulates:
            raise EngineStateError(
                "gradients are kept in 16 bits, since the configuration has gradient_accumulation_steps 1: start with "
                "2 or more, or with communication_data_type fp32"
            )
        world_size = self.runtime.collectives.world_size
        self.config = self.config.model_copy(
            update={
                "train_micro_batch_size_per_gpu": micro_batch,
                "gradient_accumulation_steps": accumulation,
                "train_batch_size": micro_batch * accumulation * world_size,
            }
        )

    def _refuse_unused(self) -> None:
        layout = self._sharded.layout
        used = self.runtime.reducer.used
        unused = [
            name
            for name, param, flag in zip(layout.names, layout.params, used, strict=True)
            if param.requires_grad > flag
        ]
        if unused:
            raise WeightsError(
                ", ".join(unused),
                "had no gradient in this step, and ignore_unused_parameters is false",
                "use every trainable parameter in the loss, freeze what is not used, or write true",
            )

    def is_boundary(self) -> bool:
        """Whether the next call of ``step`` updates."""
        if self.boundary is not None:
            return self.boundary
        managed = self.config.managed_gradient_accumulation
        return not managed or self.micro_steps >= self.config.gradient_accumulation_steps - 1

    @property
    def is_within_step(self) -> bool:
        """Whether gradients of a step are there that is not over."""
        return bool(self.micro_steps or self.runtime.reducer.has_any)

    @property
    def counters(self) -> dict[str, int]:
        """What ``restore_counters`` takes."""
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
        }

    def restore_counters(self, *, global_steps: int, global_samples: int, skipped_steps: int) -> None:
        """Go on counting from a checkpoint."""
        self.global_steps, self.global_samples = global_steps, global_samples
        self.skipped_steps, self.micro_steps, self._is_between = skipped_steps, 0, False
        self._lost = Lost.NOTHING

    def _refuse_modes(self, call: str, does: str, *, of_functions: bool = True) -> None:
        """Raises EngineStateError inside a mode of the user's, which would see other operations than in plain torch."""
        if modes := transforms.modes_of_users(of_functions=of_functions):
            raise EngineStateError(
                f"{call} of {type(self.runtime.module).__name__} {does} within {modes[0]}, a mode that would see other "
                "operations than plain torch's: leave the mode before, and enter it again for the next forward"
            )

    def _refuse_lost(self, call: str) -> None:
        if self._lost is not Lost.NOTHING:
            raise self._lost.refuse(call)

    def refuse_before_step(self, call: str) -> None:
        """Raises EngineStateError where an update failed, or backward has begun one."""
        self.phases.refuse_failed()  # step() is no remedy then
        if self.update is not None and self.update.is_early:
            raise refuse_before_step(call)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """The running step begins anew."""
        self._refuse_in_backward("zero_grad()")
        if self._is_between:
            self._num_anew += 1
            if self._num_anew == self.config.gradient_accumulation_steps:
                words = "zero_grad() has begun the step anew %d times, and nothing was updated since: step() clears "
                _log.warning(words + "gradients, leave it out between the micro-batches of a step", self._num_anew)
        self._begin_anew()
        self._note_zeroed(set_to_none=set_to_none)

    def drop_gradients(self, *, set_to_none: bool) -> None:
        """What was accumulated is gone; which micro-batch comes next stays."""
        self._refuse_in_backward("zero_grad()")
        self._drop_gradients()
        self._note_zeroed(set_to_none=set_to_none)

    def _forget_gradient(self, param: ShardedParam) -> None:
        self._refuse_in_backward("zero_grad()")
        self.refuse_before_step("zero_grad()")
        self.refuse_between("zero_grad() of a module, or param.grad = None,")
        reducer = self.runtime.reducer
        reducer.forget(self._sharded.group_of[param.index], param)
        if not reducer.has_any:
            self.num_backwards = 0
            self._trained("zero_grad").forget_clipping()

    def refuse_between(self, call: str) -> None:
        """Raises EngineStateError behind the ``step()`` of a micro-batch that is not the step's last."""
        if self._is_between:
            raise EngineStateError(
                f"{call} between the micro-batches of a step: plain torch would drop what was accumulated, and "
                "DeepSpeed does not: leave it out, since step() clears gradients, or call "
                "engine.optimizer.zero_grad() to drop it"
            )

    def _note_zeroed(self, *, set_to_none: bool) -> None:
        for param in range(len(self._stepped)):
            self._note_zeroed_one(param, set_to_none=set_to_none)

    def _note_zeroed_one(self, param: int, *, set_to_none: bool) -> None:
        if self._lost is not Lost.NOTHING and self.phases.phase is StepPhase.IDLE:
            self._to_zero.discard(param)
            if not self._to_zero:
                self._begin_anew()
        if set_to_none:
            self._zeroed.discard(param)
        elif self._stepped and self._stepped[param]:
            self._zeroed.add(param)

    def _refuse_zeroed(self) -> None:
        """Raises WeightsError where an optimizer of torch's would step a parameter by a gradient of zeros."""
        used, names = self.runtime.reducer.used, self._sharded.layout.names
        lacking = [names[param] for param in sorted(self._zeroed) if not used[param]]
        if lacking:
            raise WeightsError(
                ", ".join(lacking),
                "has no gradient in this step, and zero_grad(set_to_none=False) had left it one of zeros, by which "
                "torch's optimizers step by momentum and decay",
                "call zero_grad(), or add 0 * param.sum() to the loss to have it stepped",
            )

    def _refuse_in_backward(self, call: str) -> None:
        self.settle_backward()
        self.phases.refuse_within(StepPhase.BACKWARD, call)

    def _begin_anew(self) -> None:
        if self.update is not None and not self.update.is_half_applied:
            self.update.cancel()
        self._drop_gradients()
        self.observers.drop_losses()
        self.micro_steps, self._is_between = 0, False

    def _fail_backward(self) -> None:
        """What the backward that failed has added to cannot be taken out again."""
        reducer = self.runtime.reducer
        reducer.in_backward = None
        # a hook of the user's comes before ours, and may have raised with the gradient there
        untaken = [each for each in self._sharded.params if access.own_gradient(each.param) is not None]
        for each in untaken:
            access.drop_gradient(each.param)
        if reducer.has_taken or untaken:
            lost = Lost.EARLIER if self.num_backwards else Lost.LAST
            self._begin_anew()
            self._lost = lost
            trained = self._trained("backward").grouped([each.param.requires_grad for each in self._sharded.params])
            self._to_zero = {index for index, is_trained in enumerate(trained) if is_trained}

    def _drop_gradients(self) -> None:
        self.refuse_before_step("zero_grad()")
        self.runtime.reducer.clear(by_user=self.phases.phase is StepPhase.IDLE)
        self.runtime.user_gradients.drop()
        self.num_backwards, self._lost = 0, Lost.NOTHING
        if self.update is not None:
            self.update.forget_clipping()

    @transforms.apart
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        update = self._trained("clip_grad_norm_")
        if self._in_backward is not None:
            raise refuse_norm("clip_grad_norm_()")
        update.refuse_clipping(is_boundary=self.is_boundary())
        self._gather_gradients()
        return update.clip_once(max_norm, self.runtime.reducer.used)

    def grad_norm(self) -> float | None:
        if self._in_backward is not None:
            raise refuse_norm("get_global_grad_norm()")
        return None if self.update is None else self.update.ask_for_norm()

    def io_report(self) -> IoReport:
        return self._record.report(self.global_steps, self.runtime.live_set.live_numel_peak)

    def close(self) -> None:
        """Idempotent; also run when the engine is collected, or the interpreter ends."""
        if self.phases.phase is StepPhase.CLOSED:
            return
        self.background.end(finish=self.runtime.collectives.world_size == 1 and not self.phases.is_over)
        self.phases.phase = StepPhase.CLOSED
        self.runtime.collectives.part()
        self.runtime.close()
        self.observers.close()
        if self.tier is not None:
            self.tier.close()
        spinning.restore()

    def _trained(self, call: str) -> Update:
        if self.update is not None:
            return self.update
        if any(param.requires_grad for param in self._sharded.layout.params):
            raise EngineStateError(
                f"{call}() needs an optimizer, and none was given beside the model: pass both to one call of "
                "initialize(), or of Accelerate's prepare(model, optimizer), or write the section optimizer"
            )
        raise WeightsError("the model", "has nothing to train", f"{call}() needs a parameter that requires_grad")

    def _log_skipped(self, scale: float) -> None:
        if self.runtime.collectives.rank == 0:
            _log.info("step %d was skipped: a gradient is not finite; loss scale %g", self.global_steps, scale)

    @contextmanager
    def _phase_of(self, phase: StepPhase) -> Iterator[None]:
        """Be in ``phase``; an error leaves the engine IDLE where the step may be repeated, else FAILED."""
        self.runtime.calls.end_interrupted()
        around, has_graph = self.phases.phase, torch.is_grad_enabled()
        try:  # an interrupt may come anywhere
            self.phases.go(phase)
            spinning.restore()  # until this phase waits for I/O, too
            self._record.begin()
            yield
            self._record.end(phase, update_seconds=0.0 if self.update is None else self.update.take_seconds())
            if self.phases.phase is phase:  # else what the model did inside has failed, and it went on
                self.phases.go(around)
        except BaseException as error:
            if has_graph:  # an interrupt may have come as that was being switched on again
                torch.set_grad_enabled(True)
            if around is not phase:  # else it was refused
                try:
                    self._abort(phase, error)
                except BaseException:  # one more: nobody else would end the phase
                    self._abort(phase, error)
                    raise
            raise

    def _abort(self, phase: StepPhase, error: BaseException) -> None:
        """End the phase, if it is not over."""
        if self.phases.phase is not phase:
            return
        update = self.update
        refused = isinstance(error, (WeightsError, EngineStateError))
        if refused and phase is StepPhase.OPTIMIZER and update is not None and update.goes_on:
            self.phases.go(StepPhase.IDLE)  # what backward has updated stays: step() may be repeated
            return
        half_applied = update is not None and update.is_half_applied
        if half_applied or isinstance(error, DaemonLostError):
            self.phases.go(StepPhase.FAILED)
            self.runtime.calls.forget()
            _log.error("the engine has failed in %s, its state is half a step ahead: destroy() it", phase.name)
            return
        self.runtime.abandon_pass()
        if update is not None and phase is not StepPhase.FORWARD:
            update.cancel()
        if phase is StepPhase.BACKWARD:
            self._fail_backward()
        if phase is not StepPhase.OPTIMIZER:
            self.phases.in_training_pass = False
        self.phases.go(StepPhase.IDLE)
