"""What looks on writes what was so, and changes no bit."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import infinity
from infinity.config.observing import CommsLogger, ThroughputTimer
from infinity.errors import ConfigError
from infinity.observe import breakdowns
from infinity.observe.comms import CommsLog
from infinity.observe.observer import Observer, Observers, StepFacts
from tests.support.ranks import run_ranks, run_script

MICRO, IN, HIDDEN, OUT = 2, 16, 32, 4


def train(num_steps: int = 2, **sections: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, OUT)))
    config: Mapping[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 1,
        **sections,
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    for step in range(2 * num_steps):
        engine.backward(engine(torch.full((MICRO, IN), 1.0 + step)).square().mean())
        engine.step()
    weights = engine.full_state_dict()
    engine.destroy()
    return weights


def test_csv_files_hold_the_figures_of_every_step(tmp_path: Path) -> None:
    """Also where progress is never printed, as Accelerate writes."""
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    weights = train(csv_monitor=section, steps_per_print=float("inf"))
    plain = train()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    files = {path.stem: list(csv.reader(path.read_text().splitlines())) for path in (tmp_path / "job").iterdir()}
    assert files["Train_Samples_lr"] == [["step", "lr"], ["4", "0.01"], ["8", "0.01"]]
    losses = [float(value) for _, value in files["Train_Samples_train_loss"][1:]]
    assert losses[0] == pytest.approx(_first_loss())
    assert all(float(value) > 0 for _, value in files["Train_Samples_elapsed_time_ms_forward"][1:])


def _first_loss() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, OUT)))
    with torch.no_grad():
        return sum(float(model(torch.full((MICRO, IN), 1.0 + n)).square().mean()) for n in range(2)) / 2


@pytest.mark.parametrize(
    ("section", "package"),
    [({"tensorboard": {"enabled": True}}, "torch.utils.tensorboard"), ({"wandb": {"enabled": True}}, "wandb")],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_package_is_named(section: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install"):
        train(**section)


def test_wandb_and_tensorboard_are_told_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By stand-ins with the interfaces of the packages, which need not be here."""
    told: list[tuple[str, Any]] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            told.append(("wandb", (step, figures["Train/Samples/lr"])))

        def finish(self) -> None:
            told.append(("wandb", "finished"))

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            told.append(("tensorboard", log_dir))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if name == "Train/Samples/lr":
                told.append(("tensorboard", (step, value)))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            told.append(("tensorboard", "finished"))

    wandb, board = ModuleType("wandb"), ModuleType("board")

    def init(**words: Any) -> Run:
        told.append(("wandb", words))
        return Run()

    vars(wandb)["init"] = init
    vars(board)["SummaryWriter"] = SummaryWriter
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    train(1, wandb={"enabled": True, "team": "t"}, tensorboard={"enabled": True, "output_path": str(tmp_path)})
    by_monitor = {name: [what for other, what in told if other == name] for name in ("wandb", "tensorboard")}
    assert by_monitor == {
        "wandb": [{"project": "deepspeed", "group": None, "entity": "t"}, (4, 0.01), "finished"],
        "tensorboard": [str(tmp_path / "DeepSpeedJobName"), (4, 0.01), "finished"],
    }


def test_an_observer_is_closed_once_where_initialize_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine closes it, and so does what cleans up behind a failed start."""
    closed: list[str] = []

    class Looker(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "broken":
                raise OSError("the disk is full")

    def fails(*_: Any, **__: Any) -> None:
        raise ConfigError("training_data", None, "cannot be dealt out")

    lookers = [Looker("first"), Looker("broken"), Looker("last")]
    monkeypatch.setattr("infinity.entry.monitors_of", lambda _: lookers[::2])
    monkeypatch.setattr("infinity.engine.facade.make_loader", fails)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError, match="cannot be dealt out"):
        infinity.initialize(model=nn.Linear(2, 2), config=config, training_data=TensorDataset(torch.zeros(1)))
    assert sorted(closed) == ["first", "last"]
    closed.clear()
    with pytest.raises(OSError, match="the disk is full"):
        Observers(lookers).close()
    assert sorted(closed) == ["broken", "first", "last"], "one that fails must not keep the others open"


def test_breakdowns_and_the_configuration_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infinity"):
        train(2, wall_clock_breakdown=True, memory_breakdown=True, dump_state=True, steps_per_print=2)
    text = caplog.text
    assert text.count("time (ms) | fwd:") == text.count("memory | process:") == 1
    assert '"gradient_accumulation_steps": 2' in text
    with caplog.at_level(logging.INFO, logger="infinity"):
        caplog.clear()
        train(2)
    assert "time (ms)" not in caplog.text


ASKED = """
import json, logging, sys
import torch
import infinity

