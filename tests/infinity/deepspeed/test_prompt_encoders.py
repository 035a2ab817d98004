"""PEFT's encoders of prompts are saved by the Trainer on several ranks, of which one calls them."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

SAVING = """
import json, os
import infinity.deepspeed as deepspeed
deepspeed.install()
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, set_seed
from tests.infinity.deepspeed.unmodified.nets import Rows, llama_config
from tests.infinity.deepspeed.unmodified.run import config_of
from tests.infinity.deepspeed.unmodified.trainers import arguments

torch.set_num_threads(1)
kinds = {
    PromptTuningConfig: {},
    PrefixTuningConfig: {"prefix_projection": True, "encoder_hidden_size": 32},
    PromptEncoderConfig: {"encoder_hidden_size": 32},
}
wrong = []
for kind, words in kinds.items():
    set_seed(0)
    model = get_peft_model(
        LlamaForCausalLM(llama_config()), kind(num_virtual_tokens=4, task_type="CAUSAL_LM", **words)
    )
    args = arguments(config_of("z3"), save_strategy="steps", save_steps=2, output_dir=kind.__name__)
    trainer = Trainer(model=model, args=args, train_dataset=Rows())
    trainer.train()
    saved = load_file(f"{kind.__name__}/checkpoint-4/adapter_model.safetensors")["prompt_embeddings"]
    if not torch.equal(saved, model.get_prompt_embedding_to_save("default")):
        wrong.append(kind.__name__)
print(json.dumps(wrong))
"""


def test_the_trainer_saves_them_at_stage_3(tmp_path: Path) -> None:
    code = f"import os\nos.chdir({str(tmp_path)!r})\n{SAVING}"
    ended = run_ranks(code, tmp_path, num_ranks=2, variables={"INFINITY_TIMEOUT_S": "60"})
    assert [each.answer for each in ended] == [[], []]
