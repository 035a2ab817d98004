"""Who still needs a param group: calls of modules, each from its beginning to its end, and single operations.

A module that owns weights of a group, or whose call stands for it, holds it while it runs: the weights are in the
parameters then, and operations cost what they always cost. Holds are counted and each is released by who took it, in
whatever order calls end. Everything else that uses a weight (a tied head, a regulariser after forward, an EMA between
steps) borrows it for the one operation, see ``access``.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.plan.registered import modules, named_modules
from infinity.weights import transforms
from infinity.weights.param_group import ParamGroup
from infinity.weights.state_dicts import refuse_module_copy


class Holder(Protocol):
    """What calls of modules tell the engine's runtime."""

    @property
    def copies_modules(self) -> bool:
        """Whether a module may be copied, as its weights are whole."""

    def begin_call(self, module: nn.Module, call: object) -> None:
        """A module is called from outside the model, in this thread."""

    def end_call(self, call: object, *, failed: bool) -> None:
        """The call that ``begin_call`` announced, or was to announce, is over."""

    def abandon_pass(self) -> None:
        """An exception has ended all calls of this thread."""

    def note_failure(self, module: nn.Module, inputs: object, error: BaseException | None) -> None:
        """The call of a module from outside the model ends with an error, which may be noted upon."""

    def hold(self, group: ParamGroup) -> None:
        """A call needs the group's weights."""

    def release(self, groups: Sequence[ParamGroup]) -> None:
        """The call is over. Raises WeightsError for weights that it wrote to."""

    def hooks(self, *, outermost: bool) -> Any:
        """The saved-tensor hooks for a call: a context manager."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


class _Call:
    """One running call of a module, and what is to be undone at its end. ``frame``: what runs as long as it does."""

    __slots__ = ("frame", "groups", "hooks", "module", "outermost")

    def __init__(self, module: nn.Module, frame: FrameType, *, outermost: bool) -> None:
        self.module, self.frame, self.outermost = module, frame, outermost
        self.groups: list[ParamGroup] = []
        self.hooks = ExitStack()


class ModuleCalls:
    """Hooks on every module whose call needs sharded weights, and on the model."""

    def __init__(self, model: nn.Module, groups_of: Mapping[nn.Module, Sequence[ParamGroup]], holder: Holder) -> None:
        self._holder = holder
        self._thread = _Thread()
        self._removable: list[Any] = []
        _hide_from_compiler()
        for layer in modules(model):
            if isinstance(layer, nn.TransformerEncoderLayer):
                _hide_hooks(layer)
        for name, module in named_modules(model):
            groups = groups_of.get(module, ())
            if groups or module is model:
                self._hook(name or type(module).__name__, module, groups, transformable=not groups_of)

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable.clear()

    def forget(self) -> None:
        """After an exception that no hook saw: no call of this thread is running any more."""
        while self._thread.calls:
            self._end_unseen(self._thread.calls.pop())

    def end_interrupted(self) -> None:
        """End the calls of this thread that Ctrl-C has ended, of which torch tells no hook, and the script went on."""
        calls = self._thread.calls
        had_begun = bool(calls)
        while calls and not _runs(calls[-1].frame):
            self._end_unseen(calls.pop())
        if had_begun and not calls:
            self._holder.abandon_pass()

    def _end_unseen(self, call: _Call) -> None:
        try:
            self._end(call, failed=True)
        except WeightsError:
            pass  # what ended the call was raised, or is being raised

    def _hook(self, name: str, module: nn.Module, groups: Sequence[ParamGroup], *, transformable: bool) -> None:
        def enter(called: nn.Module, _args: Any) -> None:
            _refuse_transforms(name, transformable=transformable)
            self.end_interrupted()
            calls = self._thread.calls
            call = _Call(called, sys._getframe(2), outermost=not calls)  # what calls the hook
            calls.append(call)
            try:
                if call.outermost:
                    self._holder.begin_call(called, call)
                for group in groups:
                    self._holder.hold(group)
                    call.groups.append(group)
                call.hooks.enter_context(self._holder.hooks(outermost=call.outermost))
            except BaseException:
                calls.remove(call)
                self._end(call, failed=True)
                raise

        def leave(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls = self._thread.calls
            error = sys.exc_info()[1]
            failed = output is None and error is not None
            if failed and calls and calls[0].module is called:
                self._holder.note_failure(called, (args, kwargs), error)
            while any(call.module is called for call in calls):
                call = calls.pop()
                self._end(call, failed=failed)
                if call.module is called:
                    return

        hooks = [_Hook(name, each, copies=self._holder.copies_modules) for each in (enter, leave)]
        self._removable.append(module.register_forward_pre_hook(hooks[0], prepend=True))
        self._removable.append(module.register_forward_hook(hooks[1], always_call=True, with_kwargs=True))

    def _end(self, call: _Call, *, failed: bool) -> None:
        call.hooks.close()
        try:
            self._holder.release(call.groups)
        finally:
            if call.outermost:
                self._holder.end_call(call, failed=failed)


def _runs(frame: FrameType) -> bool:
    """Whether this thread is within it."""
    within: FrameType | None = sys._getframe(1)
    while within is not None and within is not frame:
        within = within.f_back
    return within is not None


class _Hook:
    """A function that refuses, in words, to be pickled with the module it hangs on. In a copy of the module stands one
    that does nothing, or the copy is refused as well."""

    def __init__(
        self,
        name: str,
        function: Callable[[nn.Module, Any, Any, Any], None] | Callable[[nn.Module, Any], None],
        *,
        copies: bool,
    ) -> None:
        self._name, self._function, self._copies = name, function, copies

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> NoReturn:
        refuse_module_copy(self._name, "pickled", copies=self._copies)

    def __deepcopy__(self, _memo: Any) -> _Hook:
        if not self._copies:
            refuse_module_copy(self._name, "copied")
        return _Hook(self._name, _nothing, copies=True)


def _nothing(*_args: Any) -> None:
    """What hangs on a copy of a module, which is the user's own."""


