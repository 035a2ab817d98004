"""Models that from_pretrained loads while a configuration lives, in each form that directories have."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    Trainer,
    set_seed,
)

from tests.infinity.deepspeed.unmodified.nets import Rows, llama_config, saved, saved_llama, weights
from tests.infinity.deepspeed.unmodified.run import program, programs_over
from tests.infinity.deepspeed.unmodified.trainers import arguments, history


def evaluated(given: Any, made: Any, data: Any = None) -> dict[str, Any]:
    """Logits before training, logs of some steps, and weights after them."""
    args = arguments(given, max_steps=2)
    set_seed(0)
    model = made()
    trainer = Trainer(model=model, args=args, train_dataset=data or Rows(), eval_dataset=data or Rows(4))
    trainer.train()
    predicted = trainer.predict(data or Rows(4)).predictions
    return {"history": history(trainer), "logits": torch.as_tensor(predicted), "weights": weights(trainer.model)}


@programs_over(
    sharded={"save": {"max_shard_size": "20KB"}},
    tied={"config": {"tie_word_embeddings": True}},
    of_bf16={"dtype": torch.bfloat16, "load": {"dtype": torch.float32}},
    auto_of_fp32={"load": {"dtype": "auto"}},
)
def from_a_directory(given: Any, options: dict[str, Any]) -> Any:
    set_seed(0)
    model = LlamaForCausalLM(llama_config(**options.get("config", {}))).to(options.get("dtype", torch.float32))
    saved(model, "model", **options.get("save", {}))
    return evaluated(given, lambda: AutoModelForCausalLM.from_pretrained("model", **options.get("load", {})))


class Labelled(Rows):
    """A class for each row."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": torch.tensor(index % 3)}


@program
def with_a_new_head(given: Any) -> Any:
    """What no file has is made anew, by the first rank's random numbers."""
    saved_llama()

    def made() -> Any:
        return AutoModelForSequenceClassification.from_pretrained("model", num_labels=3, pad_token_id=0)

    return evaluated(given, made, Labelled(8))


@program
def from_a_config(given: Any) -> Any:
    return evaluated(given, lambda: AutoModelForCausalLM.from_config(llama_config()))


@program
def a_base_of_a_bigger_model(given: Any) -> Any:
    saved_llama()
    args = arguments(given)
    set_seed(0)
    return {"weights": weights(AutoModel.from_pretrained("model")), "rank": args.process_index}


@program
def an_encoder_of_shared_weights(given: Any) -> Any:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    saved(BertForMaskedLM(BertConfig(vocab_size=64, **sizes)), "bert")
    return evaluated(given, lambda: BertForMaskedLM.from_pretrained("bert"))


@program
def of_another_shape(given: Any) -> Any:
    saved_llama()

    def made() -> Any:
        return AutoModelForCausalLM.from_pretrained("model", vocab_size=96, ignore_mismatched_sizes=True)

    return evaluated(given, made)
