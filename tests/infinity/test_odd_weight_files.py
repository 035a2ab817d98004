"""Files of weights as they are found and as they are left: beside others, of odd contents, in great number."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, WeightsFileError
from infinity.files.directory import WeightsDirectory
from infinity.files.entry import Entry
from infinity.files.export import Export
from infinity.files.torch_file import MAPPED_BYTES_MAX, TorchFile
from tests.support.resumed import config_of


def config() -> dict[str, Any]:
    found = config_of()
    del found["scheduler"]
    return found


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(16, 16)


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        ({"weight": ONE, "bias": ONE}, 8),
        ({"weight": ONE, "bias": {**ONE, "data_offsets": [16, 24]}}, 24),
        ({"weight": ONE}, 9),
        ({"weight": ONE, "bias": {**ONE, "data_offsets": [4, 12]}}, 12),
    ],
    ids=["two in one place", "a hole", "more bytes", "overlapping"],
)
def test_places_that_are_not_one_behind_another_are_refused(
    header: dict[str, Any], num_bytes: int, tmp_path: Path
) -> None:
    """As safetensors refuses them."""
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    with pytest.raises(WeightsFileError, match=r"model\.safetensors is damaged"):
        WeightsDirectory(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (Tensor.to_sparse, "sparse"),
        (lambda value: value.to("meta"), "on the meta device"),
        (lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_what_is_no_dense_tensor_is_named(spoil: Callable[[Tensor], Tensor], words: str, tmp_path: Path) -> None:
    state = linear().state_dict()
    torch.save({**state, "weight": spoil(state["weight"])}, tmp_path / "pytorch_model.bin")
    model = linear(1)
    with pytest.raises(WeightsFileError, match=f"weight, which is {words}|cannot be read"):
        infinity.load_pretrained(model, tmp_path)
    assert torch.equal(model.bias, linear(1).bias)


def test_flipped_bytes_of_torchs_files_are_read_or_refused(tmp_path: Path) -> None:
    torch.save(linear().state_dict(), tmp_path / "whole.bin")
    data, chance = (tmp_path / "whole.bin").read_bytes(), random.Random(3)
    num_refused = 0
    for _ in range(150):
        bad = bytearray(data)
        for _ in range(chance.choice((1, 4))):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        (tmp_path / "bad.bin").write_bytes(bad)
        try:
            files = WeightsDirectory(tmp_path / "bad.bin")
            for name, entry in files.entries.items():
                files.read(name, 0, entry.numel)
        except WeightsFileError as error:
            assert "bad.bin" in str(error)
            num_refused += 1
    assert 5 < num_refused < 150


def test_a_promise_is_kept_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = linear().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        model = nn.Linear(16, 16)
    infinity.load_pretrained(model, ".")
    monkeypatch.chdir("/")
    with infinity.initialize(model=model, config=config())[0] as engine:
        assert all(torch.equal(value, state[name]) for name, value in engine.full_state_dict().items())


def test_torchs_files_are_not_written_where_readers_would_take_others(tmp_path: Path) -> None:
    engine = infinity.initialize(model=linear(), config=config())[0]
    engine.save_16bit_model(tmp_path)
    engine.backward(engine(torch.ones(4, 16)).sum())
    engine.step()
    with pytest.raises(WeightsFileError, match=r"model\.safetensors is there, and readers take it before"):
        engine.save_16bit_model(tmp_path, safe_serialization=False)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    engine.save_16bit_model(tmp_path, "beside.bin")
    engine.save_16bit_model(tmp_path / "torch", safe_serialization=False)
    engine.save_16bit_model(tmp_path / "torch")
    for path in (tmp_path / "beside.bin", tmp_path / "torch", tmp_path / "torch" / "pytorch_model.bin"):
        model = linear(1)
        infinity.load_pretrained(model, path)
        assert torch.equal(model.weight, engine.full_state_dict()["weight"])
    engine.destroy()


def test_what_is_no_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with infinity.initialize(model=linear(), config=config())[0] as engine:
        bad: tuple[Any, ...] = (None, b"bytes", "", "a\0b", "s3://bucket/run")
        for given in bad:
            with pytest.raises(ConfigError, match="save_dir"):
                engine.save_16bit_model(given)
            with pytest.raises(ConfigError, match="source"):
                infinity.load_pretrained(engine, given)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["../x.bin", "a/x.bin", "", ".", "..", "a\0b", 5])
def test_what_is_no_name_of_a_file_is_refused(name: Any, tmp_path: Path) -> None:
    with (
        infinity.initialize(model=linear(), config=config())[0] as engine,
        pytest.raises(ConfigError, match="one file"),
    ):
        engine.save_16bit_model(tmp_path / "out", name)
    assert not os.listdir(tmp_path)


def test_a_name_that_torch_cannot_take_is_told(tmp_path: Path) -> None:
    engine = infinity.initialize(model=linear(), config=config())[0]
    with engine, pytest.raises(WeightsFileError, match="invalid file name"):
        engine.save_16bit_model(tmp_path, ".hidden")
    assert not os.listdir(tmp_path)


def test_where_new_tensors_go_changes_nothing(tmp_path: Path) -> None:
    model = linear(1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with infinity.initialize(model=model, config=config())[0] as engine:
        for safe in (True, False):
            with torch.device("meta"):
                engine.save_16bit_model(tmp_path / str(safe), safe_serialization=safe)
                infinity.load_pretrained(engine, tmp_path / str(safe))
            plain = linear(2)
            with torch.device("meta"):
                infinity.load_pretrained(plain, tmp_path / str(safe))
            assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
            assert all(torch.equal(value, state[name]) for name, value in engine.full_state_dict().items())


def test_names_of_one_parameter_are_compared_bit_for_bit(tmp_path: Path) -> None:
    first, second = linear(), linear()
    second.weight = first.weight
    model, names = nn.Sequential(first, second), "names"
    nan = torch.full((16, 16), torch.nan)
    state = {f"{i}.{name}": value for i in range(2) for name, value in {"weight": nan, "bias": torch.ones(16)}.items()}
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors")
    infinity.load_pretrained(model, tmp_path)
    assert bool(first.weight.isnan().all())
    with pytest.raises(ConfigError, match="rename"):
        infinity.load_pretrained(model, tmp_path, rename=names)  # type: ignore[arg-type]


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    model = linear()
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    with infinity.initialize(model=model, config=config())[0] as engine:
        with pytest.raises(WeightsFileError, match=r"phase.*complex128.*safe_serialization=False"):
            engine.save_16bit_model(tmp_path)
        assert not os.listdir(tmp_path)
        engine.save_16bit_model(tmp_path, safe_serialization=False)
    assert torch.load(tmp_path / "pytorch_model.bin")["phase"].dtype is torch.complex128


@pytest.mark.parametrize("safe", [True, False])
def test_there_may_be_more_files_than_descriptors(safe: bool, tmp_path: Path) -> None:
    entries = {f"t{number}": Entry(dtype=torch.float32, shape=(5,)) for number in range(200)}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, limits[1]))
    try:
        with Export(tmp_path, entries, safe=safe, max_shard_bytes=20) as made:
            for first in (0, 3):  # the second time in another order
                for number in sorted(range(200), reverse=bool(first)):
                    made.write(f"t{number}", first, torch.full((3 if first == 0 else 2,), float(number)))
            made.publish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    found = WeightsDirectory(tmp_path)
    assert len(os.listdir(tmp_path)) == 201
    assert all(found.read(f"t{number}", 0, 5).eq(number).all() for number in range(200))


def test_what_was_read_of_a_file_does_not_stay_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    numel = MAPPED_BYTES_MAX // 4
    torch.save({"weight": torch.ones(4 * numel)}, path)
    file = TorchFile(str(path))

    def mapped_bytes() -> int:
        found, rss = False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line[0].isdigit() or line[0] in "abcdef":
                found = line.endswith(str(path))
            elif found and line.startswith("Rss:"):
                rss += int(line.split()[1]) << 10
        return rss

    for number in range(4):
        for part in range(4):
            file.read("weight", number * numel + part * numel // 4, numel // 4)
        assert mapped_bytes() <= MAPPED_BYTES_MAX + (4 << 20)


@pytest.mark.parametrize("in_an_engine", [False, True])
def test_buffers_of_64_bits_keep_them_and_expanded_ones_are_given_memory(in_an_engine: bool, tmp_path: Path) -> None:
    model: Any = nn.Linear(4, 4)
    model.register_buffer("wide", torch.tensor([1.0 / 3], dtype=torch.float64))
    model.register_buffer("spread", torch.arange(3.0).expand(2, 3))
    torch.save(model.state_dict() | {"wide": torch.tensor([1.0 / 7], dtype=torch.float64)}, tmp_path / "w.pt")
    model.spread = torch.zeros(3).expand(2, 3)
    target = model
    if in_an_engine:
        sgd = {"type": "SGD", "params": {"lr": 1e-2}}
        target = infinity.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "optimizer": sgd})[0]
    infinity.load_pretrained(target, tmp_path / "w.pt")
    assert model.wide.item() == 1.0 / 7
    assert model.spread.tolist() == [[0.0, 1.0, 2.0]] * 2
    if in_an_engine:
        target.destroy()
