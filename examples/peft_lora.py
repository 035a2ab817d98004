"""LoRA by PEFT and the Trainer, over a base that stays on NVMe, read only:

    infinity as-deepspeed torchrun --nproc-per-node 1 examples/peft_lora.py --model DIRECTORY \
        --deepspeed examples/zero3_nvme.json --output_dir out --max_steps 6    # without a GPU also: --use_cpu
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from peft import LoraConfig, get_peft_model
from text import Text
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    model: str = field(metadata={"help": "a directory, as save_pretrained writes it"})


def main() -> None:
    options, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    base = AutoModelForCausalLM.from_pretrained(options.model)
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, settings)
    trainer = Trainer(model=model, args=args, train_dataset=Text(0, 96))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}))


if __name__ == "__main__":
    main()
