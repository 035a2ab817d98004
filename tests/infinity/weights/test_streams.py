"""The order of copies and computation, over streams that only take notes: there is no second timeline on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.weights.streams import CopyStream

LOG = list[str]


class NotedEvent:
    def __init__(self, name: str, log: LOG) -> None:
        self.is_reached, self._name, self._log = False, name, log

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self._log.append(f"the host waits for {self._name}")


class NotedStream:
    device = torch.device("cuda:1")

    def __init__(self, name: str, log: LOG) -> None:
        self._name, self._log = name, log
        self.events: list[NotedEvent] = []

    def wait_stream(self, other: Any) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def record_event(self) -> NotedEvent:
        self.events.append(NotedEvent(f"event {len(self.events)}", self._log))
        return self.events[-1]

    def __enter__(self) -> None:
        self._log.append(f"into {self._name}")

    def __exit__(self, *_: object) -> None:
        self._log.append(f"out of {self._name}")


class NotedTensor:
    def __init__(self, log: LOG) -> None:
        self._log = log

    def record_stream(self, stream: Any) -> None:
        self._log.append(f"the tensor is kept for {stream._name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LOG:
    noted: LOG = []
    monkeypatch.setattr(torch, "Stream", lambda device: NotedStream(f"copies to {device}", noted))
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: NotedStream(f"computing on {device}", noted)
    )
    return noted


def test_copies_begin_after_what_was_queued_and_computing_waits_for_them(log: LOG) -> None:
    copies = CopyStream(torch.device("cuda"))
    with copies.issue(after_current=True):
        log.append("copy")
    tensor: Any = NotedTensor(log)
    copies.join([tensor])
    assert log == [
        "copies to cuda waits for computing on cuda:1",
        "into copies to cuda",
        "copy",
        "out of copies to cuda",
        "computing on cuda:1 waits for copies to cuda",
        "the tensor is kept for computing on cuda:1",
    ]


def test_copies_to_fresh_memory_wait_for_nothing(log: LOG) -> None:
    copies = CopyStream(torch.device("cuda"))
    with copies.issue(after_current=False):
        log.append("copy")
    assert log == ["into copies to cuda", "copy", "out of copies to cuda"]


def test_the_host_is_held_back_while_too_much_of_what_it_gave_up_is_in_use(
    log: LOG, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing = NotedStream("computing", log)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: computing)
    copies = CopyStream(torch.device("cuda"))
    for numel in (5, 6, 7, 8):
        copies.note_given_up(numel)
    copies.limit(26)
    assert log == []
    copies.limit(20)
    assert log == ["the host waits for event 0", "the host waits for event 1"]
    copies.limit(-5)
    assert log[2:] == ["the host waits for event 2"], "the last may be computed with while the next ones come"
    copies.note_given_up(9)
    computing.events[3].is_reached = True
    copies.limit(100)
    copies.limit(8)
    assert log[3:] == ["the host waits for event 3"], "of what is reached the host lets go, which blocks nobody"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_is_one_timeline_elsewhere(device: str, log: LOG) -> None:
    copies = CopyStream(torch.device(device))
    with copies.issue(after_current=True):
        log.append("copy")
    copies.join()
    copies.note_given_up(5)
    copies.limit(0)
    assert not copies.is_beside
    assert log == ["copy"]
