"""One measurement: files laid out, brought up to speed, measured, verified."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Protocol

from io_daemon._native import Region
from io_daemon.bench.engines.engine import BlockEngine, Counters
from io_daemon.bench.engines.factory import open_engine
from io_daemon.bench.job import Job, WriteAllowance, buffer_bytes
from io_daemon.bench.latency import Latencies
from io_daemon.bench.result import IoResult, Verification
from io_daemon.bench.sample import Sample, cpu_between, cpu_seconds, direction_between, series_of
from io_daemon.bench.settings import IoSettings, check_limit, refused_buffers
from io_daemon.bench.steady import find_steady_state
from io_daemon.bench.target import Target
from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.errors import ConfigError, WorldError
from io_daemon.machine.facts import cached_loops_below
from io_daemon.machine.meminfo import available_bytes, ram_bytes

SAMPLES_MAX: Final = 1000
SAMPLE_INTERVAL_MIN_S: Final = 0.1
WATCH_INTERVAL_S: Final = 0.5
"""Errors are looked at this often, however long a sample is."""
JOIN_TIMEOUT_S: Final = 120.0


class Observer(Protocol):
    """Who is told how it goes."""

    def phase(self, name: str, total: float) -> None:
        """A part of the work begins: ``total`` bytes or seconds of it."""

    def progress(self, done: float) -> None:
        """So much of the phase is done."""

    def rate(self, read_bw_bytes: float, write_bw_bytes: float) -> None:
        """The rates of the last interval, bytes a second."""


class Silent:
    """An observer that says nothing."""

    def phase(self, name: str, total: float) -> None: ...
    def progress(self, done: float) -> None: ...
    def rate(self, read_bw_bytes: float, write_bw_bytes: float) -> None: ...


class NothingMeasured(ConfigError):  # noqa: N818 -- it is a ConfigError
    """No I/O fell into the measured time: there is no figure, and 0 GB/s would be an untrue one."""


def run_io(settings: IoSettings, observer: Observer | None = None) -> IoResult:
    """``bench io``. Raises ConfigError, SwapSpaceError, DeviceIOError; leaves no file behind."""
    observer = observer or Silent()
    check_limit(settings)
    with open_targets(settings) as targets, open_bench(settings, targets) as bench:
        bench.lay_out(observer)
        result = bench.measure(observer)
        verification = bench.verify(observer) if settings.verify else None
        for target in targets:
            target.refuse_removed()
    return result.model_copy(update={"verification": verification})


@contextmanager
def open_targets(settings: IoSettings) -> Iterator[list[Target]]:
    """Reserve a file for every job, ``numjobs`` in each directory, and remove them again, whatever happens."""
    directories = [check_swap_dir(path) for path in settings.directories]
    with ExitStack() as stack:
        targets: list[Target] = []
        for directory in directories:
            direct = settings.direct and directory.direct
            for _ in range(settings.numjobs):
                target = Target(directory, len(targets), settings.num_blocks * settings.bs, direct=direct)
                targets.append(stack.enter_context(target))
        yield targets


@contextmanager
def open_bench(settings: IoSettings, targets: Sequence[Target]) -> Iterator[Bench]:
    """Start an engine on each file."""
    check_memory(settings)
    with ExitStack() as stack:
        opener = _engine_opener(settings)
        allowance = WriteAllowance(settings.write_limit_bytes)
        jobs = [
            stack.enter_context(Job(settings, target, job, opener, allowance)) for job, target in enumerate(targets)
        ]
        yield Bench(settings, jobs, allowance)


def check_memory(settings: IoSettings, *, beside_bytes: int = 0) -> None:
    """Raises ConfigError if the buffers, and ``beside_bytes`` of another program, do not fit: the kernel would not
    refuse them but kill for them."""
    wanted_bytes = settings.num_all_jobs * buffer_bytes(settings) + beside_bytes
    there_bytes = available_bytes()
    if wanted_bytes > there_bytes:
        theirs = ", with those of fio," if beside_bytes else ""
        problem = (
            f"buffers{theirs} of {wanted_bytes / 1e9:.1f} GB, and {there_bytes / 1e9:.1f} GB of memory are available"
        )
        raise refused_buffers(settings, problem)


def _engine_opener(settings: IoSettings) -> Callable[[Target, Region], BlockEngine]:
    def open_on(target: Target, arena: Region) -> BlockEngine:
        return open_engine(
            settings.engine,
            fd=target.fd,
            arena=arena,
            bs=settings.bs,
            iodepth=settings.iodepth,
            path=str(target.path),
            memory=settings.memory,
            faults=settings.faults,
        )

    return open_on


def loop_warnings(directory: Path) -> list[str]:
    """One for each loop device below that makes figures the page cache's."""
    return [
        f"{directory}: lies on the loop device {name}, which reads and writes its file through the page cache, with "
        f"O_DIRECT or without: this measures memory as much as the drive; losetup --direct-io=on /dev/{name}"
        for name in cached_loops_below(directory)
    ]


