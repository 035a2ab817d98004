"""Weights that leave an engine as files: what torch, safetensors and Transformers read back, bit for bit."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, EngineStateError, WeightsError, WeightsFileError
from infinity.files import pieces
from infinity.files.direct import BLOCK_BYTES, open_direct
from infinity.files.directory import WeightsDirectory
from infinity.files.entry import Entry
from infinity.files.export import ASIDE, Export
from infinity.files.shards import parse_size
from infinity.files.writers import new_writer
from infinity.weights.param_group import ParamGroup
from io_daemon.shared.protocol import ObjectKind
from tests.infinity.test_pretrained import TOKENS, config, net
from tests.support.ranks import run_ranks


def trained(swap_dir: Path, **settings: Any) -> Engine:
    engine = infinity.initialize(model=net(), config=config(swap_dir, **settings))[0]
    engine.backward(engine(TOKENS))
    engine.step()
    return engine


def read_back(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(directory / file) for file in set(names.values())}
    assert {name for file in files.values() for name in file} == set(names)
    return {name: files[file][name] for name, file in names.items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], *, without: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    assert set(got) == set(expected) - without
    for name, value in got.items():
        assert value.dtype is expected[name].dtype
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(("tier", "stage", "bf16"), [("nvme", 3, True), ("none", 2, False)])
def test_files_are_what_the_state_dict_is(
    tier: str, stage: int, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 100)
    with trained(tmp_path, tier=tier, stage=stage, bf16=bf16) as engine:
        expected = engine.full_state_dict()
        weights = tmp_path / "weights"
        assert engine.save_16bit_model(weights)
        assert os.listdir(weights) == ["model.safetensors"]
        assert_same(read_back(weights), expected, without={"head.weight"})
        engine.save_16bit_model(weights, max_shard_size="1.5KB")
        assert not (weights / "model.safetensors").exists(), "the former export has gone"
        assert len(os.listdir(weights)) > 3
        assert_same(read_back(weights), expected, without={"head.weight"})
        engine.save_16bit_model(weights, max_shard_size="2KB", exclude_frozen_parameters=True)
        assert_same(read_back(weights), expected, without={"head.weight", "frozen.weight", "frozen.bias"})
        engine.save_16bit_model(weights, "pytorch_model.bin")
        whole = torch.load(weights / "pytorch_model.bin", weights_only=True)
        assert_same(whole, expected)
        assert whole["head.weight"].data_ptr() == whole["embed.weight"].data_ptr()
        engine.save_16bit_model(tmp_path / "torch", safe_serialization=False, max_shard_size=2500)
        index = json.loads((tmp_path / "torch" / "pytorch_model.bin.index.json").read_text())
        assert sum(v.nbytes for n, v in whole.items() if n != "head.weight") == index["metadata"]["total_size"]
        model = net()
        infinity.load_pretrained(model, tmp_path / "torch")
        assert all(torch.equal(v, expected[n].to(v.dtype)) for n, v in model.state_dict().items())
        with pytest.raises(ConfigError, match="safe_serialization"):
            engine.save_16bit_model(weights, False)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="max_shard_size"):
            engine.save_16bit_model(weights, max_shard_size="5 gigs")
        with pytest.raises(WeightsError, match="no model of Transformers"):
            engine.save_pretrained(weights)
    with pytest.raises(EngineStateError):
        engine.save_16bit_model(weights)


def test_what_trainers_take_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[ParamGroup] = []
    gather = ParamGroup.gather

    def noted(group: ParamGroup, kind: ObjectKind, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        gathered.append(group)
        return gather(group, kind, dtype)

    monkeypatch.setattr(ParamGroup, "gather", noted)
    settings = config(tmp_path, "none")
    with infinity.initialize(model=net(), config=settings)[0] as engine:
        assert not engine.zero_gather_16bit_weights_on_model_save()
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    with infinity.initialize(model=net(), config=settings)[0] as engine:
        assert engine.zero_gather_16bit_weights_on_model_save()
        whole = engine._zero3_consolidated_16bit_state_dict()
        assert whole is not None
        assert_same(whole, engine.full_state_dict())
        assert_same(engine._consolidated_16bit_state_dict() or {}, whole)
        assert not all(group.placement.trainable for group in gathered)
        gathered.clear()
        trained_only = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert trained_only is not None
        assert gathered
        assert all(group.placement.trainable for group in gathered)
        assert_same(trained_only, whole, without={"frozen.weight", "frozen.bias"})


def test_rank_0_writes_what_all_ranks_have(tmp_path: Path) -> None:
    code = f"""
    import json, torch
    from pathlib import Path
    from safetensors.torch import load_file
    from infinity.errors import WeightsFileError, WorldError
    from infinity.tiers.collectives import Collectives
    from infinity.files import pieces
    from tests.infinity import test_weight_files as t
    pieces.PIECE_NUMEL = 150
    kept = Collectives.join()
    directory = Path({str(tmp_path)!r})
    (directory / "file").write_text("in the way")
    engine = t.trained(directory, bf16=True)
    expected = engine.full_state_dict()
    engine.save_16bit_model(directory / "weights")
    whole = engine._zero3_consolidated_16bit_state_dict()
    try:
        engine.save_16bit_model(directory / "file")
        error = ""
    except (WeightsFileError, WorldError) as raised:
        error = str(raised)
    t.assert_same(t.read_back(directory / "weights"), expected, without={{"head.weight"}})
    engine.destroy()
    print(json.dumps([whole is None, error]))
    kept.close()
    """
    answers = [rank.answer for rank in run_ranks(code, tmp_path, num_ranks=2)]
    assert [absent for absent, _ in answers] == [False, True]
    assert all(str(tmp_path / "file") in error for _, error in answers), "every rank says what failed"


ENTRIES = {"a": Entry(dtype=torch.float32, shape=(3, 2)), "b": Entry(dtype=torch.bool, shape=(3,))}
FULL = OSError(28, "No space left on device")


def _fails(*_: object) -> None:
    raise FULL


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "replace"])
@pytest.mark.parametrize("safe", [True, False])
def test_a_disk_that_fails_leaves_the_former_weights(
    call: str, safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails has its path and errno in words; nothing half-written has a name that is read."""

    def export(value: float, max_bytes: int) -> None:
        with Export(tmp_path, ENTRIES, safe=safe, max_shard_bytes=max_bytes) as made:
            made.write("a", 0, torch.full((6,), value))
            made.write("b", 0, torch.ones(3, dtype=torch.bool))
            made.publish()

    export(1.0, 100)
    former = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _fails)
        with pytest.raises(WeightsFileError, match=r"errno 28.*free space") as caught:
            export(2.0, 100 if call == "replace" else 25)
    assert caught.value.errno == 28
    assert str(tmp_path) in caught.value.path
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == former
    export(3.0, 25)
    assert infinity.load_pretrained(net(), tmp_path, strict=False).unexpected_keys == ("a", "b")