class _UncountedHooks(OrderedDict[int, Any]):
    """A module's hooks, whose number is that of the user's: ours are called and not counted."""

    def __len__(self) -> int:
        return sum(not isinstance(hook, _Hook) for hook in self.values())

    def __bool__(self) -> bool:
        return any(True for _ in self)


def _hide_hooks(layer: nn.TransformerEncoderLayer) -> None:
    """The layer takes its fast path, whose bits are others, only where no part of it has a hook. Where the user has
    hung one there, its handle knows the dict that it is in, and plain torch leaves that path as well."""
    for module in modules(layer):
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if not getattr(module, name):
                setattr(module, name, _UncountedHooks())


def _refuse_transforms(name: str, *, transformable: bool) -> None:
    """Raises WeightsError for a module that is called to be traced: what is recorded would hold placeholders. A model
    whose weights all stay in memory is ``transformable`` by ``torch.func``, which keeps no modules."""
    if torch._C._get_tracing_state() is not None:
        raise WeightsError(
            name,
            "is traced by torch.jit, which would record placeholders for its weights",
            "load what engine.full_state_dict() returns into a model built anew, and trace that",
        )
    if torch.compiler.is_compiling() or _is_called_from_compiled_code():
        raise WeightsError(
            name,
            "holds sharded weights and is traced by torch.compile, whose graphs would keep their placeholders",
            "compile functions of activations instead, or remove torch.compile",
        )
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise WeightsError(
            name,
            "is traced by torch.fx, which would record placeholders for its weights",
            "load what engine.full_state_dict() returns into a model built anew, and trace that",
        )
    if not transformable and transforms.is_inside():
        raise WeightsError(name, f"is called {transforms.PROBLEM}", transforms.REMEDY)


@cache
def _hide_from_compiler() -> None:
    """What torch.compile finds of our own code it leaves to Python, where it is found out who calls: which of it can be
    traced, and what then becomes of a refusal, differs from release to release."""
    from torch._dynamo import trace_rules  # takes a second, and an engine comes later than ``import infinity``

    for package in ("infinity", "io_daemon"):
        trace_rules.add(package)


def _is_called_from_compiled_code() -> bool:
    """Whether a function that torch.compile has made is running in this thread, and has called us."""
    callback: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback not in (None, False)
