"""Calls of modules over a holder that only takes notes: who is held when, in whatever order calls begin and end."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.weights.holding import ModuleCalls


class NotedHolder:
    copies_modules = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fault_at = ""
        self.running: set[object] = set()

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what == self.fault_at:
            raise WeightsError("a", what, "none")

    def begin_call(self, module: nn.Module, call: object) -> None:
        self.running.add(call)
        self._note(f"begin {type(module).__name__}")

    def end_call(self, call: object, *, failed: bool) -> None:
        self.running.remove(call)
        self._note(f"end {'failed' if failed else 'well'}")

    def abandon_pass(self) -> None:
        self._note("abandon")

    def note_failure(self, module: nn.Module, inputs: object, error: BaseException | None) -> None:
        self.log.append(f"{type(module).__name__}{inputs} failed with {type(error).__name__}")

    def hold(self, group: Any) -> None:
        self._note(f"hold {group}")

    def release(self, groups: Sequence[Any]) -> None:
        self._note(f"release {' '.join(groups)}".rstrip())

    @contextmanager
    def hooks(self, *, outermost: bool) -> Iterator[None]:
        self._note(f"hooks {'outside' if outermost else 'inside'}")
        try:
            yield
        finally:
            self._note("no hooks")


class Part(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        if x == "explode":
            raise KeyError(x)
        return x if self.inner is None else self.inner(x)


class Outer(Part):
    """Has no weights of its own."""


def calls_of(holder: NotedHolder) -> tuple[ModuleCalls, Part, Part]:
    """An outer module without groups, a middle one without either, an inner one with two."""
    inner = Part()
    outer = Outer(nn.Sequential(inner))
    groups: dict[nn.Module, Any] = {inner: ["a", "b"]}
    noted: Any = holder
    return ModuleCalls(outer, groups, noted), outer, inner


WHOLE = [
    "begin Outer", "hooks outside", "hold a", "hold b", "hooks inside",
    "no hooks", "release a b", "no hooks", "release", "end well",
]  # fmt: skip


def test_what_a_module_needs_is_held_while_it_runs() -> None:
    holder = NotedHolder()
    _, outer, _ = calls_of(holder)
    assert outer(1) == 1
    assert holder.log == WHOLE
    holder.log.clear()
    assert outer(1) == 1
    assert holder.log == WHOLE


def test_hooks_of_the_users_that_were_there_before_run_while_it_is_held() -> None:
    holder = NotedHolder()
    inner = Part()
    inner.register_forward_pre_hook(lambda *_: holder.log.append("before"))
    inner.register_forward_hook(lambda *_: holder.log.append("after"))
    groups: dict[nn.Module, Any] = {inner: ["a"]}
    noted: Any = holder
    ModuleCalls(inner, groups, noted)
    inner(1)
    assert [each for each in holder.log if "hooks" not in each] == [
        "begin Part", "hold a", "before", "after", "release a", "end well",
    ]  # fmt: skip


def test_torchs_encoder_layer_sees_no_hooks_but_the_users() -> None:
    """It takes its fast path only where no part of it has any; for the user's plain torch leaves it, too."""
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    layer.linear1.register_forward_hook(lambda *_: None)
    groups: dict[nn.Module, Any] = {part: ["a"] for part in layer.modules()}
    noted: Any = NotedHolder()
    calls = ModuleCalls(nn.Sequential(layer), groups, noted)

    def counted() -> set[str]:
        """As torch counts them."""
        return {
            name for name, part in layer.named_modules() if len(part._forward_hooks) + len(part._forward_pre_hooks) > 0
        }

    assert counted() == {"linear1"}
    assert all(part._forward_pre_hooks for part in layer.modules()), "they are there and are called"
    calls.remove()
    assert counted() == {"linear1"}
    assert not any(part._forward_pre_hooks for part in layer.modules())


def test_a_part_may_be_called_from_outside() -> None:
    holder = NotedHolder()
    _, _, inner = calls_of(holder)
    inner(1)
    assert holder.log == ["begin Part", "hold a", "hold b", "hooks outside", "no hooks", "release a b", "end well"]


def test_a_call_that_returns_none_has_not_failed() -> None:
    holder = NotedHolder()
    _, outer, _ = calls_of(holder)
    assert outer(None) is None
    assert holder.log == WHOLE


def test_an_exception_ends_every_call() -> None:
    holder = NotedHolder()
    _, outer, _ = calls_of(holder)
    with pytest.raises(KeyError):
        outer("explode")
    noted = "Outer(('explode',), {}) failed with KeyError"
    assert holder.log == ["begin Outer", "hooks outside", noted, "no hooks", "release", "end failed"]
    holder.log.clear()
    outer(1)
    assert holder.log == WHOLE


