"""What a step runs on: groups of sharded weights, their store, the way of gradients, and who may use a weight when.

The runtime is the ``Owner`` of the model's parameters and the ``Holder`` of its modules' calls. It refers to the model
but not to the engine, so that an engine nobody refers to any more can end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.changes import WeightChanges
from infinity.engine.gathering import Gathering
from infinity.engine.phases import Phases
from infinity.engine.refusals import Refusals
from infinity.engine.state_access import StateAccess
from infinity.engine.user_gradients import UserGradients
from infinity.engine.written import Written
from infinity.errors import WeightsError, WorldError
from infinity.plan.registered import modules, named_modules, parameters
from infinity.states import StepPhase
from infinity.tiers.base import is_beside
from infinity.tiers.collectives import Collectives
from infinity.update.gradients import GradientChunks
from infinity.update.norms import norms_of
from infinity.update.reducer import Reducer
from infinity.weights import access, owners, shard_copies, transforms
from infinity.weights.autocast import CastOnce
from infinity.weights.buffers import note_mixed_dtypes
from infinity.weights.ended import Ended
from infinity.weights.heap import return_freed
from infinity.weights.holding import ModuleCalls
from infinity.weights.leaf import LeafCalls
from infinity.weights.live_set import LiveSet
from infinity.weights.param import ShardedParam
from infinity.weights.param_group import ParamGroup
from infinity.weights.saved_tensors import SavedTensors, hooks_are_allowed
from infinity.weights.sharded_model import ShardedModel
from infinity.weights.state_dicts import StateDictHook
from infinity.weights.state_io import StateIO
from infinity.weights.streams import CopyStream
from infinity.weights.structure import Structure
from io_daemon.shared.protocol import ObjectKind

TRAIN_TRACE, EVAL_TRACE = 0, 1


class Runtime(owners.Owner):
    def __init__(
        self, module: nn.Module, sharded: ShardedModel, phases: Phases, *, config: Config, collectives: Collectives
    ) -> None:
        self.sharded, self.store, self.collectives = sharded, sharded.store, collectives
        self.module, self._phases = module, phases
        self.is_narrow_by_model = False
        """The model came in 16 bits, which no configuration named: whoever gets its weights back gets them so."""
        self._lock = threading.RLock()
        """Weights come and go under it: modules may be called in several threads, and backward has its own."""
        self._calls: set[object] = set()
        """From outside the model, in all threads, that run."""
        self._param_of = {id(param.param): param for param in sharded.params}
        self._refusals = Refusals(self._param_of)
        self.meet_backward: Callable[[ShardedParam], None] = self._refusals.refuse_backward
        """What is called with a gradient that arrives outside of the engine's backward: it begins one, or raises."""
        self._cast_once = CastOnce(module, sharded.params, self.device)
        zero = config.zero_optimization
        self.policy = sharded.policy
        self.shards_weights = self.policy.shards_weights
        self.live_set = LiveSet(
            sharded.groups,
            live_numel_max=zero.stage3_max_live_parameters,
            reuse_distance_max=zero.stage3_max_reuse_distance,
            prefetch_numel_max=zero.stage3_prefetch_bucket_size,
            copies=sharded.copies,
            makes_each=sharded.makes_each,
        )
        num_params = len(sharded.params)
        self.gradients = GradientChunks(
            self.store,
            sharded.chunks,
            num_params,
            [
                ([param.index for param in group.params], [chunk for chunk, _ in group.chunks])
                for group in sharded.groups
                if group.placement.trainable
            ],
            norms_of([param.numel for param in sharded.params], sharded.sharers, device=sharded.stepped_on),
            CopyStream(self.device),
            sharded.under_way,
        )
        self.reducer = Reducer(
            sharded.groups,
            self.gradients,
            collectives,
            num_params,
            gradient_dtype=sharded.precision.gradient,
            reduces_each=self.policy.reduces(boundary=False),
            rounds_sums=sharded.precision.rounds_sums,
        )
        self.user_gradients = UserGradients(self.reducer, sharded, phases)
        self.io = StateIO(sharded)
        self.written = Written(self, sharded, self.io, collectives, self.live_set, lock=self._lock)
        self._gathering = Gathering(
            sharded,
            self.io,
            collectives,
            self.live_set,
            phases,
            lock=self._lock,
            written=self.written,
            refusals=self._refusals,
        )
        self.states = StateAccess(
            sharded,
            self.io,
            phases,
            reducer=self.reducer,
            gradients=self.gradients,
            written=self.written,
            gathering=self._gathering,
            collectives=collectives,
        )
        self.changes = WeightChanges(
            sharded,
            self.live_set,
            self.reducer,
            phases,
            lock=self._lock,
            refusals=self._refusals,
            written=self.written,
        )
        self._saved = SavedTensors(self._param_of, sharded.resident, self._bring, self._cast_once.use)
        self.streams = any(not group.persistent for group in sharded.groups)
        """Whether weights come and go."""
        kept = (p for p in sharded.params if not sharded.group_of[p.index].placement.trainable)
        self.structure = Structure(module, [(p.name, p.param) for p in kept if sharded.layout.trains])
        for param in sharded.params:
            owners.adopt(param.param, self)
        self.calls = ModuleCalls(module, self._groups_of_calls(), self)
        self.leaves = LeafCalls(sharded.leaves, hold=self.hold, release=self.release, complete=self._complete)
        self._removable: list[Any] = []
        for group in sharded.groups:
            for param in group.params if group.placement.trainable else ():
                with access.raw():
                    handle = param.param.register_post_accumulate_grad_hook(_GradientHook(self, group, param))  # type: ignore[no-untyped-call]
                self._removable.append(handle)
        for name, child in named_modules(module):
            hook = StateDictHook(name or type(module).__name__, copies=self.copies_modules)
            child.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        # in a thread of its own: asking makes a node, and the numbers of a thread's nodes order what backward sums
        asking = threading.Thread(target=self._hold_accumulators)
        asking.start()
        asking.join()
        self.changes.refresh()

    def _hold_accumulators(self) -> None:
        for param in self.sharded.params:
            param.hold_accumulator()

    def close(self) -> None:
        """Give everything back. Parameters that are still its own refuse every use; nothing refers to the model."""
        try:
            self.calls.end_interrupted()
        except WorldError:  # the daemon, say, is gone: all that is here is given back nevertheless
            self.calls.forget()
        self.calls.remove()
        self.leaves.remove()
        for handle in self._removable:
            handle.remove()
        self._removable.clear()
        self.reducer.clear()
        self._saved.end()
        kept = [param for param in self.sharded.params if owners.owner_of(param.param) is self]
        ended = Ended(kept)
        for param in kept:
            access.hide(param.param, param.placeholder)
            owners.adopt(param.param, ended)
            param.drop()
        self.sharded.pool.trim()
        self.store.close()
        self.collectives.close()

    # Calls of modules: the ``Holder``

    @transforms.apart
    def begin_call(self, module: nn.Module, call: object) -> None:
        if self._phases.is_over:
            raise WeightsError(type(module).__name__, "is called after its engine ended", "make a new engine")
        self._refuse_forked(self.sharded.params)
        in_backward = self._phases.phase is StepPhase.BACKWARD  # where checkpointing calls modules again
        if not in_backward and (module is self.module or not self._phases.in_training_pass):
            self.structure.check(trains=torch.is_grad_enabled())
            shard_copies.check(self)
        if self.collectives.is_forked:  # it uses weights that are here, and nobody is told
            return
        with self._lock:
            self._calls.add(call)
            if not self._phases.in_training_pass and not in_backward and len(self._calls) == 1:
                self._begin_pass(training=self.module.training and torch.is_grad_enabled())
            if self.streams:
                self._cast_once.begin_call(module, within_another=len(self._calls) > 1)

    @transforms.apart
    def end_call(self, call: object, *, failed: bool) -> None:
        with self._lock:
            if call not in self._calls:
                return
            self._calls.remove(call)
            if self._calls:
                return
            if self.streams:
                self._cast_once.end_call()
            if not self._phases.in_training_pass and not self._phases.is_over:
                self.live_set.reshard_all()
                if failed:
                    self.store.abandon()
                else:
                    self.store.complete()

    def note_failure(self, module: nn.Module, inputs: object, error: BaseException | None) -> None:
        if self._phases.phase is not StepPhase.FORWARD:  # there the engine's own call answers
            note_mixed_dtypes(module, inputs, error)

    @transforms.apart
    def hold(self, group: ParamGroup) -> None:
        self._cast_once.watch()  # the model may switch autocast on itself
        with self._lock:
            self._phases.refuse_beside_update()
            self.live_set.use(group)
            group.num_holds += 1
            group.num_calls += 1
            if group.num_calls == 1:  # modules that share a group are called within each other
                written = [param for param in group.params if not param.show()]
                if written:
                    self.release([group])
                    self.written.refuse(written[0])

    @transforms.apart
    def release(self, groups: Sequence[ParamGroup]) -> None:
        changed: list[ShardedParam] = []
        unseen: list[ShardedParam] = []
        with self._lock:
            # an evaluation beside another thread's backward saves nothing, but a hook there that waits for the lock
            # holds its parameter, too
            may_save = torch.is_grad_enabled() or self._phases.phase is not StepPhase.BACKWARD
            for group in reversed(groups):
                group.num_holds -= 1
                group.num_calls -= 1
                if group.num_calls:
                    continue
                unseen += [param for param in group.params if may_save and param.is_kept_unseen()]
                spoiled = [param for param in group.params if not param.hide()]
                if spoiled:
                    self.live_set.forget(group)
                    changed += spoiled
                else:
                    self.live_set.done(group)
        self._cast_once.release(sum(group.numel for group in groups))
        if changed:
            owners.refuse_write(self, changed[0].param)
        if unseen and self.streams:
            self._refusals.refuse_unseen(unseen[0])

    def hooks(self, *, outermost: bool) -> AbstractContextManager[None]:
        if not self.streams or not hooks_are_allowed():  # under no_grad, too: the model may enable gradients itself
            return nullcontext()
        return self._saved.around_call() if outermost else self._saved.beside_user_hooks()

    # Uses of single parameters: the ``Owner``

    def borrow(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        return self.gathered(params, None)

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
        self._refuse_use_after_end(params[0])
        self.calls.end_interrupted()
        lent = [self._param_of[id(param)] for param in params]
        self._refuse_forked(lent)
        if transforms.is_inside():
            self._refuse_streamed(lent, f"is used {transforms.PROBLEM}", transforms.REMEDY)
        self._cast_once.use(lent)
        in_pass = self._phases.in_training_pass or bool(self._calls)
        with self._gathering.gathered(lent, in_pass=in_pass, modifier_rank=modifier_rank), self.hooks(outermost=True):
            yield

    def _refuse_forked(self, params: Iterable[ShardedParam]) -> None:
        if self.collectives.is_forked and (self.sharded.host_store is not None or self.collectives.world_size > 1):
            self._refuse_streamed(
                params,
                "is used in a forked process, as DataLoader's workers are, which has no part in its parent's I/O",
                "use it in the parent, or hand what engine.full_state_dict() gives to the child",
            )

    def _refuse_streamed(self, params: Iterable[ShardedParam], problem: str, remedy: str) -> None:
        for param in params:
            if not self.sharded.group_of[param.index].persistent:
                self.refuse(param.param, problem, remedy)

    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        self.refuse_over("ds_tensor")
        return shard_copies.hand_out(self, param, self.io.own_weights(self._param_of[id(param)]), "ds_tensor")

    def overwrite(self, values: Sequence[tuple[nn.Parameter, owners.Values]]) -> None:
        self.states.overwrite([(self._param_of[id(param)], new) for param, new in values])

    def is_persistent(self, param: nn.Parameter) -> bool:
        return self.sharded.group_of[self._param_of[id(param)].index].persistent

    def stream(self, param: ShardedParam) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of all pieces of the weights, in the order of memory, on the CPU. Collective."""
        return self.io.stream(param, ObjectKind.WEIGHT)

    def sharded_param(self, param: torch.Tensor) -> ShardedParam:
        return self._param_of[id(param)]

    def _refuse_use_after_end(self, param: nn.Parameter) -> None:
        self._phases.refuse_failed()
        if self._phases.is_over:
            owners.refuse_ended(self, param)

    def check_readable(self, call: str) -> None:
        """Raises as ``refuse_over``, and WeightsError if the weights are not what somebody wrote to them."""
        self.refuse_over(call)
        self.written.check(self.sharded.params)

    def refuse_over(self, call: str) -> None:
        """Raises EngineStateError if the weights are gone, or belong to no step."""
        self._phases.refuse_over(call)

    def alias(self, param: nn.Parameter) -> torch.Tensor:
        return access.ShardedAlias.of(param)

    def layout_of(self, param: nn.Parameter) -> torch.Tensor:
        return self._param_of[id(param)].layout

    def gradient_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return self.user_gradients.get(self._param_of[id(param)])

    def set_gradient(self, param: nn.Parameter, gradient: torch.Tensor | None) -> None:
        self.user_gradients.set(self._param_of[id(param)], gradient)

    def set_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        is_write = not self.shards_weights and self._param_of[id(param)].lies_as(data)  # as of ``param.data += delta``
        if is_write or self._gathering.keeps_writes(self._param_of[id(param)]):
            self._gathering.set_data(self._param_of[id(param)], data)
            return
        self._refusals.refuse_data(param, data)

    def set_to_itself(self, param: nn.Parameter) -> None:
        self._param_of[id(param)].count_set()

    def copy(self, param: nn.Parameter) -> nn.Parameter:
        if self.shards_weights or self._phases.is_over:
            self._refusals.refuse_copy(param)
        with access.raw():
            return owners.users_class(param)(param.detach().clone(), param.requires_grad)

    @property
    def copies_modules(self) -> bool:
        """Whether ``copy.deepcopy`` of a module gives one of the user's own: its weights are whole."""
        return not self.shards_weights

    def refuse(self, param: nn.Parameter, problem: str, remedy: str) -> NoReturn:
        self._refusals.refuse(param, problem, remedy)

    # Passes: what the loop drives

    @property
    def device(self) -> torch.device:
        return self.sharded.params[0].device

    def empty_cache(self) -> None:
        """Give up weights that nobody uses now, and what was leased ahead."""
        with self._lock:
            self.live_set.reshard_all()
        self.return_freed()

    def abandon_pass(self) -> None:
        """An exception has ended a call: nothing is in use, and leases that wait are given up."""
        self.calls.forget()
        self.leaves.end_backward()
        with self._lock:
            for group in self.sharded.groups if not self._calls else ():
                group.num_holds -= group.num_calls  # of calls that were interrupted while they began
                group.num_calls = 0
                if not (group.in_use or group.persistent):
                    for param in group.params:
                        param.conceal()
            self.live_set.reshard_all()
            self.store.abandon()

    def return_freed(self) -> None:
        """Give memory that nobody uses back to the system. No step does: weights have a pool, and autograd takes again
        what it freed."""
        self.sharded.pool.trim()
        self.sharded.device_store.trim()
        if is_beside(self.device):
            torch.get_device_module(self.device).empty_cache()  # for others on this device
        elif self.sharded.host_store is not None and self.device.type == "cpu":
            return_freed()

    @transforms.apart
    def on_gradient(self, group: ParamGroup, param: ShardedParam) -> None:
        """Autograd has accumulated a gradient."""
        if self._phases.phase is not StepPhase.BACKWARD:
            try:
                self.meet_backward(param)
            except BaseException:
                access.drop_gradient(param.param)
                raise
        with self._lock:
            if self.reducer.take(group, param):
                self._complete(group)

    @transforms.apart
    def _complete(self, group: ParamGroup) -> None:
        with self._lock:
            self.reducer.complete(group)
            self.live_set.done(group)

    def _begin_pass(self, *, training: bool) -> None:
        self._phases.in_training_pass = training
        self.store.mark(TRAIN_TRACE if training else EVAL_TRACE)
        self.live_set.begin_pass(training=training)

    def _bring(self, param: ShardedParam) -> torch.Tensor:
        """Backward asks for weights that forward saved. Who has them has their memory, whatever becomes of them."""
        group = self.sharded.group_of[param.index]
        if self._phases.is_over:
            self.refuse(param.param, "is needed by a backward after its engine ended", "end backward before destroy()")
        if self.shards_weights and param.differs and not self._gathering.keeps_writes(param):
            self.written.refuse(param)  # before gradients go through it: an update that is refused can be repeated
        with self._lock:
            self.live_set.use(group)
            self.live_set.linger(group)
            if param.full is None:
                raise AssertionError(f"{param.name} was brought and is not there")
            return param.full  # within the lock: another thread's call may give them up, and gather them anew

    def _groups_of_calls(self) -> dict[nn.Module, list[ParamGroup]]:
        """What each module holds while it is called: groups it stands for, and those of its own parameters."""
        found: dict[nn.Module, list[ParamGroup]] = {}
        for module in modules(self.module):
            looks_at = next(iter(module.layers), module) if isinstance(module, nn.TransformerEncoder) else module
            own = parameters(looks_at, recurse=looks_at in self.sharded.units)
            groups = [
                *self.sharded.anchors.get(module, ()),
                *(self.sharded.group_of[self._param_of[id(p)].index] for p in own),
            ]
            needed = [group for group in dict.fromkeys(groups) if not group.persistent]
            if needed:
                found[module] = needed
        return found


class _GradientHook:
    """What autograd calls once it has accumulated one parameter's gradient."""

    def __init__(self, runtime: Runtime, group: ParamGroup, param: ShardedParam) -> None:
        self._runtime, self._group, self._param = runtime, group, param

    def __call__(self, _param: torch.Tensor) -> None:
        self._runtime.on_gradient(self._group, self._param)
