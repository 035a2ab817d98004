"""Transformers' Trainer with the arguments that its users give it."""

# mypy: ignore-errors
from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tests.infinity.deepspeed.unmodified.nets import Rows, llama_config, padded, read, saved, saved_llama, weights
from tests.infinity.deepspeed.unmodified.run import program, programs_over


def arguments(given: Any, kind: Any = TrainingArguments, **others: Any) -> TrainingArguments:
    """On several ranks without accumulation: then the bits are those of DistributedDataParallel."""
    usual = {
        "output_dir": "out", "use_cpu": True, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2 if os.environ["WORLD_SIZE"] == "1" else 1,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "warmup_steps": 1,
    }  # fmt: skip
    return kind(deepspeed=given, **{**usual, **others})


def history(trainer: Trainer) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_mean", "num_input_tokens_seen")
    return [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history[:-1]]


def trained(given: Any, model: Any = None, *, kind: Any = Trainer, made: Any = None, **others: Any) -> dict[str, Any]:
    """Logs and weights of a run. ``made``: words of the Trainer itself."""
    args = arguments(given, **others)
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(saved_llama()) if model is None else model()
    trainer = kind(model=model, args=args, train_dataset=Rows(), **(made or {}))
    trainer.train()
    return {"history": history(trainer), "weights": weights(trainer.model)}


@programs_over(
    default={},
    checkpointed={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    reentrant={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    smoothed={"label_smoothing_factor": 0.1},
    neftune={"neftune_noise_alpha": 5.0},
    compiled={"torch_compile": True, "torch_compile_backend": "aot_eager"},
    unclipped={"max_grad_norm": 0.0},
    tightly_clipped={"max_grad_norm": 0.05},
    decayed={"weight_decay": 0.3},
    tokens_seen={"include_num_input_tokens_seen": True},
    whole_epoch={"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 3},
    one_layer_rate={"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
)
def with_arguments(given: Any, others: dict[str, Any]) -> Any:
    return trained(given, **others)


@programs_over(**{name: name for name in ("adamw_torch", "adamw_torch_fused", "adagrad")})
def with_optim(given: Any, name: str) -> Any:
    """Under offload_optimizer Accelerate takes one of DeepSpeed's in its place."""
    return trained(given, optim=name)


@programs_over(**{name: name for name in ("sgd", "rmsprop", "adafactor")})
def with_the_optim_itself(given: Any, name: str) -> Any:
    return trained(given if given is None else {**given, "zero_force_ds_cpu_optimizer": False}, optim=name)


@programs_over(
    **{
        name: (name, options)
        for name, options in {
            "cosine": {}, "cosine_with_restarts": {"num_cycles": 2}, "polynomial": {"power": 2.0},
            "constant_with_warmup": {}, "inverse_sqrt": {}, "cosine_with_min_lr": {"min_lr": 1e-3},
        }.items()
    }
)  # fmt: skip
def with_schedule(given: Any, chosen: tuple[str, dict[str, Any]]) -> Any:
    return trained(given, lr_scheduler_type=chosen[0], lr_scheduler_kwargs=chosen[1])


@program
def plateau_and_evaluation(given: Any) -> Any:
    made = {"eval_dataset": Rows(6)}
    return trained(given, made=made, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)


@program
def grouped_by_length(given: Any) -> Any:
    return trained(given, made={"data_collator": padded}, train_sampling_strategy="group_by_length")


class Reader(TrainerCallback):
    """Reads weights, as users of ZeRO write it. Accelerate steps inside backward: later callbacks see the new ones."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for param in model.parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                self.read.append(param.detach().norm().item())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for param in model.parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                self.read.append(param.detach().clone())


@program
def a_callback_that_reads(given: Any) -> Any:
    reader = Reader()
    return {**trained(given, made={"callbacks": [reader]}), "read": reader.read}


@program
def metrics(given: Any) -> Any:
    args = arguments(
        given, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=3, eval_accumulation_steps=1
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(saved_llama())

    def computed(predicted: Any) -> dict[str, float]:
        right = predicted.predictions[:, :-1] == predicted.label_ids[:, 1:]
        return {"accuracy": float(right.mean())}

    trainer = Trainer(
        model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(7), compute_metrics=computed,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(Rows(5))
    trainer.save_model("saved")
    model_saved = read("saved/model.safetensors")
    return {"history": history(trainer), "predicted": predicted.predictions.tolist(), "saved": model_saved}


@program
def seq2seq_that_generates(given: Any) -> Any:
    set_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    saved(T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0)), "t5")
    args = arguments(
        given,
        Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=8,
        eval_strategy="steps",
        eval_steps=2,
    )
    set_seed(0)
    model = T5ForConditionalGeneration.from_pretrained("t5")
    trainer = Seq2SeqTrainer(
        model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(4),
        compute_metrics=lambda predicted: {"mean": float(predicted.predictions.mean())},
    )  # fmt: skip
    trainer.train()
    generated = trainer.predict(Rows(3), num_beams=2)
    return {"history": history(trainer), "weights": weights(trainer.model), "tokens": generated.predictions.tolist()}


class Weighted(Trainer):
    """A loss of one's own, with a regulariser on weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )
        return (loss, outputs) if return_outputs else loss


@program
def a_loss_of_ones_own(given: Any) -> Any:
    return trained(given, kind=Weighted)


@program
def frozen_and_resized(given: Any) -> Any:
    def made() -> Any:
        model = AutoModelForCausalLM.from_pretrained(saved_llama())
        model.resize_token_embeddings(80, mean_resizing=False)
        model.model.layers[0].requires_grad_(False)
        return model

    return trained(given, made)


@program
def a_new_model(given: Any) -> Any:
    return trained(given, lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True)))


@program
def dropout(given: Any) -> Any:
    return trained(given, lambda: LlamaForCausalLM(llama_config(attention_dropout=0.3)))


@program
def trained_twice(given: Any) -> Any:
    args = arguments(given)
    set_seed(0)
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(saved_llama()), args=args, train_dataset=Rows())
    trainer.train()
    first = history(trainer)
    trainer.train()
    return {"first": first, "history": history(trainer), "weights": weights(trainer.model)}


@program
def saved_and_resumed(given: Any) -> Any:
    args = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole = trained(given, **args)
    set_seed(0)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(saved_llama()), args=arguments(given, **args), train_dataset=Rows()
    )
    trainer.train(resume_from_checkpoint="out/checkpoint-2")
    resumed = {"history": history(trainer), "weights": weights(trainer.model)}
    return {"whole": whole, "resumed": resumed}


@program
def an_optimizer_that_is_passed(given: Any) -> Any:
    set_seed(0)
    model = LlamaForCausalLM(llama_config())
    groups = [
        {"params": model.model.parameters(), "lr": 1e-3},
        {"params": model.lm_head.parameters(), "lr": 1e-2, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return trained(given, lambda: model, made={"optimizers": (optimizer, schedule)})


@program
def the_best_is_loaded(given: Any) -> Any:
    """Behind it the script draws random numbers: a Trainer without DeepSpeed leaves the generators alone there."""
    args = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    found = trained(
        given, lambda: LlamaForCausalLM(llama_config(attention_dropout=0.3)), made={"eval_dataset": Rows(6)}, **args
    )
    return {**found, "drawn": torch.rand(3)}
