"""Transformers' Trainer. All that is said of DeepSpeed is one argument:

    infinity as-deepspeed torchrun --nproc-per-node 1 examples/trainer.py --model DIRECTORY \
        --deepspeed examples/zero3_nvme.json --output_dir out --max_steps 6 --save_steps 3

Without a GPU the Trainer needs ``--use_cpu``, too. Again with ``--resume_from_checkpoint out/checkpoint-3`` it goes on
where it was, and without ``--deepspeed`` it trains in memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from text import Text
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    model: str = field(metadata={"help": "a directory, as save_pretrained writes it"})


def main() -> None:
    options, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    trainer = Trainer(model=model, args=args, train_dataset=Text(0, 96), eval_dataset=Text(96, 112))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(json.dumps({"losses": losses, "eval_loss": evaluated, "best": trainer.state.best_model_checkpoint}))


if __name__ == "__main__":
    main()
