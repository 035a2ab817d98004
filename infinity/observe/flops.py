"""The floating-point operations of one forward, by module: torch's counter, as the dialect's profiler prints it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infinity.config.observing import FlopsProfiler
from infinity.observe.observer import Observer, refused_as

UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3))
_log = logging.getLogger(__name__)


def _clock() -> float:
    """Where the device has done what was queued."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class FlopsOfAStep(Observer):
    """Counts the first forward of ``profile_step``."""

    def __init__(self, section: FlopsProfiler, model: nn.Module) -> None:
        self._section, self._done = section, False
        self._model_name = type(model).__name__
        if section.output_file is not None:
            with refused_as("flops_profiler.output_file", section.output_file):
                Path(section.output_file).parent.mkdir(parents=True, exist_ok=True)
                Path(section.output_file).open("a", encoding="utf-8").close()
        self._num_params = {name: _numel(module) for name, module in model.named_modules()}

    def around_forward(self, step: int) -> AbstractContextManager[object]:
        if self._done or step != self._section.profile_step:
            return nullcontext()
        self._done = True
        return self._counting()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        counter = FlopCounterMode(display=False)
        start_s = _clock()
        with counter:
            yield
        text = self._table(counter.get_flop_counts(), _clock() - start_s)
        if self._section.output_file is None:
            _log.info("%s", text)
            return
        try:
            Path(self._section.output_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            _log.warning("%s cannot be written: %s\n%s", self._section.output_file, error.strerror, text)

    def _table(self, counts: Mapping[str, Mapping[Any, int]], forward_s: float) -> str:
        flops = {name: sum(by_operator.values()) for name, by_operator in counts.items()}
        total = flops.pop("Global", 0)
        step_flops = total * (3 + self._section.recompute_fwd_factor)
        lines = [
            f"operations of one forward, step {self._section.profile_step} of {self._model_name}",
            f"  parameters:                  {_short(self._num_params[''])}",
            f"  forward:                     {_short(total)}FLOP in {1e3 * forward_s:.1f} ms",
            f"  forward, backward, again:    {_short(step_flops)}FLOP",
        ]
        by_depth: dict[int, list[tuple[int, str]]] = {}
        for name, count in flops.items():
            inner = name.partition(".")[2]  # torch begins every name with the model's class
            if inner:
                by_depth.setdefault(inner.count(".") + 1, []).append((count, inner))
        deepest = max(by_depth, default=0) if self._section.module_depth < 0 else self._section.module_depth
        for depth in range(1, deepest + 1):
            rows = sorted(by_depth.get(depth, ()), reverse=True)
            lines.append(f"  depth {depth}:")
            for count, name in rows if self._section.detailed else rows[: self._section.top_modules]:
                share = count / total if total else 0.0
                params = _short(self._num_params.get(name, 0))
                lines.append(f"    {name}: {_short(count)}FLOP ({share:.1%}), {params} parameters")
        return "\n".join(lines)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _short(count: float) -> str:
    for unit, size in UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} "