@pytest.mark.parametrize("call", ["replace", "rename", "link"])
@pytest.mark.parametrize(("former_bytes", "new_bytes"), [(100, 25), (25, 25), (25, 100), (100, 100)])
@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_whichever_name_cannot_be_given_the_former_model_is_whole(
    call: str,
    former_bytes: int,
    new_bytes: int,
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call in turn, before it is done and, of an interrupt, after it."""

    def export(value: float, max_bytes: int) -> None:
        with Export(tmp_path, ENTRIES, max_shard_bytes=max_bytes) as made:
            made.write("a", 0, torch.full((6,), value))
            made.write("b", 0, torch.ones(3, dtype=torch.bool))
            (made.aside / "config.json").write_text(str(value))
            made.publish()

    real, counts = getattr(os, call), {"done": 0, "until": -1}

    def failing(*arguments: Any, **options: Any) -> None:
        counts["done"] += 1
        if counts["done"] == counts["until"]:
            if isinstance(error, KeyboardInterrupt):
                real(*arguments, **options)
            raise error
        real(*arguments, **options)

    export(1.0, former_bytes)
    former = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, call, failing)
    for number in range(1, 20):
        counts |= {"done": 0, "until": number}
        try:
            export(2.0, new_bytes)
        except (WeightsFileError, KeyboardInterrupt):
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == former
        else:
            if counts["done"] < number:
                break
            export(1.0, former_bytes)  # a link that could not be made is none that is needed
    assert torch.equal(WeightsDirectory(tmp_path).read("a", 0, 6), torch.full((6,), 2.0))
    assert (tmp_path / "config.json").read_text() == "2.0"


LARGE = {
    "odd": Entry(dtype=torch.bfloat16, shape=(4097, 513)),
    "wide": Entry(dtype=torch.float64, shape=(3,)),
    "bytes": Entry(dtype=torch.uint8, shape=(9_000_001,)),
    "none": Entry(dtype=torch.float32, shape=(0, 4)),
    "last": Entry(dtype=torch.float32, shape=(1021,)),
}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("max_bytes", [1 << 40, 5_000_000])
def test_pieces_in_any_order_are_the_file_and_pass_the_page_cache_by(
    safe: bool, max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randint(0, 100, entry.shape, generator=generator).to(entry.dtype) for name, entry in LARGE.items()
    }
    cuts = [(name, first) for name, value in values.items() for first in range(0, value.numel(), 700_003)]
    order = [cuts[place] for place in torch.randperm(len(cuts), generator=generator)]
    written = {False: 0, True: 0}
    real = os.pwrite

    def counted(descriptor: int, data: Any, offset: int) -> int:
        done = real(descriptor, data, offset)
        written[bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)] += done
        return done

    monkeypatch.setattr(os, "pwrite", counted)
    with Export(tmp_path, LARGE, safe=safe, max_shard_bytes=max_bytes) as made:
        for name, first in order:
            made.write(name, first, values[name].reshape(-1)[first : first + 700_003])
        made.publish()
    found = WeightsDirectory(tmp_path)
    assert found.entries == LARGE
    assert all(torch.equal(found.read(name, 0, value.numel()), value.reshape(-1)) for name, value in values.items())
    probe = open_direct(tmp_path / next(iter(os.listdir(tmp_path))), os.O_RDONLY)
    passes = bool(fcntl.fcntl(probe, fcntl.F_GETFL) & os.O_DIRECT)
    os.close(probe)
    total = sum(entry.nbytes for entry in LARGE.values())
    assert sum(written.values()) >= total
    assert not passes or written[False] < total / 100


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_a_page_that_fails_behind_names_its_file(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def failing(descriptor: int, data: Any, offset: int) -> int:
        if offset > 2 * BLOCK_BYTES:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)

    def export() -> None:
        with Export(tmp_path, {"bytes": LARGE["bytes"]}, max_shard_bytes=1 << 40) as made:
            made.write("bytes", 0, torch.zeros(9_000_001, dtype=torch.uint8))
            made.publish()

    with pytest.raises(WeightsFileError, match=f"model.safetensors.*errno {number}"):
        export()
    assert not os.listdir(tmp_path)


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    (tmp_path / f"{ASIDE}dead").mkdir()
    with Export(tmp_path, ENTRIES, max_shard_bytes=100) as living:
        Export(tmp_path, ENTRIES, max_shard_bytes=100).__exit__(None, None, None)
        assert [path.name for path in tmp_path.iterdir()] == [living.aside.name]
    assert list(tmp_path.iterdir()) == []


def _refuses_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_what_another_hosts_writer_may_still_write_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is free says nothing of it, and where there are no locks, of nobody."""
    own, other = new_writer(), "0123456789abcdef01234567"
    names = {writer: f"{ASIDE}{writer}-x" for writer in (own, other, own[:8] + other[8:])}
    for name in names.values():
        (tmp_path / name).mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", _refuses_locks)
        with Export(tmp_path, ENTRIES, max_shard_bytes=100):
            assert {names[own], names[other]} < set(os.listdir(tmp_path))
    with Export(tmp_path, ENTRIES, max_shard_bytes=100):
        pass
    assert os.listdir(tmp_path) == [names[other]]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("2MiB", 2 << 20), ("1.5kb", 1500), (7, 7), ("7", 7)])
