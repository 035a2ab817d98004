"""The README's example is run as it stands there: on one rank and on two it trains one model, as DDP would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.ranks import REPOSITORY, end_of, run_ranks, start_launcher

AROUND = """
import json, os, sys
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)

class MyModel(nn.Module):
    # deep enough for several groups beside one that stays
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(96, 96) for _ in range(3)])
        self.norm = nn.LayerNorm(96)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x).float().square().sub(x.float()).square().mean()

def batches_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 96, generator=generator).bfloat16() for _ in range(6)]

batches = batches_of(int(os.environ.get("RANK", 0)))
"""
SPY = """
import infinity
losses, weights, sizes = [], {}, []
initialize = infinity.initialize

def spied(**arguments):
    made = initialize(**arguments)
    engine = made[0]
    backward, destroy = engine.backward, engine.destroy
    sizes.append(engine.train_batch_size())

    def seen_backward(loss):
        losses.append(loss.item())
        return backward(loss)

    def seen_destroy():
        weights.update({name: value.float().tolist() for name, value in engine.full_master_state_dict().items()})
        destroy()

    engine.backward, engine.destroy = seen_backward, seen_destroy
    return made

infinity.initialize = spied
"""
ANSWER = """
with open(f"{sys.argv[1]}/rank{os.environ.get('RANK', 0)}", "w") as file:
    json.dump([sizes, losses, weights], file)
"""
DDP = """
import torch.distributed as dist

config = {"lr": 3e-4, "weight_decay": 0.1}
dist.init_process_group("gloo")
model = MyModel()
masters = {name: p.detach().clone() for name, p in model.named_parameters()}
own = nn.parallel.DistributedDataParallel(model.bfloat16())
adam = torch.optim.AdamW(masters.values(), fused=True, **config)
losses, weights, sizes = [], {}, [dist.get_world_size()]
for batch in batches:
    loss = own(batch)
    losses.append(loss.item())
    loss.backward()
    for name, p in model.named_parameters():
        masters[name].grad = p.grad.float()
        p.grad = None
    torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
    adam.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(masters[name])
weights = {name: value.tolist() for name, value in masters.items()}
dist.destroy_process_group()
"""


def example() -> str:
    """The code of README's section "Use"."""
    text = (REPOSITORY / "README.md").read_text()
    section = text.split("\n## Use\n", 1)[1].split("\n## ", 1)[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    assert "MyModel()" in code
    assert "in batches" in code
    return str(code)


def command() -> str:
    """How that section starts several ranks."""
    text = (REPOSITORY / "README.md").read_text()
    (line,) = re.findall(r"^infinity run (.*?) train\.py", text, re.MULTILINE)
    return str(line)


Trained = list[tuple[list[int], list[float], dict[str, list[float]]]]
"""Of each rank the batch sizes, losses and weights."""


def _train(directory: Path, code: str, num_ranks: int) -> Trained:
    directory.mkdir()
    swap_dir = directory / "swap"
    swap_dir.mkdir()
    script = directory / "train.py"
    script.write_text(code.replace("/nvme0", str(swap_dir)))
    words = command().replace("/nvme0", str(swap_dir)).replace("--nproc-per-node 8", f"--nproc-per-node {num_ranks}")
    ended = end_of(start_launcher(*words.split(), script, directory))
    assert ended.code == 0, ended.errors
    assert list(swap_dir.iterdir()) == []
    return _answers(directory, num_ranks)


def _train_by_ddp(directory: Path, num_ranks: int) -> Trained:
    directory.mkdir()
    ended = run_ranks(AROUND + DDP + ANSWER, directory, num_ranks=num_ranks, words=[str(directory)])
    assert [rank.code for rank in ended] == [0] * num_ranks, ended
    return _answers(directory, num_ranks)


def _answers(directory: Path, num_ranks: int) -> Trained:
    return [json.loads((directory / f"rank{rank}").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_example_trains_one_model_as_ddp_does(num_ranks: int, tmp_path: Path) -> None:
    """On one rank to the bit; on more, losses within bf16's rounding: the engine sums gradients in the config's
    reduction dtype, DDP in bf16."""
    ours = _train(tmp_path / "ours", AROUND + SPY + example() + ANSWER, num_ranks)
    ddps = _train_by_ddp(tmp_path / "ddp", num_ranks)
    assert [sizes for sizes, _, _ in ours] == [[num_ranks]] * num_ranks
    assert all(weights == ours[0][2] for _, _, weights in ours), "one model"
    for (_, losses, weights), (_, ddp_losses, ddp_weights) in zip(ours, ddps, strict=True):
        if num_ranks == 1:
            assert (losses, weights) == (ddp_losses, ddp_weights)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(ddp_losses), rtol=1e-2, atol=0)
        assert losses[0] == ddp_losses[0], "before the first update every bit is DDP's"
        for name, value in ddp_weights.items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(value), rtol=1e-2, atol=1e-4)


def test_pretrained_weights_go_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both blocks as they stand there, for a model of Transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 50}
    settings = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    monkeypatch.chdir(tmp_path)
    before = transformers.LlamaForCausalLM(settings)
    before.save_pretrained("pretrained")
    text = (REPOSITORY / "README.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "pretrained(" in block]
    names = {
        "infinity": infinity,
        "MyModel": lambda: transformers.LlamaForCausalLM(settings),
        "config": {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    }
    exec("".join(blocks), names)
    engine: Any = names["engine"]
    engine.destroy()
    after = transformers.LlamaForCausalLM.from_pretrained("exported")
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
