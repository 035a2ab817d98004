"""A training script as DeepSpeed's users write it: run by tests, it knows nothing of infinity."""

import argparse
import json
import os

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out", required=True)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def start() -> "deepspeed.DeepSpeedEngine":
    model = build()
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    assert optimizer is engine.optimizer
    return engine


def train(engine: "deepspeed.DeepSpeedEngine", batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = nn.functional.mse_loss(engine(batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


engine = start()
rank = deepspeed.comm.get_rank()
generator = torch.Generator().manual_seed(rank)
batches = [torch.randn(4, 32, generator=generator) for _ in range(8)]
first = train(engine, batches[:4])
engine.save_checkpoint(args.out, client_state={"epoch": 7})
second = train(engine, batches[4:])
resumed = start()
_, client_state = resumed.load_checkpoint(args.out)
again = train(resumed, batches[4:])
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
torch.save(weights, os.path.join(args.out, f"weights-{rank}.pt"))
with open(os.path.join(args.out, "latest")) as file:
    latest = file.read().strip()
report = {
    "losses": first + second,
    "resumed": again,
    "epoch": client_state["epoch"],
    "local_rank": args.local_rank,
    "version": deepspeed.__version__,
    "file": deepspeed.__file__,
    "latest": latest,
}
with open(os.path.join(args.out, f"report-{rank}.json"), "w") as file:
    json.dump(report, file)