def test_sizes_are_read_as_transformers_reads_them(text: str | int, size: int) -> None:
    assert parse_size("max_shard_size", text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", 0, "5XB", True, "0.1"])
def test_other_sizes_are_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        parse_size("max_shard_size", text)


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=120,
            tie_word_embeddings=True,
        )
    )
    return model


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_transformers_reads_what_was_trained_here(max_shard_size: str, tmp_path: Path) -> None:
    """``from_pretrained`` of what ``save_pretrained`` wrote: the same logits, and Transformers' own file is equal."""
    model = _llama()
    tokens = torch.arange(24).view(2, 12)
    settings = config(tmp_path, bf16=True)
    with infinity.initialize(model=model, config=settings)[0] as engine:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=tokens).logits
        engine.save_pretrained(tmp_path / "ours", max_shard_size=max_shard_size)
        expected = engine.full_state_dict()
    read: Any = type(model)
    again = read.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16).eval()
    with infinity.Init(config_dict_or_path=settings):
        staged = read.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    with infinity.initialize(model=staged, config=settings)[0] as engine:
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(input_ids=tokens).logits, logits)
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, logits)
    assert_same(dict(again.state_dict()), expected)
    again.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    ours, theirs = (sorted(p.name for p in (tmp_path / side).iterdir()) for side in ("ours", "theirs"))
    assert ours == theirs
    assert_same(read_back(tmp_path / "ours"), read_back(tmp_path / "theirs"))
    with torch.device("meta"):
        hollow = read(model.config)
    infinity.load_pretrained(hollow, tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"rotary_emb\.inv_freq.*init_empty_weights"):
        infinity.initialize(model=hollow, config=settings)
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        hollow = read(model.config)
    hollow.tie_weights()
    infinity.load_pretrained(hollow, tmp_path / "ours")
    with infinity.initialize(model=hollow, config=settings)[0] as engine:
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(input_ids=tokens).logits, logits)


