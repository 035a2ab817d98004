"""Sections that only look: what is logged, drawn, counted and timed while a model trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from infinity.config.section import NonEmpty, Positive, Section, as_tuple, lower, whole

LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lower)]


class TensorBoard(Section):
    """Scalars for TensorBoard, by the ``tensorboard`` package."""

    enabled: bool = False
    output_path: str = ""
    """Directory that holds the job's; "" is where the job runs."""
    job_name: NonEmpty = "DeepSpeedJobName"


class CsvMonitor(Section):
    """One CSV file a figure."""

    enabled: bool = False
    output_path: str = ""
    """Directory that holds the job's; "" is where the job runs."""
    job_name: NonEmpty = "DeepSpeedJobName"


class Wandb(Section):
    """Figures for Weights & Biases, by the ``wandb`` package."""

    enabled: bool = False
    group: NonEmpty | None = None
    team: NonEmpty | None = None
    project: NonEmpty = "deepspeed"


class FlopsProfiler(Section):
    """Counts the floating-point operations of one step's forward, by torch's counter."""

    enabled: bool = False
    profile_step: Positive = 1
    """The step, counted from 1, whose first forward is counted."""
    module_depth: Annotated[int, Field(ge=-1), BeforeValidator(whole)] = -1
    """Levels of modules in the table; -1 = all."""
    top_modules: Positive = 1
    """Modules named at every level, those with most operations first; ``detailed`` names all."""
    detailed: bool = True
    recompute_fwd_factor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The part of forward that backward computes again, counted with the step's operations."""
    output_file: NonEmpty | None = None
    """None: the table goes to the log."""


class ThroughputTimer(Section):
    """Samples a second, in the progress line."""

    enabled: bool = True
    synchronized: bool = True
    """The device is waited for where a period ends, every ``steps_per_print`` steps."""


class Timers(Section):
    throughput: ThroughputTimer = ThroughputTimer()


class CommsLogger(Section):
    """Counts collectives: how often, how many bytes, how long."""

    enabled: bool = False
    verbose: bool = False
    """Also log each one as it ends."""
    prof_all: bool = True
    prof_ops: Annotated[tuple[NonEmpty, ...], BeforeValidator(as_tuple)] = ()
    """The operations that are counted where ``prof_all`` is false."""
    debug: bool = False
    """Also say what each was for."""