def train(**asked):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    sections = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    engine, *_ = infinity.initialize(model=model, config=sections | asked)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.destroy()

train()
print("nothing is asked for")
train(**json.loads(sys.argv[1]))
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
train(**json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"wall_clock_breakdown": True, "steps_per_print": 1}, "time (ms) | fwd:"),
        ({"memory_breakdown": True, "steps_per_print": 1}, "memory | process:"),
        ({"steps_per_print": 1}, "step 1, lr [0.001]"),
        ({"dump_state": True}, "the configuration: {"),
        ({"flops_profiler": {"enabled": True}}, "operations of one forward"),
        ({"log_level": "info", "steps_per_print": 1, "dump_state": True}, "step 1, lr [0.001]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_lines_that_are_asked_for_are_printed_unless_the_script_logs(asked: Any, line: str, tmp_path: Path) -> None:
    ended = run_script(ASKED, tmp_path, json.dumps(asked))
    assert ended.code == 0, ended.errors
    assert ended.output.startswith("nothing is asked for")
    assert ended.output.count(line) == ended.errors.count(line) == 1


WARNED = """
import logging
import torch
import infinity

config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "log_level": "info"}
engine, *_ = infinity.initialize(model=torch.nn.Linear(4, 4), config=config)
logging.getLogger("infinity.a_part").info("all is well")
logging.getLogger("infinity.a_part").warning("beware")
"""


def test_a_warning_goes_where_logging_puts_it(tmp_path: Path) -> None:
    ended = run_script(WARNED, tmp_path)
    assert ended.code == 0, ended.errors
    assert (ended.output.count("all is well"), ended.errors.count("all is well")) == (1, 0)
    assert (ended.output.count("beware"), ended.errors.count("beware")) == (0, 1)


UNWRITABLE = """
import json, sys, time
import torch
import infinity

config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
try:
    infinity.initialize(model=torch.nn.Linear(4, 4), config=config | json.loads(sys.argv[1]))
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
    time.sleep(1)  # the other rank hears of it from a rank that goes on
"""


@pytest.mark.parametrize(("section", "key"), [("csv_monitor", "output_path"), ("flops_profiler", "output_file")])
def test_what_cannot_be_written_is_refused_on_all_ranks(section: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "below")
    config = json.dumps({section: {"enabled": True, key: below}})
    first, other = (each.answer for each in run_ranks(UNWRITABLE, tmp_path, num_ranks=2, words=[config]))
    assert first.startswith(f"ConfigError: {section}.{key} = {below!r}: cannot be written: ")
    assert other == f"WorldError: rank 0 failed: {first}"


def test_operations_are_written_into_a_directory_that_is_made(tmp_path: Path) -> None:
    file = tmp_path / "made" / "here" / "flops.txt"
    train(1, flops_profiler={"enabled": True, "output_file": str(file)})
    assert "operations of one forward" in file.read_text()


def test_a_full_disk_ends_no_training(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The step is done on all ranks by then."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_lr.csv").symlink_to("/dev/full")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    weights, plain = train(csv_monitor=section), train()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert [each for each in caplog.messages if "figures of step 1 are not written: " in each and "space" in each]


@pytest.mark.parametrize("enabled", [True, False])
def test_samples_a_second_are_of_the_steps_since_the_last_line(
    enabled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four samples a step, and half a second between two looks at the clock."""
    looks = itertools.count()
    monkeypatch.setattr(breakdowns, "time", SimpleNamespace(perf_counter=lambda: next(looks) / 2))
    with caplog.at_level(logging.INFO, logger="infinity.observe"):
        train(6, steps_per_print=2, timers={"throughput": {"enabled": enabled}})
    ends = [record.getMessage().rpartition(" s")[2] for record in caplog.records if "lr [" in record.getMessage()]
    said = [record.getMessage().rpartition(", ")[2] for record in caplog.records if "lr [" in record.getMessage()]
    assert len(ends) == 3
    if enabled:
        assert said == ["8.0 samples/s", "16.0 samples/s", "16.0 samples/s"]
    else:
        assert ends == ["", "", ""]


def test_a_loaded_past_begins_the_throughput_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    monkeypatch.setattr(breakdowns, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
    progress = breakdowns.Progress(1, ThroughputTimer(), torch.device("cpu"))
    with caplog.at_level(logging.INFO, logger="infinity.observe"):
        for step in (1, 2, 50, 51):
            progress.after_step(_facts(step))
    said = [record.getMessage().rpartition(", ")[2] for record in caplog.records]
    assert [" samples/s" in line for line in said] == [False, True, False, True]


@pytest.mark.parametrize("synchronized", [True, False])
def test_the_device_is_waited_for_where_that_is_asked_for(synchronized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    cuda = torch.device("cuda", 0)
    progress = breakdowns.Progress(2, ThroughputTimer(synchronized=synchronized), cuda)
    for step in range(1, 5):
        progress.after_step(_facts(step))
    assert waited == [cuda] * (3 if synchronized else 0), "once after the first step, then at every line"


def _facts(step: int) -> StepFacts:
    seconds = dict.fromkeys(("forward_s", "backward_s", "update_s"), 1.0)
    return StepFacts(
        step=step, samples=4 * step, loss=None, learning_rates=(0.1,), loss_scale=1.0, grad_norm=None, **seconds
    )


def test_the_level_of_the_logs_is_the_configurations() -> None:
    logs = [logging.getLogger(name) for name in ("infinity", "io_daemon")]
    before = [log.level for log in logs]
    try:
        train(1, log_level="ERROR")
        assert [log.level for log in logs] == [logging.ERROR] * 2
        train(1)
        assert [log.level for log in logs] == [logging.ERROR] * 2, "unsaid it stays"
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


def test_operations_of_one_forward_are_counted_by_module(tmp_path: Path) -> None:
    table = tmp_path / "flops.txt"
    train(3, flops_profiler={"enabled": True, "profile_step": 2, "output_file": str(table), "recompute_fwd_factor": 1})
    text = table.read_text()
    first, second = 2 * MICRO * IN * HIDDEN, 2 * MICRO * HIDDEN * OUT
    assert f"{first / 1e3:.2f} KFLOP" in text
    assert f"1.1: {second:.0f} FLOP" in text
    assert f"{4 * (first + second) / 1e3:.2f} KFLOP" in text
    assert "step 2 of Sequential" in text


def test_collectives_are_counted_on_every_rank(tmp_path: Path) -> None:
    code = """
    import json, torch, infinity
    from torch import nn
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=nn.Linear(64, 64), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_gather", "reduce_scatter"]},
    })
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
    print(json.dumps(engine.comms_summary().splitlines()))
    """
    for rank in run_ranks(code, tmp_path, num_ranks=2):
        lines = [line.split() for line in rank.answer[1:]]
        counts = {line[0]: int(line[2]) for line in lines}
        assert set(counts) == {"all_gather", "reduce_scatter"}
        assert counts["reduce_scatter"] == 3 <= counts["all_gather"]


def test_each_collective_is_logged_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    log = CommsLog(CommsLogger(enabled=True, verbose=True, debug=True))
    with caplog.at_level(logging.INFO, logger="infinity"), log.timed("broadcast", 128, "share the weather"):
        pass
    assert "broadcast | 128 bytes" in caplog.text
    assert "share the weather" in caplog.text
    assert "broadcast" in log.summary()


def test_the_loss_of_micro_batches_that_were_dropped_is_not_told(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    }
    engine = infinity.initialize(model=nn.Linear(IN, OUT), config=config)[0]
    loss = torch.zeros(())
    for scale in (1000, None, 1, 1):
        if scale is None:
            engine.zero_grad()
            continue
        loss = engine(torch.ones(MICRO, IN)).square().mean()
        engine.backward(loss * scale)
        engine.step()
    engine.destroy()
    (path,) = (tmp_path / "job").glob("*train_loss*")
    rows = list(csv.reader(path.read_text().splitlines()))
    assert float(rows[1][1]) == pytest.approx(float(loss.detach()))


def test_a_line_has_few_of_the_rates_of_a_hundred_thousand_groups(caplog: pytest.LogCaptureFixture) -> None:
    progress = breakdowns.Progress(1, ThroughputTimer(), torch.device("cpu"))
    with caplog.at_level(logging.INFO, "infinity"):
        for num_groups in (2, 100_000):
            rates = tuple(float(number) for number in range(num_groups))
            progress.after_step(
                StepFacts(
                    step=1, samples=1, loss=None, learning_rates=rates, loss_scale=1.0, grad_norm=None,
                    forward_s=1.0, backward_s=1.0, update_s=1.0,
                )
            )  # fmt: skip
    few, many = (record.getMessage() for record in caplog.records)
    assert "lr [0.0, 1.0], " in few
    assert "14.0, 15.0] and 99984 more, " in many
