"""The doctor names what is there, and a remedy for each no."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity.commands import doctor as doctor_module
from infinity.commands.doctor import Finding, Verdict, _huge_pages, doctor, examine
from io_daemon import _native
from io_daemon.machine.buffers import Buffers, open_buffers


def _by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_every_no_has_a_remedy(tmp_path: Path) -> None:
    findings = examine([str(tmp_path), "/nowhere"])
    assert all(finding.remedy for finding in findings if finding.verdict is not Verdict.OK)
    assert all(finding.value for finding in findings)
    assert len(_by_subject(findings)) == len(findings)


def test_a_loop_device_that_caches_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "cached_loops_below", lambda _: ["loop3"])
    finding = _by_subject(examine([str(tmp_path)]))[f"{tmp_path}: loop device loop3"]
    assert finding.verdict is Verdict.ABSENT
    assert finding.remedy == "losetup --direct-io=on /dev/loop3"


def test_engines_are_those_that_the_core_probes() -> None:
    findings = _by_subject(examine([]))
    for engine in ("io_uring", "libaio", "posix"):
        works = engine in _native.ENGINES and _native.probe_engine(engine) is None
        assert (findings[f"engine {engine}"].verdict is Verdict.OK) is works
    assert findings["engine posix"].verdict is Verdict.OK


def test_an_engine_that_the_kernel_forbids_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _native, "probe_engine", lambda engine: None if engine == "posix" else "Operation not permitted"
    )
    findings = _by_subject(examine([]))
    for engine in set(_native.ENGINES) - {"posix"}:
        finding = findings[f"engine {engine}"]
        assert (finding.verdict, finding.value) == (Verdict.ABSENT, "Operation not permitted")
        assert "next engine is used" in finding.remedy


def test_an_engine_that_was_not_compiled_in_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "ENGINES", ("posix",))
    findings = _by_subject(examine([]))
    assert "liburing-dev" in findings["engine io_uring"].remedy
    assert "libaio-dev" in findings["engine libaio"].remedy


def test_without_any_engine_it_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_native, "probe_engine", lambda _: "no")
    assert doctor([], as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_directory_on_a_disk(tmp_path: Path) -> None:
    findings = _by_subject(examine([str(tmp_path)]))
    assert {f"{tmp_path}: {what}" for what in ("filesystem", "O_DIRECT", "block device", "free space")} <= set(findings)


def test_a_directory_in_memory_fails(capsys: pytest.CaptureFixture[str]) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True, check=False).stdout
    if kind.strip() != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    assert doctor(["/dev/shm"], as_json=False) == 1
    assert "saves none" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("path", ["/nowhere", "/proc"])
def test_a_directory_that_cannot_hold_swap_files_fails(path: str) -> None:
    findings = _by_subject(examine([path]))
    assert findings[path].verdict is Verdict.FAILED
    assert doctor([path], as_json=True) == 1


def test_a_low_memlock_limit_says_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr("io_daemon.machine.facts._may_lock_all", lambda _: False)
    finding = _by_subject(examine([]))["memlock limit"]
    assert finding.verdict is Verdict.ABSENT
    assert "64 KiB" in finding.value
    assert "pin_memory" in finding.value
    assert "ulimit -l" in finding.remedy


@pytest.mark.parametrize(("files", "verdict"), [(20, Verdict.FAILED), (256, Verdict.ABSENT), (1024, Verdict.OK)])
def test_training_takes_more_than_a_few_open_files(
    files: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    assert _by_subject(examine([]))["open files limit"].verdict is verdict


@pytest.mark.parametrize(
    ("kernel", "shmem_enabled", "verdict", "words"),
    [
        ("6.1.0-18-amd64", "always within_size advise [never] deny force", Verdict.ABSENT, "vm/compact_memory"),
        ("6.18.44", "always within_size [advise] never deny force", Verdict.ABSENT, "vm/compact_memory"),
        ("5.15.0-generic", "always within_size advise [never] deny force", Verdict.ABSENT, "echo advise > "),
        ("5.15.0-generic", "always within_size [advise] never deny force", Verdict.OK, ""),
        ("6.8.0", None, Verdict.ABSENT, "CONFIG_TRANSPARENT_HUGEPAGE"),
        ("unknown", "always within_size advise [never] deny force", Verdict.ABSENT, "echo advise > "),
    ],
)
def test_refused_huge_pages_have_the_remedy_of_the_kernel(
    kernel: str, shmem_enabled: str | None, verdict: Verdict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def refused(num_bytes: int) -> Iterator[Buffers]:
        with open_buffers(num_bytes) as buffers:
            yield buffers._replace(has_huge_pages=False)

    monkeypatch.setattr("infinity.commands.doctor.open_buffers", refused)
    monkeypatch.setattr("infinity.commands.doctor.read_text", lambda _: shmem_enabled)
    finding = _huge_pages(kernel)
    assert finding.verdict is verdict
    assert words in finding.remedy


def test_no_memory_for_a_huge_page_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("io_daemon.machine.buffers.os.truncate", full)
    finding = _by_subject(examine([]))["huge pages for arenas"]
    assert finding.verdict is Verdict.FAILED
    assert "Cannot allocate memory" in finding.value
    assert finding.remedy


def test_the_table_and_the_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor([str(tmp_path)], as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert doctor([str(tmp_path)], as_json=False) == code
    shown = capsys.readouterr().out.replace("\n", "")
    assert "infinity doctor" in shown
    assert all(set(finding) == {"subject", "verdict", "value", "remedy"} for finding in report["findings"])


@pytest.mark.parametrize("version", ["2.8.1", "1.13.0+cu117"])
def test_a_torch_that_is_too_old_fails(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    finding = _by_subject(examine([]))["torch"]
    assert (finding.verdict, finding.value) == (Verdict.FAILED, version)
    assert "2.9" in finding.remedy


def test_an_io_core_that_cannot_be_loaded_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # the package keeps a reference of its own to the module
    monkeypatch.delattr("io_daemon._native")
    for name in ("_native", "disk.swap_dir", "disk.swap_file"):
        monkeypatch.delitem(sys.modules, f"io_daemon.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "io_daemon._native", None)
    findings = _by_subject(examine([str(tmp_path)]))
    assert findings["I/O core"].verdict is Verdict.FAILED
    assert "make build" in findings["I/O core"].remedy
    assert findings[str(tmp_path)].verdict is Verdict.FAILED


@pytest.mark.parametrize("name", ["[/x]", "[bold]y", ":fire:"])
def test_a_name_is_no_markup(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / name
    path.mkdir(parents=True)
    assert doctor([str(path)], as_json=False) == 0
    assert f"{path}: O_DIRECT" in capsys.readouterr().out