def cache_warnings(settings: IoSettings, targets: Sequence[Target]) -> list[str]:
    """What keeps these figures from being the drive's."""
    warnings = list(dict.fromkeys(note for target in targets for note in target.directory.notes))
    for path in dict.fromkeys(target.directory.path for target in targets):
        warnings += loop_warnings(path)
    buffered = not all(target.direct for target in targets)
    if buffered and settings.layout_bytes < 2 * (of_ram := ram_bytes()):
        warnings.append(
            f"without direct I/O, {settings.layout_bytes / 1e9:.1f} GB in files fit into {of_ram / 1e9:.1f} GB of "
            "RAM: this measures the page cache as much as the drive; raise --size to twice the RAM"
        )
    return warnings


class Bench:
    """Jobs that can be measured again and again; made by ``open_bench``."""

    def __init__(self, settings: IoSettings, jobs: Sequence[Job], allowance: WriteAllowance) -> None:
        self.settings, self.jobs, self._allowance = settings, jobs, allowance

    @property
    def has_spent(self) -> bool:
        """Whether a measurement has ended early, since no more may be written."""
        return self._allowance.spent.is_set()

    def lay_out(self, observer: Observer) -> None:
        """Write every block once: a first write of reserved space is slower, and reads need something to read."""
        observer.phase("laying out", self.settings.layout_bytes)
        tally = Tally()
        self._run_to_end(
            lambda job, stopped: job.lay_out(tally.add, stopped.is_set), lambda: observer.progress(tally.total)
        )

    def measure(self, observer: Observer) -> IoResult:
        """Ramp, then the measured time. Raises NothingMeasured."""
        settings = self.settings
        self._drop_cache()
        with self._running(lambda job, stopped: job.load(stopped.is_set)) as still_works:
            observer.phase("ramp", settings.ramp_time_s)
            ramp = self._sample_for(settings.ramp_time_s, still_works, observer)
            had_spent = self.has_spent
            for job in self.jobs:
                job.engine.reset_latencies()
            observer.phase(settings.rw, settings.runtime_s)
            measured = self._sample_for(settings.runtime_s, still_works, observer)
            latencies, limit_warning = self._latencies(), self._limit_warning()
        series = series_of(ramp, measured)
        begin, end = measured[0], measured[-1]
        self._refuse_empty(begin, end, had_spent=had_spent)
        rates = [
            read + write
            for at_s, read, write in zip(series.at_s, series.read_bw_bytes, series.write_bw_bytes, strict=True)
            if at_s > 0
        ]
        return IoResult(
            engine=self.jobs[0].engine.name,
            direct=all(job.target.direct for job in self.jobs),
            measured_s=end.at_s - begin.at_s,
            read=direction_between(begin, end, latencies.read, write=False),
            write=direction_between(begin, end, latencies.write, write=True),
            cpu=cpu_between(begin, end),
            series=series,
            steady=find_steady_state(rates, (end.at_s - begin.at_s) / max(1, len(rates))),
            num_short_ios=end.counters.num_short - begin.counters.num_short,
            verification=None,
            warnings=cache_warnings(settings, [job.target for job in self.jobs])
            + self._memory_warning()
            + limit_warning,
        )

    def verify(self, observer: Observer) -> Verification:
        """Read every block back and compare it with what was written last."""
        observer.phase("verifying", self.settings.layout_bytes)
        self._drop_cache()
        begin = time.perf_counter()
        tally, found = Tally(), list[tuple[int, list[str]]]()
        self._run_to_end(
            lambda job, stopped: found.append(job.verify(tally.add, stopped.is_set)),
            lambda: observer.progress(tally.total),
        )
        return Verification(
            num_blocks=self.settings.num_blocks * len(found),
            num_bad_blocks=sum(num_bad for num_bad, _ in found),
            seconds=time.perf_counter() - begin,
            bad=[line for _, bad in found for line in bad],
        )

    def _drop_cache(self) -> None:
        for job in self.jobs:
            if not job.target.direct:
                job.target.drop_cache()

    def _run_to_end(self, work: Callable[[Job, threading.Event], None], tick: Callable[[], None]) -> None:
        with self._running(work) as still_works:
            while still_works():
                tick()
                time.sleep(SAMPLE_INTERVAL_MIN_S / 4)
            tick()

    @contextmanager
    def _running(self, work: Callable[[Job, threading.Event], None]) -> Iterator[Callable[[], bool]]:
        """Every job in a thread of its own. Yields a function that says whether any still works, and raises what one
        of them failed with. Leaving the context tells the jobs to stop and waits for them."""
        stopped = threading.Event()
        errors: list[BaseException] = []

        def run(job: Job) -> None:
            try:
                work(job, stopped)
            except BaseException as error:  # noqa: BLE001 (raised again by whoever waits)
                errors.append(error)
                stopped.set()

        threads = [threading.Thread(target=run, args=(job,), name=f"bench-{i}") for i, job in enumerate(self.jobs)]

        def still_works() -> bool:
            if errors:
                raise errors[0]
            return any(thread.is_alive() for thread in threads)

        try:
            for thread in threads:
                thread.start()
            yield still_works
        finally:
            stopped.set()
            deadline = time.monotonic() + JOIN_TIMEOUT_S
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join(max(0.0, deadline - time.monotonic()))
        if still_works():
            raise WorldError(f"I/O in flight has not ended within {JOIN_TIMEOUT_S:g} s of the end of the measurement")

    def _sample_for(self, seconds: float, still_works: Callable[[], bool], observer: Observer) -> list[Sample]:
        """Samples at equal intervals over so long, or until no more may be written."""
        interval_s = max(SAMPLE_INTERVAL_MIN_S, seconds / SAMPLES_MAX)
        samples = [self._sample()]
        begin_s = samples[0].at_s
        num_samples = max(1, round(seconds / interval_s)) if seconds > 0 else 0
        for number in range(1, num_samples + 1):
            within_limit = self._wait_until(begin_s + min(number * interval_s, seconds), still_works)
            samples.append(self._sample())
            self._report(samples, observer)
            if not within_limit:
                break
        return samples

    def _wait_until(self, at_s: float, still_works: Callable[[], bool]) -> bool:
        """False, and sooner, once no more may be written."""
        while True:
            still_works()
            left_s = at_s - time.perf_counter()
            if self._allowance.spent.wait(max(0.0, min(left_s, WATCH_INTERVAL_S))):
                return False
            if left_s <= 0:
                return True

    def _report(self, samples: Sequence[Sample], observer: Observer) -> None:
        before, after = samples[-2:]
        elapsed_s = after.at_s - before.at_s
        observer.progress(after.at_s - samples[0].at_s)
        observer.rate(
            (after.counters.read_bytes - before.counters.read_bytes) / elapsed_s,
            (after.counters.write_bytes - before.counters.write_bytes) / elapsed_s,
        )

    def _refuse_empty(self, begin: Sample, end: Sample, *, had_spent: bool) -> None:
        """Raises NothingMeasured. Past the limit the measured time is as short as it takes to see that, whatever
        ended in it."""
        limit_bytes, runtime_s = self.settings.write_limit_bytes, self.settings.runtime_s
        if had_spent:
            remedy = "the limit was reached before anything was measured: lower --size or --ramp-time, raise it, or say"
            raise NothingMeasured("write_limit", limit_bytes, f"{remedy} --yes")
        if begin.moved_bytes == end.moved_bytes:
            raise NothingMeasured("runtime", runtime_s, "no I/O ended in the measured time: measure for longer")

    def _memory_warning(self) -> list[str]:
        if all(job.has_huge_pages for job in self.jobs):
            return []
        return [
            "not all buffers lie in huge pages, which costs CPU and, on some drives, bandwidth: see `infinity doctor`"
        ]

    def _limit_warning(self) -> list[str]:
        limit_bytes = self.settings.write_limit_bytes
        if not self.has_spent:
            return []
        return [f"ended early: --write-limit of {limit_bytes / 1e9:g} GB was reached; raise it, or say --yes"]

    def _sample(self) -> Sample:
        counters = [job.engine.counters() for job in self.jobs]
        first, *rest = (job.engine.clat() for job in self.jobs)
        return Sample(
            time.perf_counter(),
            *cpu_seconds(),
            Counters(*(sum(column) for column in zip(*counters, strict=True))),
            sum(rest, first),
        )

    def _latencies(self) -> Latencies:
        first, *rest = (job.engine.latencies() for job in self.jobs)
        return sum(rest, first)


class Tally:
    """A total that several threads add to."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        with self._lock:
            self.total += amount
