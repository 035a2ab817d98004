"""``load_pretrained``: the weights that plain torch's ``load_state_dict`` gives, wherever the parameters are."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, DeviceIOError, MismatchedWeightsError, WeightsError, WeightsFileError
from infinity.files import pieces, torch_file
from infinity.files.directory import WeightsDirectory
from infinity.weights.samples import SAMPLE_NUMEL
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """Tied weights, a frozen one, one that lies by channels, a buffer, and one that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm1d(24)
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight
        if not self.conv.weight.is_meta:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.embed(tokens)))
        y: Tensor = self.head(x).float().square().mean() + self.conv.weight.float().square().mean()
        return y


TOKENS = torch.arange(8)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def config(swap_dir: Path, tier: str = "nvme", *, stage: int = 3, bf16: bool = False) -> dict[str, Any]:
    device = {"device": tier, **({"nvme_path": str(swap_dir)} if tier == "nvme" else {})}
    offload = {} if tier == "none" else {"offload_optimizer": device}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 30,
            **offload,
            **({"offload_param": device} if offload and stage == 3 else {}),
        },
        "io_daemon": {"host_budget_bytes": 64 << 20},
    }


def saved(directory: Path, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What another model has, as Transformers saves it: sharded, one name each."""
    state = {name: value.contiguous() for name, value in net(seed).state_dict().items()}
    state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: files[number % 2] for number, name in enumerate(state) if name != "head.weight"}
    for file in files:
        save_file({name: state[name] for name, where in weight_map.items() if where == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


def on_cpu(_config: dict[str, Any]) -> Net:
    return net()


def under_init(config: dict[str, Any]) -> Net:
    with infinity.Init(config):
        return net()


def on_meta(_config: dict[str, Any]) -> Net:
    with torch.device("meta"):
        return net()


@pytest.mark.parametrize("build", [on_cpu, under_init, on_meta])
@pytest.mark.parametrize(("tier", "bf16", "dtype"), [("nvme", True, torch.float32), ("none", False, torch.bfloat16)])
def test_loaded_before_initialize(
    build: Callable[[dict[str, Any]], Net], tier: str, bf16: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved(tmp_path, dtype=dtype)
    settings = config(tmp_path, tier, bf16=bf16)
    plain = net()
    plain.load_state_dict(saved(tmp_path, dtype=dtype))
    model = build(settings)
    assert infinity.load_pretrained(model, tmp_path) == ((), ())
    with infinity.initialize(model=model, config=settings)[0] as engine:
        masters = engine.full_master_state_dict()
        assert all(torch.equal(masters[name], p) for name, p in plain.named_parameters() if p.requires_grad)
        weights = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name], value.bfloat16() if bf16 and value.is_floating_point() else value), name
        engine.backward(engine(TOKENS))
        engine.step()
        assert engine.full_state_dict()["embed.weight"].isfinite().all()


@pytest.mark.parametrize(("tier", "stage"), [("nvme", 3), ("none", 2), ("none", 3)])
def test_loaded_into_an_engine(tier: str, stage: int, tmp_path: Path) -> None:
    """Master weights keep what the file says beyond the weights' dtype, and weights on the device follow."""
    state = saved(tmp_path)
    settings = config(tmp_path, tier, stage=stage, bf16=True)
    with infinity.initialize(model=net(), config=settings)[0] as engine:
        engine.backward(engine(TOKENS))
        engine.step()
        infinity.load_pretrained(engine, tmp_path)
        masters = engine.full_master_state_dict()
        assert all(torch.equal(masters[name], state[name]) for name in masters)
        assert torch.equal(engine.full_state_dict()["frozen.weight"], state["frozen.weight"].bfloat16())
        engine.eval()
        loss = engine(TOKENS)
    plain = net(1).bfloat16().eval()
    assert torch.equal(loss, plain(TOKENS))
    with pytest.raises(WeightsError, match="after its engine ended"):
        infinity.load_pretrained(engine.module, tmp_path)


def test_on_two_ranks(tmp_path: Path) -> None:
    """Each reads its own part, of which an engine of two ranks makes the whole."""
    code = f"""
    import json, torch, infinity
    from pathlib import Path
    from tests.infinity import test_pretrained as t
    from infinity.files.safetensors_file import SafetensorsFile
    from infinity.tiers.collectives import Collectives
    kept = Collectives.join()
    directory = Path({str(tmp_path)!r})
    if kept.rank == 0:
        t.saved(directory)
    kept.gather_objects(None, "wait for the file")
    state = {{name: value.contiguous() for name, value in t.net(1).state_dict().items()}}
    asked, equal = [], []
    read = SafetensorsFile.read
    def noted(file, name, first, numel):
        asked.append(numel if name == "frozen.weight" else 0)
        return read(file, name, first, numel)
    SafetensorsFile.read = noted
    for build in (t.under_init, t.on_meta, None):
        settings = t.config(directory)
        model = build(settings) if build else t.net()
        if build:
            infinity.load_pretrained(model, directory)
        engine, *_ = infinity.initialize(model=model, config=settings)
        if not build:
            infinity.load_pretrained(engine, directory)
        equal.append(all(torch.equal(value, state[name]) for name, value in engine.full_state_dict().items()))
        engine.destroy()
    print(json.dumps([equal, sum(asked)]))
    kept.close()
    """
    answers = [rank.answer for rank in run_ranks(code, tmp_path, num_ranks=2)]
    assert [equal for equal, _ in answers] == [[True] * 3] * 2
    own = -(-24 * 24 // 2 // 64) * 64
    assert all(read <= 3 * (own + 3 * SAMPLE_NUMEL) for _, read in answers), "no rank reads the whole"


def test_ranks_that_are_given_different_files_are_told(tmp_path: Path) -> None:
    """Each node has a copy of its own, and one of them is of another epoch: of both there would be a mixture."""
    code = f"""
    import json, torch, infinity
    from pathlib import Path
    from safetensors.torch import save_file
    from tests.infinity import test_pretrained as t
    from infinity.tiers.collectives import Collectives
    kept = Collectives.join()
    directory = Path({str(tmp_path)!r}) / f"node{{kept.rank}}"
    directory.mkdir()
    state = {{name: value.contiguous() for name, value in t.net(1).state_dict().items() if name != "head.weight"}}
    state["frozen.weight"] += kept.rank * torch.eye(24)
    save_file(state, directory / "model.safetensors")
    said = []
    for build in (t.under_init, t.on_meta, None):
        settings = t.config(directory.parent)
        model = build(settings) if build else t.net()
        try:
            if build:
                infinity.load_pretrained(model, directory)
            engine, *_ = infinity.initialize(model=model, config=settings)
            if not build:
                infinity.load_pretrained(engine, directory)
            said.append("nothing")
        except infinity.errors.WeightsFileError as error:
            said.append(str(error))
    print(json.dumps(said))
    """
    for rank in run_ranks(code, tmp_path, num_ranks=2, variables={"INFINITY_TIMEOUT_S": "60"}):
        assert len(rank.answer) == 3
        for said in rank.answer:
            here, there = (f"{tmp_path}/node{node}/model.safetensors" for node in (1, 0))
            assert said.startswith(f"{here} has other weights of frozen.weight on rank 1 than {there} has on rank 0: ")


def test_a_plain_model_and_files_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = net(1).state_dict()
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch_file, "MAPPED_BYTES_MAX", 64)
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 100)
    model = net()
    infinity.load_pretrained(model, tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_names_are_mapped(tmp_path: Path) -> None:
    state = net(1).state_dict()
    state["old.weight"] = state.pop("embed.weight")
    state["gone"] = torch.zeros(3)
    state = {name: value.contiguous() for name, value in state.items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")

    def rename(name: str) -> str | None:
        return None if name == "gone" else name.replace("old.", "embed.")

    for given in (rename, {"old.weight": "embed.weight", "gone": "embed.weight"}):
        model = net()
        if callable(given):
            infinity.load_pretrained(model, tmp_path, rename=given)
            assert torch.equal(model.head.weight, state["old.weight"])
        else:
            with pytest.raises(MismatchedWeightsError, match=r"both gone and old\.weight"):
                infinity.load_pretrained(model, tmp_path, rename=given)
    model = net()
    missing, unexpected = infinity.load_pretrained(model, tmp_path, strict=False)
    assert (missing, unexpected) == (("embed.weight", "head.weight"), ("gone", "old.weight"))
    assert torch.equal(model.embed.weight, net().embed.weight)
    assert torch.equal(model.frozen.weight, state["frozen.weight"])


@pytest.mark.parametrize("build", [on_cpu, under_init, on_meta, None])
def test_another_models_file_changes_nothing(build: Callable[[dict[str, Any]], Net] | None, tmp_path: Path) -> None:
    """All that is wrong is told in one error: also where torch would take what fits."""
    state = {name: value.contiguous() for name, value in net(1).state_dict().items()}
    state["head.weight"] = state["head.weight"] + 1
    state["frozen.weight"] = torch.zeros(24, 25)
    state["frozen.bias"] = torch.zeros(24, dtype=torch.int8)
    del state["norm.bias"]
    state["more.weight"] = torch.zeros(2)
    save_file(state, tmp_path / "model.safetensors")
    settings = config(tmp_path)
    engine = infinity.initialize(model=net(), config=settings)[0] if build is None else None
    model = engine or (build or on_cpu)(settings)
    with pytest.raises(MismatchedWeightsError) as caught:
        infinity.load_pretrained(model, tmp_path)
    assert caught.value.missing == ("norm.bias",)
    assert caught.value.unexpected == ("more.weight",)
    assert len(caught.value.unfit) == 2
    assert all(word in str(caught.value) for word in ("norm.bias", "more.weight", "frozen.weight", "[24, 25]", "int8"))
    del state["frozen.weight"], state["frozen.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(MismatchedWeightsError, match=r"head\.weight: it differs from embed\.weight"):
        infinity.load_pretrained(model, tmp_path, strict=False)
    if engine is None and build is not on_meta:
        engine = infinity.initialize(model=model, config=settings)[0]
    if engine is not None:
        assert all(torch.equal(value, net().state_dict()[name]) for name, value in engine.full_state_dict().items())
        engine.destroy()


def test_what_lies_on_meta_is_refused_by_name_where_it_has_no_values(tmp_path: Path) -> None:
    saved(tmp_path)
    settings = config(tmp_path)

    def refused(model: nn.Module, name: str) -> None:
        with pytest.raises(ConfigError, match=name):
            infinity.initialize(model=model, config=settings)

    refused(on_meta(settings), r"embed\.weight.*load_pretrained")
    model = on_meta(settings)
    infinity.load_pretrained(model, tmp_path)
    nn.init.zeros_(model.frozen.weight)  # does nothing, and says nothing
    refused(model, r"frozen\.weight.*changed after")
    model = on_meta(settings)
    infinity.load_pretrained(model, tmp_path)
    model.frozen.weight.data = torch.zeros(3, device="meta")
    refused(model, r"frozen\.weight.*changed after")
    model = on_meta(settings)
    model.register_buffer("scale", torch.ones(3, device="meta"), persistent=False)
    infinity.load_pretrained(model, tmp_path)
    refused(model, r"model\.scale.*infinity\.Init")
    model.scale = torch.ones(3)
    infinity.initialize(model=model, config=settings)[0].destroy()


def test_meta_parameters_that_others_hold(tmp_path: Path) -> None:
    """An optimizer of the user's goes on with the same parameters; a weak reference is in torch's way."""
    saved(tmp_path)
    settings = config(tmp_path, "none")
    del settings["optimizer"]
    model = on_meta(settings)
    infinity.load_pretrained(model, tmp_path)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    kept = weakref.ref(model.frozen.weight)
    with pytest.raises(ConfigError, match=r"frozen\.weight.*weakly"):
        infinity.initialize(model=model, optimizer=optimizer, config=settings)
    del kept
    with infinity.initialize(model=model, optimizer=optimizer, config=settings)[0] as engine:
        before = engine.full_state_dict()["embed.weight"]
        engine.backward(engine(TOKENS))
        engine.step()
        assert not torch.equal(engine.full_state_dict()["embed.weight"], before)


def test_a_promise_follows_a_cast(tmp_path: Path) -> None:
    state = saved(tmp_path)
    settings = config(tmp_path, bf16=True)
    model = on_meta(settings)
    infinity.load_pretrained(model, tmp_path)
    model.bfloat16()
    with infinity.initialize(model=model, config=settings)[0] as engine:
        masters = engine.full_master_state_dict()
        assert torch.equal(masters["embed.weight"], state["embed.weight"].bfloat16().float()), "as plain torch casts it"


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("kept", [0, 4, 100, 0.6, 0.999])
def test_a_truncated_file_is_refused(ending: str, kept: float, tmp_path: Path) -> None:
    path = tmp_path / f"model.{ending}"
    state = {name: value.contiguous().clone() for name, value in net(1).state_dict().items()}
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(WeightsFileError, match=f"model.{ending}"):
        infinity.load_pretrained(net(), path)


def _index(weight_map: object) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        save_file({"a": torch.zeros(2)}, directory / "one.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def _header(text: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))

    return write


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda directory: None, "none of model.safetensors"),
        (_index(["a"]), "weight_map"),
        (_index({"a": "one.safetensors", "b": "two.safetensors"}), "two.safetensors"),
        (_index({"a": "one.safetensors", "b": "one.safetensors"}), "lacks.*b"),
        (_index({"a": "../one.safetensors"}), "not there"),
        (lambda directory: (directory / "model.safetensors.index.json").write_text("{"), "no JSON"),
        (_header(b"[1]"), "no JSON object"),
        (_header(b"{" * 5000), "no JSON"),
        (_header(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'), "F4"),
        (_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'), "damaged"),
        (_header(b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}'), "damaged"),
        (_header(b'{"a":7}'), "damaged"),
        (lambda directory: torch.save([1], directory / "pytorch_model.bin"), "state dict"),
        (lambda directory: torch.save(Net, directory / "pytorch_model.bin"), "save"),
        (lambda directory: (directory / "model.safetensors").mkdir(), "none of"),
    ],
)
def test_bad_files_are_refused(spoil: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(WeightsFileError, match=words):
        infinity.load_pretrained(net(), tmp_path)


def test_a_model_of_a_hub_is_not_looked_for() -> None:
    with pytest.raises(WeightsFileError, match="snapshot_download"):
        infinity.load_pretrained(net(), "gpt2")


def test_a_file_that_changes_or_fails_later_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    files = WeightsDirectory(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(WeightsFileError, match="has changed"):
        files.read("embed.weight", 0, 3)
    saved(tmp_path)
    files = WeightsDirectory(tmp_path)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("infinity.files.safetensors_file.os.preadv", fails)
    with pytest.raises(DeviceIOError, match="errno 5") as caught:
        files.read("embed.weight", 0, 3)
    assert caught.value.path == str(shard)