def test_a_frozen_base_in_16_bits_is_read_back_as_transformers_would_read_it(tmp_path: Path) -> None:
    """Its config.json named fp32, in which what learns is: from_pretrained() made all of it twice as large."""
    model: Any = _llama()
    model.bfloat16().requires_grad_(False)
    model.model.norm.float().requires_grad_(True)
    model.save_pretrained(tmp_path / "theirs")
    with infinity.initialize(model=model, config=config(tmp_path))[0] as engine:
        engine.save_pretrained(tmp_path / "ours")
    ours, theirs = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs"))
    assert ours == theirs
    assert_same(read_back(tmp_path / "ours"), read_back(tmp_path / "theirs"))


def test_a_body_is_loaded_into_a_model_with_a_head(tmp_path: Path) -> None:
    """As Transformers does: with and without the body's prefix."""
    model: Any = _llama()
    model.model.save_pretrained(tmp_path / "body")
    model.save_pretrained(tmp_path / "whole")
    other: Any = _llama()
    nn.init.zeros_(other.model.norm.weight)
    infinity.load_pretrained(other, tmp_path / "body")
    assert torch.equal(other.model.norm.weight, model.model.norm.weight)
    nn.init.zeros_(other.model.norm.weight)
    infinity.load_pretrained(other.model, tmp_path / "whole")
    assert torch.equal(other.model.norm.weight, model.model.norm.weight)
