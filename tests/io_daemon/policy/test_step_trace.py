"""The file of ``--trace``: what is written is read, what is not one is refused, and gaps become work."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from io_daemon.errors import ConfigError
from io_daemon.policy.step_trace import StepTrace, load, save, shipped_names, work_before
from tests.support.small_step import FRAME_BYTES, RATES, small_step

SHIPPED_BYTES_MAX = 200_000


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    save(small_step(), path)
    assert load(str(path)) == small_step()
    before = path.read_bytes()
    save(small_step(), path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["gpt-168m", "llama-8b", "llama-70b", "llama-405b-4x8"])
def test_traces_ship_with_the_package(name: str) -> None:
    assert name in shipped_names()
    trace = load(name)
    assert any(trace.update_leases)
    # exact fp32 Adam with 16-bit weights and gradients: 16 bytes a parameter, and some padding
    assert 16 <= trace.num_nodes * trace.ranks_per_node * trace.swap_bytes / trace.num_params < 16.1


def test_shipped_traces_are_small() -> None:
    directory = Path(__file__).parents[3] / "io_daemon" / "bench" / "steps" / "traces"
    assert {path.name for path in directory.glob("*.json.gz") if path.stat().st_size > SHIPPED_BYTES_MAX} == set()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no step trace"),
        (b"hello", "no step trace"),
        (gzip.compress(b"{}"), "no step trace"),
        (gzip.compress(b"{}")[:-5], "no step trace"),
        (gzip.compress(b'{"format": "something else"}'), "format"),
    ],
    ids=["empty", "text", "nothing", "cut", "other"],
)
def test_other_files_are_refused_by_name(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=says) as caught:
        load(str(path))
    assert caught.value.value == str(path)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json.gz"
    path.write_bytes(b"")

    def refuse(_path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)") as caught:
        load(str(path))
    assert caught.value.value == str(path)


def test_an_unknown_name_lists_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="gpt-168m"):
        load("gpt-7t")


def test_a_trace_of_before_there_were_several_ranks_is_one_s(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    values = json.loads(small_step().model_dump_json())
    del values["num_nodes"], values["ranks_per_node"]
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    trace = load(str(path))
    assert (trace.num_nodes, trace.ranks_per_node) == (1, 1)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    values = json.loads(small_step().model_dump_json()) | {"version": 2}
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(ConfigError, match="version"):
        load(str(path))


@pytest.mark.parametrize(
    ("ops", "lease"),
    [
        ("wr", [0, 0]),
        ("awwr", [0, 0, 0, 0]),
        ("aw", [0, 0]),
        ("awrr", [0, 0, 0, 0]),
        ("arw", [0, 0, 0]),
        ("awr", [1, 1, 1]),
        ("awraw", [0, 0, 0, 0, 0]),
    ],
)
def test_events_out_of_turn_are_refused(ops: str, lease: list[int]) -> None:
    values = json.loads(small_step(1).model_dump_json())
    values["events"] = {"ops": ops, "lease": lease, "gap": [0.0] * len(ops)}
    values["leases"] = {name: column[:1] for name, column in values["leases"].items()}
    with pytest.raises(ValidationError):
        StepTrace.model_validate(values)


def test_a_lease_on_what_a_chunk_has_not_is_refused() -> None:
    values = json.loads(small_step(2).model_dump_json())
    values["leases"]["read"][0] = 1 << 7
    with pytest.raises(ValidationError, match="does not have"):
        StepTrace.model_validate(values)


def test_an_access_to_what_a_chunk_has_not_is_refused() -> None:
    """Of the trace that a rank would upload, which no lease need follow."""
    values = json.loads(small_step().model_dump_json())
    values["accesses"][0][0] = len(values["chunks"])
    with pytest.raises(ValidationError, match="access 0 of the trace"):
        StepTrace.model_validate(values)


def test_a_file_may_be_as_long_as_is_said_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json.gz"
    save(small_step(), path)
    num_bytes = len(gzip.decompress(path.read_bytes()))
    monkeypatch.setattr("io_daemon.policy.step_trace.TRACE_BYTES_MAX", num_bytes)
    assert load(str(path)) == small_step()
    monkeypatch.setattr("io_daemon.policy.step_trace.TRACE_BYTES_MAX", num_bytes - 1)
    with pytest.raises(ConfigError, match="unpacks to more"):
        load(str(path))


def test_gaps_become_a_pass_over_the_lease_and_arithmetic() -> None:
    trace = small_step(1, ahead=0, gap=1e-3)
    work = work_before(trace)
    assert len(work) == len(trace.events.ops) + 1
    # a w r: the work before the release is on the lease's frames, all other is arithmetic alone
    first, before_wait, before_release = work[:3]
    assert first.share == before_wait.share == 0
    assert first.flops == pytest.approx(1e-3 * RATES.flops)
    assert before_release.share == 1
    assert before_release.flops == pytest.approx((1e-3 - FRAME_BYTES / RATES.copied_bytes) * RATES.flops)


def test_a_short_gap_is_part_of_a_pass() -> None:
    pass_s = FRAME_BYTES / RATES.copied_bytes
    work = work_before(small_step(1, ahead=0, gap=pass_s / 4))
    assert work[2].share == pytest.approx(0.25)
    assert work[2].flops == 0


def test_without_seconds_frames_are_passed_over_once() -> None:
    work = work_before(small_step(1, ahead=0, gap=1e6, measured=False))
    assert [entry.share for entry in work[:3]] == [0, 0, 1]
    assert [entry.flops for entry in work[:3]] == [1e6] * 3