@pytest.mark.parametrize("fault_at", ["hold b", "hooks inside", "hold a"])
def test_a_fault_on_the_way_in_releases_what_was_held(fault_at: str) -> None:
    holder = NotedHolder()
    _, outer, _ = calls_of(holder)
    holder.fault_at = fault_at
    with pytest.raises(WeightsError, match=fault_at):
        outer(1)
    held = {"hold a": "release", "hold b": "release a", "hooks inside": "release a b"}[fault_at]
    assert held in holder.log
    assert holder.log[-1] == "end failed"
    holder.fault_at = ""
    holder.log.clear()
    outer(1)
    assert holder.log == WHOLE


def test_a_fault_of_the_release_ends_the_call_all_the_same() -> None:
    holder = NotedHolder()
    _, _, inner = calls_of(holder)
    holder.fault_at = "release a b"
    with pytest.raises(WeightsError, match="release"):
        inner(1)
    assert holder.log[-1].startswith("end")
    holder.fault_at = ""
    holder.log.clear()
    inner(1)
    assert holder.log[0] == "begin Part", "it is the outermost again"


def test_calls_that_no_hook_has_ended_are_ended_with_the_one_around_them() -> None:
    """As when a pre-hook of the user's raises: torch calls nobody."""
    holder = NotedHolder()
    _, outer, inner = calls_of(holder)

    def refuse(_module: nn.Module, _args: Any) -> None:
        raise KeyError("user")

    handle = inner.register_forward_pre_hook(refuse)
    with pytest.raises(KeyError):
        outer(1)
    handle.remove()
    assert holder.log.count("release a b") == 1
    assert holder.log[-1] == "end failed"
    holder.log.clear()
    outer(1)
    assert holder.log == WHOLE


def test_forgotten_calls_are_ended_even_if_one_will_not() -> None:
    holder = NotedHolder()
    calls, _, inner = calls_of(holder)

    class Stop(BaseException):
        pass

    seen: list[str] = []

    def look(_module: nn.Module, _args: Any) -> None:
        holder.fault_at = "release a b"
        calls.forget()
        holder.fault_at = ""
        seen.extend(holder.log[-3:])

    handle = inner.register_forward_pre_hook(look)
    inner(1)
    handle.remove()
    assert seen == ["no hooks", "release a b", "end failed"]
    holder.log.clear()
    inner(1)
    assert holder.log[0] == "begin Part"


def test_threads_have_calls_of_their_own() -> None:
    holder = NotedHolder()
    _, _, inner = calls_of(holder)
    beginnings: list[int] = []

    def in_a_thread(_module: nn.Module, _args: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=inner, args=(1,))
        thread.start()
        thread.join()
        beginnings.append(holder.log.count("begin Part"))

    handle = inner.register_forward_pre_hook(in_a_thread)
    inner(1)
    assert beginnings == [2]
    assert holder.log.count("end well") == 2


def test_removed_hooks_are_gone() -> None:
    holder = NotedHolder()
    calls, outer, _ = calls_of(holder)
    calls.remove()
    calls.remove()
    outer(1)
    assert holder.log == []
    assert not outer._forward_pre_hooks
    assert not outer._forward_hooks


def test_a_module_with_hooks_is_neither_pickled_nor_copied() -> None:
    _, outer, inner = calls_of(NotedHolder())
    for module, name in ((outer, "Outer"), (inner, r"inner\.0")):
        with pytest.raises(WeightsError, match=rf"{name}.*pickled"):
            pickle.dumps(module)
        with pytest.raises(WeightsError, match=rf"{name}.*copied"):
            copy.deepcopy(module)


def test_transforms_of_functions_are_refused_before_anything_is_held() -> None:
    holder = NotedHolder()
    _, _, inner = calls_of(holder)
    with pytest.raises(WeightsError, match=r"inner\.0.*torch\.func"):
        torch.func.vmap(inner)(torch.ones(2, 2))
    assert holder.log == []


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_tracing_is_refused_before_anything_is_held() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    holder: Any = NotedHolder()
    module = Doubled()
    ModuleCalls(module, {}, holder)
    with pytest.raises(WeightsError, match=r"Doubled.*traced"):
        torch.jit.trace(module, torch.ones(2))  # type: ignore[no-untyped-call]
    assert holder.log == []


@pytest.mark.parametrize(
    ("fault_at", "expected"),
    [
        ("begin Outer", ["release", "end failed"]),  # Ctrl-C may come when all of it is done
        ("hooks outside", ["release", "end failed"]),
        ("hold a", ["release", "release", "end failed"]),
        ("hold b", ["release a", "release", "end failed"]),
        ("hooks inside", ["release a b", "release", "end failed"]),
    ],
)
def test_a_call_that_cannot_begin_ends_once_and_the_next_one_is_whole(fault_at: str, expected: list[str]) -> None:
    holder = NotedHolder()
    _, outer, _ = calls_of(holder)
    holder.fault_at = fault_at
    with pytest.raises(WeightsError):
        outer(1)
    ended = [what for what in holder.log if what.startswith(("release", "end"))]
    assert ended == expected
    holder.log, holder.fault_at = [], ""
    assert outer(1) == 1
    assert holder.log == WHOLE
