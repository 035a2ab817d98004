"""Monitors: figures of every step in TensorBoard, CSV files, or Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from infinity.config import Config
from infinity.config.observing import CsvMonitor, TensorBoard, Wandb
from infinity.errors import ConfigError
from infinity.observe.observer import Periodic, StepFacts, refused_as

_log = logging.getLogger(__name__)
Figures = dict[str, float]
"""Figures of one step by the dialect's names."""


def figures_of(facts: StepFacts) -> Figures:
    """What every monitor is told of a step."""
    figures: Figures = {}
    if facts.loss is not None:
        figures["Train/Samples/train_loss"] = facts.loss
    if facts.learning_rates:
        figures["Train/Samples/lr"] = facts.learning_rates[0]
    figures["Train/Samples/loss_scale"] = facts.loss_scale
    if facts.grad_norm is not None:
        figures["Train/Samples/grad_norm"] = facts.grad_norm
    for name, seconds in (("forward", facts.forward_s), ("backward", facts.backward_s), ("step", facts.update_s)):
        figures[f"Train/Samples/elapsed_time_ms_{name}"] = 1e3 * seconds
    return figures


class Monitor(Periodic):
    """Writes figures over the number of samples."""

    wants_loss = wants_times = True

    def note(self, facts: StepFacts) -> None:
        try:
            self.write(facts.samples, figures_of(facts))
        except OSError as error:  # the step is done, on this rank as on all
            _log.warning("figures of step %d are not written: %s", facts.step, error)

    def write(self, samples: int, figures: Figures) -> None:
        """Write one point of every figure."""
        raise NotImplementedError


class CsvFiles(Monitor):
    """A file a figure in ``output_path/job_name``, with the columns step (in samples) and value; appended to."""

    def __init__(self, every: int, directory: Path) -> None:
        super().__init__(every)
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, samples: int, figures: Figures) -> None:
        for name, value in figures.items():
            path = self._directory / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])


class TensorBoardFiles(Monitor):
    def __init__(self, every: int, directory: Path) -> None:
        super().__init__(every)
        writers = _package("torch.utils.tensorboard", "tensorboard.enabled", "tensorboard")
        self._writer: Any = writers.SummaryWriter(log_dir=str(directory))

    def write(self, samples: int, figures: Figures) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbRun(Monitor):
    def __init__(self, every: int, *, project: str, group: str | None, team: str | None) -> None:
        super().__init__(every)
        self._run: Any = _package("wandb", "wandb.enabled", "wandb").init(project=project, group=group, entity=team)

    def write(self, samples: int, figures: Figures) -> None:
        self._run.log(figures, step=samples)

    def close(self) -> None:
        self._run.finish()


def monitors_of(config: Config) -> list[Monitor]:
    """The monitors that the config asks for. Raises ConfigError where a package is missing."""
    return monitors_in(config.csv_monitor, config.tensorboard, config.wandb, 1)


def monitors_in(files: CsvMonitor, board: TensorBoard, wandb: Wandb, every: int = 0) -> list[Monitor]:
    """The monitors of three sections, told of every ``every``-th step."""
    monitors: list[Monitor] = []
    if files.enabled:
        with refused_as("csv_monitor.output_path", files.output_path):
            monitors.append(CsvFiles(every, Path(files.output_path) / files.job_name))
    if board.enabled:
        with refused_as("tensorboard.output_path", board.output_path):
            monitors.append(TensorBoardFiles(every, Path(board.output_path) / board.job_name))
    if wandb.enabled:
        monitors.append(WandbRun(every, project=wandb.project, group=wandb.group, team=wandb.team))
    return monitors


def _package(module: str, key: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(key, True, f"needs a package that is not here: pip install {package} ({error})") from error
