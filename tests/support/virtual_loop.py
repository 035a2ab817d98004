"""An event loop whose time passes only while nobody has anything to do, and whose threads run on it, one after the
other: a program on it is a function of its seed."""

from __future__ import annotations

import asyncio
import functools
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualSelector(selectors.EpollSelector):
    """Descriptors are real; sleeping takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("nothing can happen any more, and somebody waits")
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``thread_s_max``: what is given to a thread is done at some moment up to so much later."""

    def __init__(self, rng: random.Random, thread_s_max: float = 0.002) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        self._rng = rng
        self._thread_s_max = thread_s_max

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(  # type: ignore[override]  # its callers name no more
        self, executor: None, func: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        self.call_later(self._rng.random() * self._thread_s_max, _perform, functools.partial(func, *args), done)
        return done


def _perform(work: Callable[[], T], done: asyncio.Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:  # as a thread's, it is for whoever waits
        if done.cancelled():
            raise  # nobody: it worked on what was taken away from it
        done.set_exception(error)
        del done  # else the error would hold this frame, and the frame the error
    else:
        if not done.cancelled():
            done.set_result(result)


def run(main: Coroutine[Any, Any, T], rng: random.Random) -> T:
    """Raises whatever goes wrong on the loop; AssertionError if it comes to wait for what cannot happen any more."""
    errors: list[BaseException] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        errors.append(context.get("exception") or AssertionError(context["message"]))

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(rng)) as runner:
        runner.get_loop().set_exception_handler(note)
        result = runner.run(main)
    if errors:
        raise errors[0]
    return result
