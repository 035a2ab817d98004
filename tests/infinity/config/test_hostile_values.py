"""Values and files that no editor warns of: too large, too deep, no text, no path. Each refusal can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.config import parse_config
from infinity.errors import ConfigError
from infinity.files.place import local_path

SMALLEST: dict[str, Any] = {"train_batch_size": 1}
HUGE = 10**5000
"""More digits than Python writes."""


def _refusal(config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    text = str(caught.value)
    assert len(text.encode()) < 2000, "it is read in a terminal"
    assert text.count("\n") == 0
    return caught.value


def _offload(path: object) -> dict[str, Any]:
    section = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": path}}
    return {**SMALLEST, "zero_optimization": section}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("gradient_clipping", HUGE, "must be a valid number"),
        ("train_batch_size", HUGE, "at most 9223372036854775807"),
        ("gradient_accumulation_steps", HUGE, "at most 9223372036854775807"),
        ("gradient_clipping", "x" * 100_000, "must be a valid number"),
        ("steps_per_print", [[1] * 10_000] * 10, "must be a valid integer"),
        ("x" * 100_000, 1, "unknown key"),
        ("", 1, "unknown key"),
        ("a\nb", 1, "unknown key"),
        ("\ud800", 1, "unknown key"),
        ("io_daemon", {"socket": "/tmp/a\0b"}, "no NUL character"),
        ("io_daemon", {"socket": ""}, "must have at least 1 character"),
        ("io_daemon", {"swap_dirs": ["/tmp\0"]}, "no NUL character"),
        ("io_daemon", {"swap_dirs": "/tmp"}, "must be a list"),
        ("aio", {"block_size": float("nan")}, "must be a valid integer"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_value_of_any_size_is_refused_in_a_line(key: Any, value: Any, words: str) -> None:
    assert words in _refusal({**SMALLEST, key: value}).remedy


def test_a_number_in_quotes_where_auto_may_stand_is_told_once() -> None:
    remedy = _refusal({**SMALLEST, "io_daemon": {"block_size": "65536"}}).remedy
    assert remedy == "must be a valid integer: write 65536 without quotes; or must be 'auto'"


def test_a_value_that_holds_itself_is_refused() -> None:
    section: dict[str, Any] = {"stage": 3}
    section["stage_"] = section
    assert "unknown key" in _refusal({**SMALLEST, "zero_optimization": section}).remedy


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("~/swap", "~ and $ stand for nothing here"),
        ("$SCRATCH/swap", "~ and $ stand for nothing here"),
        ("sub/swap", "mkdir -p sub/swap, in the working directory"),
        ("here/a b", "mkdir -p 'here/a b'"),
        ("file/swap", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 5000, "File name too long"),
        ("dangling", "is a link to nowhere, which does not exist"),
    ],
)
def test_of_a_swap_directory_that_is_none_the_remedy_helps(
    path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere")
    error = _refusal(_offload(path))
    assert (error.key, error.value) == ("zero_optimization.offload_param.nvme_path", path)
    assert words in error.remedy


def test_a_working_directory_that_is_gone_is_told(gone_directory: None) -> None:
    error = _refusal(_offload("swap"))
    assert (error.key, error.value) == ("zero_optimization.offload_param.nvme_path", "swap")
    assert "the current directory is gone" in error.remedy
    with pytest.raises(ConfigError, match="save_dir = 'saved': the current directory is gone"):
        local_path("save_dir", "saved")


@pytest.mark.parametrize("name", ["with space", "ünïcode", "quote'd", "a\nline"])
def test_a_swap_directory_may_have_any_name(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    directory.mkdir()
    (tmp_path / "link").symlink_to(directory)
    for path in (directory, tmp_path / "link"):
        assert parse_config(_offload(str(path))).swap_dirs == (directory,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON: Expecting value: line 1 column 1"),
        (json.dumps(SMALLEST).encode("utf-16"), "is not JSON in UTF-8"),
        ('{"é": 1}'.encode("latin1"), "save it in that encoding"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deeply"),
        (b'{"train_batch_size":' + b"1" * 6000 + b"}", "digits"),
        (b'{"train_batch_size": 1}\0', "Extra data"),
    ],
)
def test_files_that_are_no_text(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    error = _refusal(file)
    assert (error.key, error.value) == ("config", str(file))
    assert words in error.remedy


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALLEST).encode())
    assert parse_config(file) == parse_config(SMALLEST)


def test_paths_that_no_file_can_have() -> None:
    assert "cannot be read" in _refusal("a\0b").remedy
    assert "cannot be read" in _refusal("\ud800").remedy
