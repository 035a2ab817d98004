"""The order of copies and computation, over streams that only take notes: there is no second timeline on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.weights.streams import CopyStream

LOG = list[str]


class NotedStream:
    def __init__(self, name: str, log: LOG) -> None:
        self._name, self._log = name, log

    def wait_stream(self, other: Any) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def synchronize(self) -> None:
        self._log.append(f"the host waits for {self._name}")

    def __enter__(self) -> None:
        self._log.append(f"into {self._name}")

    def __exit__(self, *_: object) -> None:
        self._log.append(f"out of {self._name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LOG:
    noted: LOG = []
    monkeypatch.setattr(torch, "Stream", lambda device: NotedStream(f"copies to {device}", noted))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: NotedStream("computing", noted))
    return noted


def test_copies_begin_after_what_was_queued_and_computing_waits_for_them(log: LOG) -> None:
    copies = CopyStream(torch.device("cuda"))
    with copies.issue():
        log.append("copy")
    copies.finish()
    copies.join()
    assert log == [
        "copies to cuda waits for computing",
        "into copies to cuda",
        "copy",
        "out of copies to cuda",
        "the host waits for copies to cuda",
        "computing waits for copies to cuda",
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_is_one_timeline_elsewhere(device: str, log: LOG) -> None:
    copies = CopyStream(torch.device(device))
    with copies.issue():
        log.append("copy")
    copies.finish()
    copies.join()
    assert log == ["copy"]
