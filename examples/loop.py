"""A loop of one's own with ``deepspeed.initialize``, saved half way and loaded again:

infinity as-deepspeed deepspeed --num_gpus 1 examples/loop.py --deepspeed_config examples/loop.json
"""

from __future__ import annotations

import argparse
import json

import deepspeed
import torch
from text import Text, tiny_config
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small model with deepspeed.initialize")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--save", default="checkpoints", help="where checkpoints are saved")
    options = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=options.deepspeed_config):
        model = LlamaForCausalLM(tiny_config())
    engine, _, _, _ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    data = Text(0, 96)
    sampler = DistributedSampler(data, engine.world_size, engine.global_rank, shuffle=False)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)

    def train(batches: list[dict[str, torch.Tensor]]) -> list[float]:
        losses = []
        for batch in batches:
            loss = engine(**{name: values.to(engine.device) for name, values in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    batches = list(loader)[:8]
    losses = train(batches[:4])
    engine.save_checkpoint(options.save, client_state={"batches": 4})
    losses += train(batches[4:])
    _, client = engine.load_checkpoint(options.save)
    again = train(batches[client["batches"] :])
    if engine.global_rank == 0:
        print(json.dumps({"losses": losses, "again": again}))
    engine.destroy()


if __name__ == "__main__":
    main()
