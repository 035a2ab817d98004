"""What script.py trains, in plain torch: DDP on several ranks. It prints the losses of the first rank."""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--clip", type=float, help="the norm that gradients are clipped to")
parser.add_argument("--weight_decay", type=float, default=0.0)
parser.add_argument("--out", help="where weights-RANK.pt is written")
args = parser.parse_args()

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
if world_size > 1:
    dist.init_process_group("gloo")
trained = DistributedDataParallel(model) if world_size > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=args.weight_decay, fused=True)
generator = torch.Generator().manual_seed(rank)
losses = []
for batch in [torch.randn(4, 32, generator=generator) for _ in range(8)]:
    loss = nn.functional.mse_loss(trained(batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    if args.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if args.out is not None:
    torch.save(model.state_dict(), os.path.join(args.out, f"plain-{rank}.pt"))
if rank == 0:
    print(json.dumps({"losses": losses, "resumed": losses[4:]}))
if world_size > 1:
    dist.destroy_process_group()
