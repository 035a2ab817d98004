"""Twelve ranks: what they tell each other goes other ways than among a few, see ``tiers/maximum.py``."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

NUM_RANKS = 12
PRELUDE = """
import json, os, sys, time
import torch
import infinity
from infinity.checkpoint import stored
from infinity.errors import WorldError

torch.set_num_threads(1)
torch.manual_seed(0)
rank = int(os.environ["RANK"])
model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 3))
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10},
}
engine = infinity.initialize(model=model, config=CONFIG)[0]

def step():
    engine.backward(engine(torch.full((1, 40), float(rank + 1))).square().mean())
    engine.step()

step()
"""
GOES_ON = """
engine.save_checkpoint(sys.argv[1], tag="x")
saved = engine.full_state_dict()
step()
read, real = [], stored.read_sealed
stored.read_sealed = lambda path: (read.append(path.name), real(path))[1]
engine.load_checkpoint(sys.argv[1], tag="x")
loaded = engine.full_state_dict()
same = all(torch.equal(saved[name], loaded[name]) for name in saved)
told = "nothing was raised"
try:
    engine(torch.ones(1, 40)) if rank != 5 else engine.eval()(torch.ones(1, 40))
except WorldError as error:
    told = str(error)
engine.destroy()
print(json.dumps([same, read, told, {name: value.tolist() for name, value in loaded.items()}]))
"""
IS_KILLED = """
if rank == 5:
    os._exit(3)
begun = time.monotonic()
try:
    step()
    told = "nothing was raised"
except WorldError as error:
    told = str(error)
print(json.dumps([told, time.monotonic() - begun]), flush=True)
os._exit(0)
"""


def test_twelve_ranks_train_save_load_and_diverge_as_two_do(tmp_path: Path) -> None:
    ended = run_ranks(PRELUDE + GOES_ON, tmp_path, num_ranks=NUM_RANKS, words=[str(tmp_path / "saved")])
    for number, rank in enumerate(ended):
        same, read, told, weights = rank.answer
        assert same
        assert set(read) <= {"manifest.json", "rank-00000.json", f"rank-{number:05}.json"}
        assert "(ranks 0 to 4, 6 to 11: begin a training forward; rank 5: begin an evaluating forward)" in told
        assert weights == ended[0].answer[3]


def test_eleven_ranks_hear_of_the_end_of_the_twelfth(tmp_path: Path) -> None:
    ended = run_ranks(PRELUDE + IS_KILLED, tmp_path, num_ranks=NUM_RANKS)
    assert ended[5].code == 3
    for rank in (each for number, each in enumerate(ended) if number != 5):
        told, seconds = rank.answer
        assert "another rank has ended" in told
        assert seconds < 60
