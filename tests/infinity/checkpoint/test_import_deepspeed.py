"""``infinity import-deepspeed``: the layout of ZeRO's files at any number of ranks, and what DeepSpeed itself wrote."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from benchmarks.deepspeed_venv import prepare_venv
from infinity.checkpoint import deepspeed_files
from infinity.checkpoint.pieces import PieceWriter
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.commands.cli import main
from infinity.deepspeed.fp32_weights import convert_zero_checkpoint_to_fp32_state_dict
from infinity.files.directory import WeightsDirectory
from tests.support import deepspeed_layout as layout
from tests.support.ranks import free_port, quiet_environment


class Model(nn.Module):
    """The parameters of the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.mid = nn.Linear(24, 31)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(7, 5, bias=False).requires_grad_(False)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y: torch.Tensor = (self.mid(x) * self.scale).square().mean() + self.head(x).square().mean()
        return y


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("stage", "world_size"), [(2, 1), (2, 3), (3, 1), (3, 2), (3, 4)])
def test_every_element_comes_to_its_place(
    stage: int,
    world_size: int,
    by_name: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(deepspeed_files, "PIECE_NUMEL_MAX", 100)
    monkeypatch.setattr(deepspeed_files, "MAPPED_BYTES_MAX", 500)
    layout.write(tmp_path / "theirs", stage=stage, world_size=world_size, by_name=by_name)
    assert main(["import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["stage"], report["ranks"], report["left_out"]) == (stage, world_size, ["lambda"])
    with StoredCheckpoint.open(tmp_path / "ours") as stored:
        assert list(stored.verify()) == []
        for name, kinds in layout.values().items():
            assert torch.equal(stored.read_whole(name, "weight"), kinds["weight"])
            assert all(torch.equal(stored.read_whole(name, f"state.{kind}"), kinds[kind]) for kind in layout.STATES)
        assert torch.equal(stored.read_whole("frozen.weight", "weight"), layout.frozen()["frozen.weight"])
        assert stored.entries["embed.weight"].aliases == ("head.weight",)
        shared = stored.shared_state()
    assert shared["client_state"] == {"epoch": 4}
    assert shared["histories"] == dict.fromkeys(layout.values(), (3.0,))
    assert shared["loss_scale"] == {"value": 512.0, "patience": 2, "good_steps": 4}
    assert shared["counters"] == {"global_steps": 3, "global_samples": 12, "skipped_steps": 1}


def test_frozen_parameters_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were, for each."""
    layout.write(tmp_path / "theirs", stage=3, world_size=2)
    num_listed, listed = 0, deepspeed_files.DeepSpeedFiles.frozen

    def counted(files: deepspeed_files.DeepSpeedFiles) -> Any:
        nonlocal num_listed
        num_listed += 1
        return listed(files)

    monkeypatch.setattr(deepspeed_files.DeepSpeedFiles, "frozen", counted)
    assert main(["import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert num_listed == 1


def test_fp32_weights_are_taken_without_states_and_beside_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.write(tmp_path / "theirs", stage=3, world_size=2)
    (tmp_path / "large").mkdir()
    seen, add = set(), PieceWriter.add

    def noted(writer: PieceWriter, name: str, kind: str, *values: Any) -> None:
        seen.add((kind, writer.path.is_relative_to(tmp_path / "large")))
        add(writer, name, kind, *values)

    monkeypatch.setattr(PieceWriter, "add", noted)
    out = tmp_path / "large" / "models" / "mine"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "theirs", out, safe_serialization=True)
    found = WeightsDirectory(out)
    for name, kinds in layout.values().items():
        assert torch.equal(found.read(name, 0, kinds["weight"].numel()), kinds["weight"].reshape(-1))
    assert seen == {("weight", True), ("buffer", True)}
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["models"], "nothing is left of the copy"


def test_an_engine_goes_on_with_it(tmp_path: Path) -> None:
    layout.write(tmp_path / "theirs", stage=3, world_size=2)
    assert main(["import-deepspeed", str(tmp_path / "theirs" / "global_step3"), str(tmp_path / "ours")]) == 0
    model = Model()
    matrices = [model.embed.weight, model.mid.weight]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}},
    }
    groups: list[Any] = [{"params": matrices}, {"params": [model.mid.bias, model.scale]}]
    with infinity.initialize(model=model, model_parameters=groups, config=config)[0] as engine:
        path, client_state = engine.load_checkpoint(str(tmp_path / "ours"))
        assert path is not None
        assert client_state == {"epoch": 4}
        assert (engine.global_steps, engine.skipped_steps) == (3, 1)
        weights = engine.full_master_state_dict()
        assert all(torch.equal(weights[name], kinds["weight"]) for name, kinds in layout.values().items())
        assert engine.lr_scheduler is not None
        assert engine.lr_scheduler.state_dict()["last_batch_iteration"] == 2
        assert model.count == 7
        engine.backward(engine(torch.arange(4)))
        engine.step()
        assert math.isfinite(float(engine.full_master_state_dict()["scale"]))


def _remove(name: str) -> Callable[[Path], None]:
    return lambda place: (place / name).unlink()


def _truncate(place: Path) -> None:
    path = place / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:2000])


def _short(place: Path) -> None:
    path = place / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with layout.foreign_classes():
        found = torch.load(path, weights_only=False)
        found["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.zeros(3)
        torch.save(found, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_remove("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), "3 ranks|rank 1"),
        (_remove("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"), "3 ranks.* 2 files"),
        (_remove("zero_pp_rank_2_mp_rank_00_model_states.pt"), "3 ranks.* 2 of the"),
        (_truncate, "rank_1.*cannot be read"),
        (_short, "rank_1.*lacks elements of embed.weight"),
        (lambda place: (place / "mp_rank_01_model_states.pt").write_text(""), "model-parallel"),
        (lambda place: [path.unlink() for path in place.iterdir()], "model_states"),
    ],
)
def test_what_is_not_whole_is_refused(
    spoil: Callable[[Path], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout.write(tmp_path / "theirs", stage=3, world_size=3)
    spoil(tmp_path / "theirs" / "global_step3")
    assert main(["import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "theirs") in error
    assert re.search(words, error.replace("\n", " "))
    assert not (tmp_path / "ours" / "latest").exists()


TIMEOUT_S = 900
"""DeepSpeed may compile at its first start."""
SCRIPT = """
import json, os, sys
import torch
from torch import nn

directory, stage, precision, side = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
rank = int(os.environ["RANK"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.mid, self.up, self.norm = nn.Linear(24, 31), nn.Linear(31, 24), nn.LayerNorm(24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.up(torch.tanh(self.mid(self.frozen(self.embed(tokens))))))
        return self.head(x).float().square().mean()


torch.manual_seed(0 if side == "theirs" else 1)
model = Model()
trained = [p for p in model.parameters() if p.requires_grad]
groups = [
    {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
]
params = {"lr": 1e-2, **({"torch_adam": True} if side == "theirs" else {})}
zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": zero,
    "optimizer": {"type": "AdamW", "params": params},
    "bf16": {"enabled": precision == "bf16"},
    "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
    "steps_per_print": 10**9,
}
if side == "theirs":
    import deepspeed as library
else:
    import infinity as library
engine, *_ = library.initialize(model=model, model_parameters=groups, config=config)
tokens = torch.arange(8) + rank


def losses(count):
    found = []
    for _ in range(count):
        loss = engine(tokens)
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    return found


if side == "theirs":
    losses(3)
    engine.save_checkpoint(directory, client_state={"epoch": 4})
else:
    engine.load_checkpoint(directory)
print("LOSSES", json.dumps(losses(3)), flush=True)
"""


def _losses(python: str, directory: Path, words: list[str], num_ranks: int) -> list[list[float]]:
    """Of each rank, the losses that the script prints for ``words``."""
    script = directory / f"{words[-1]}.py"
    script.write_text(SCRIPT)
    meeting = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            environment = quiet_environment(RANK=str(rank), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu", **meeting)
            if words[-1] == "ours":  # where DeepSpeed finds it, it compiles its own collectives
                environment["LOCAL_WORLD_SIZE"] = str(num_ranks)
            process = subprocess.Popen(
                [python, str(script), *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        texts = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    lines = [[line for line in text.splitlines() if line.startswith("LOSSES ")] for text in texts]
    assert all(lines), "\n".join(text[-3000:] for text in texts)
    return [json.loads(found[-1].removeprefix("LOSSES ")) for found in lines]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_deepspeed_wrote_is_continued() -> None:
    """The first loss after it has the bits that DeepSpeed's own next loss had, at the same number of ranks and at one
    rank less; on one rank all losses have them."""
    kept = Path(tempfile.gettempdir())
    python = prepare_venv(kept / "infinity-test-deepspeed")
    for stage, precision, num_ranks in ((1, "bf16", 1), (2, "bf16", 2), (3, "bf16", 1), (3, "bf16", 2)):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            settings = [str(stage), precision]
            theirs = _losses(python, directory, [f"{name}/theirs", *settings, "theirs"], num_ranks)
            assert main(["import-deepspeed", f"{name}/theirs", f"{name}/imported"]) == 0
            ours = _losses(sys.executable, directory, [f"{name}/imported", "3", precision, "ours"], num_ranks)
            assert [losses[0] for losses in ours] == [losses[0] for losses in theirs]
            if num_ranks == 1:
                assert ours == theirs
            else:
                alone = _losses(sys.executable, directory, [f"{name}/imported", "3", precision, "ours"], 1)
                assert alone[0][0] == theirs[0][0]
