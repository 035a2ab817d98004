"""What a measurement says, as frozen pydantic models: their JSON is the stable, documented output of ``--json``.

Sizes in bytes, rates in bytes a second, times in seconds but for latencies, which are nanoseconds. Fields are only
ever added; a change of meaning raises ``SCHEMA_VERSION``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from io_daemon.shared.record import Record

SCHEMA_VERSION: Final = 1


class LatencySummary(Record):
    """Nanoseconds, of every I/O of the measured time; percentiles to 1.6 %."""

    num_ios: int
    min_ns: int
    mean_ns: float
    p50_ns: int
    p99_ns: int
    p999_ns: int
    max_ns: int


class Direction(Record):
    """Reads or writes of the measured time, all jobs together."""

    io_bytes: int
    num_ios: int
    bw_bytes: float
    """Bytes a second."""
    iops: float
    slat: LatencySummary
    """This is the time from handing an I/O to the engine until the kernel has it."""
    clat: LatencySummary
    """This is the time from there until its completion was reaped."""
    lat: LatencySummary
    """Both."""


class TimeSeries(Record):
    """Rates over equal intervals, ramp included; negative times lie in the ramp."""

    interval_s: float
    at_s: list[float]
    """Middle of each interval, from the start of the measured time."""
    read_bw_bytes: list[float]
    write_bw_bytes: list[float]
    clat_p99_ns: list[int]


class SteadyState(Record):
    """Whether the rate settled: SNIA PTS's criterion, range within 20 % and slope within 10 % of the mean."""

    reached: bool
    begin_s: float | None
    """The rest of the measured time holds the criterion from here on."""
    bw_bytes: float | None
    """Mean rate from there on."""
    burst_bw_bytes: float | None
    """Mean rate before it, if there was a before."""


class Verification(Record):
    num_blocks: int
    num_bad_blocks: int
    seconds: float
    bad: list[str]
    """The first of them: file, offset, and what is wrong."""


class Cpu(Record):
    """CPU time of this process, all threads, over the measured time."""

    user_s: float
    system_s: float
    s_per_gb: float
    """CPU seconds for 10^9 bytes moved."""


class IoResult(Record):
    """One measurement of ``bench io``."""

    engine: str
    direct: bool
    measured_s: float
    read: Direction | None
    write: Direction | None
    cpu: Cpu
    series: TimeSeries
    steady: SteadyState
    num_short_ios: int
    """I/Os that moved fewer bytes than asked for and went on."""
    verification: Verification | None
    """None: switched off."""
    warnings: list[str]

    @property
    def has_bad_blocks(self) -> bool:
        return self.verification is not None and self.verification.num_bad_blocks > 0


class SweepCell(Record):
    engine: str
    bs: int
    iodepth: int
    score_bw_bytes: float
    """Bytes a second, reads and writes together at the training ratio; median of ``rounds``."""
    rounds: list[float]


class SweepFinalist(Record):
    engine: str
    bs: int
    iodepth: int
    step_s: float
    """Median of ``steps_s``."""
    steps_s: list[float]
    """One a turn: steps of the same index were taken one after another."""


class SweepReplay(Record):
    """The settings that bandwidth does not tell apart took a training step in turns, scaled and without arithmetic:
    only their order says something about a model."""

    trace: str
    state_bytes: int
    """The size of each one's swap files."""
    seconds: float
    finalists: list[SweepFinalist]
    """The shortest step first."""


class SweepResult(Record):
    """``io_daemon`` is a section that ``infinity config check`` accepts."""

    cells: list[SweepCell]
    """The best first."""
    chosen: SweepCell
    seconds: float
    """The search took this long, laying out and replaying included."""
    num_grid_cells: int
    replay: SweepReplay | None = None
    """None: bandwidth left a single setting, or a warning says why not."""
    confirmation: IoResult | None
    """The chosen setting measured for longer, and verified."""
    io_daemon: dict[str, Any]
    remembered_in: str | None
    warnings: list[str]


class ComparePair(Record):
    """One ABBA pair of runs in one setting. ``ours`` and ``fio`` name what ``metric`` counts."""

    ours: float
    fio: float


class CompareLine(Record):
    """One metric of one setting: pairs of ours and fio's, and fio against itself in the same run."""

    rw: str
    engine: str
    bs: int
    iodepth: int
    metric: Literal["bw_bytes", "clat_p50_ns", "clat_p99_ns", "cpu_s_per_gb"]
    pairs: list[ComparePair]
    ratio: float
    """Median of ours / fio."""
    fio_spread: tuple[float, float]
    """Lowest and highest ratio of two neighbouring fio runs."""
    inside: bool


class CompareResult(Record):
    lines: list[CompareLine]
    fio_version: str
    warnings: list[str]


class StepResult(Record):
    """What ``bench step`` predicts for the full model, from a replay that was scaled to the space given. Figures per
    step are of the full model, on this node: those of the median step, and for bytes the mean over the steps."""

    trace: str
    model: str
    num_params: int
    tokens_per_step: int | None
    """Tokens of the whole job, all nodes together."""
    num_nodes: int = 1
    """So many nodes train together; the drives' figures are of one."""
    ranks_per_node: int = 1
    node_tokens_per_step: int | None = None
    """Tokens of this node's ranks."""
    scale: float
    """Share of the model's state that was replayed."""
    num_steps: int
    num_warm_up_steps: int
    host_budget_bytes: int
    arena_bytes: int
    """The replay's arena."""
    engine: str
    bs: int
    iodepth: int
    """What the daemon used."""
    step_s: float
    steps_s: list[float]
    """The time of each measured step."""
    compute_s: float
    """Forward and backward beside the I/O, requests to the daemon included, stalls not."""
    update_s: float
    """The update, likewise."""
    stall_s: float
    """Blocked, waiting for the daemon. The three together make the step."""
    update_stall_s: float
    """The part of ``stall_s`` in the update."""
    stall_share: float
    read_bytes: int
    write_bytes: int
    bytes_per_day_written: float
    drive_life_days: float | None
    drive_life_note: str
    cpu_offload_step_s: float
    """The same step with its whole state in host memory and nothing beside it."""
    hidden_from_compute_s: float
    """Seconds of forward and backward from which on I/O costs less than 5 % of a step."""
    break_even_note: str
    warnings: list[str]


class Report(Record):
    """The envelope of every sub-command's JSON."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["io", "sweep", "step", "compare"]
    version: str
    """The version of this program."""
    started: str
    """ISO 8601, UTC."""
    command: list[str]
    settings: dict[str, Any]
    machine: dict[str, Any]
    """See ``machine.MachineFacts``."""
    result: Annotated[IoResult | SweepResult | CompareResult | StepResult, Field(union_mode="left_to_right")]
    advice: str
    """One plain sentence."""
