"""Text from a model whose weights stay on NVMe: from_pretrained and generate, as Transformers' documentation has it.

    infinity as-deepspeed torchrun --nproc-per-node 1 examples/generate.py --model DIRECTORY \
        --deepspeed examples/zero3_nvme.json
"""

from __future__ import annotations

import argparse
import json

import torch
from transformers import AutoModelForCausalLM

PROMPT = b"The import statement combines two operations"


def main() -> None:
    parser = argparse.ArgumentParser(description="generate from a model larger than memory")
    parser.add_argument("--model", required=True, help="a directory, as save_pretrained writes it")
    parser.add_argument("--deepspeed", metavar="FILE", help="a configuration of stage 3; without it, in memory")
    options = parser.parse_args()
    if options.deepspeed:
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        deepspeed.init_distributed("gloo")
        with open(options.deepspeed) as file:
            config = {"zero_optimization": json.load(file)["zero_optimization"], "train_micro_batch_size_per_gpu": 1}
        for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
            config["zero_optimization"][name] = 10_000
        alive = HfDeepSpeedConfig(config)  # while it is there, from_pretrained goes by it
        model = AutoModelForCausalLM.from_pretrained(options.model)
        engine = deepspeed.initialize(model=model, config=config)[0]
        model = engine.module
        del alive
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    model.eval()
    prompt = torch.tensor([list(PROMPT)], device=model.device)
    tokens = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
    )
    print(json.dumps({"tokens": tokens[0].tolist()}))


if __name__ == "__main__":
    main()
