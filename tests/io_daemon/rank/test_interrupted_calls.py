"""Calls of a client that a signal interrupts, and calls that a signal's handler makes within them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from io_daemon.errors import DaemonLostError, WorldError
from io_daemon.rank.client import Client
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, specs


@contextmanager
def handling(handler: Callable[..., None]) -> Iterator[None]:
    """SIGUSR1 is handled so. (Ctrl-C is ignored where tests run in a script's background.)"""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def when_asked(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes once, when the next question has been asked and its answer is waited for."""
    channel = client._connection._channel
    receive = channel.receive

    def interrupted(**arguments: Any) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return receive(**arguments)

    monkeypatch.setattr(channel, "receive", interrupted)


def test_an_answer_that_nobody_waited_for_is_nobody_elses(
    daemon: ServedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with daemon.attached() as client, handling(interrupt):
        when_asked(client, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            client.register(specs(3))
        with pytest.raises(DaemonLostError, match="`register` of the I/O daemon was broken off by KeyboardInterrupt"):
            client.register(specs(5))
        with pytest.raises(DaemonLostError, match="broken off"):
            client.acquire(0, write=WEIGHT)


def test_a_handler_that_asks_within_a_question_is_refused(
    daemon: ServedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[WorldError] = []

    def ask(*_: object) -> None:
        with pytest.raises(WorldError, match="a signal's handler") as caught:
            client.stats()
        refused.append(caught.value)

    with daemon.attached() as client, handling(ask):
        when_asked(client, monkeypatch)
        assert client.stats().num_chunks == 0
        assert len(refused) == 1
        assert len(client.register(specs(2))) == 2, "each question had its own answer"


def test_a_handler_that_submits_within_a_submission_is_refused(daemon: ServedDaemon) -> None:
    refused: list[WorldError] = []

    def submit(*_: object) -> None:
        with pytest.raises(WorldError, match="a signal's handler") as caught:
            client.acquire(1, write=WEIGHT)
        refused.append(caught.value)

    class Interrupted:
        """A ring on which a signal comes before the first entry is there."""

        def push(self, *entry: int) -> bool:
            client._sq = ring
            signal.raise_signal(signal.SIGUSR1)
            return ring.push(*entry)

    with daemon.attached() as client, handling(submit):
        client.register(specs(2))
        ring = client._sq
        client._sq = Interrupted()  # type: ignore[assignment]
        leases = [client.acquire(0, write=WEIGHT), client.acquire(1, write=WEIGHT)]
        assert len(refused) == 1
        for lease in leases:
            client.wait(lease, DEADLINE_S)
            client.release(lease, dirty=WEIGHT)
