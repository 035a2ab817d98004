"""PEFT's adapters over a base that is sharded, trained by the Trainer."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import deepspeed
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, set_seed

from tests.infinity.deepspeed.unmodified.nets import Rows, read, saved_llama
from tests.infinity.deepspeed.unmodified.run import program, programs_over
from tests.infinity.deepspeed.unmodified.trainers import arguments, history

_TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapted(given: Any, config: Any, then: Any = None, **others: Any) -> dict[str, Any]:
    args = arguments(given, **others.pop("arguments", {}))
    set_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(saved_llama()), config)
    trainer = Trainer(model=model, args=args, train_dataset=Rows(), **others)
    trainer.train()
    trainer.save_model("saved")
    found = {"history": history(trainer), "adapter": read("saved/adapter_model.safetensors")}
    return {**found, **(then(trainer) if then else {})}


@programs_over(
    lora=LoraConfig(r=4, lora_dropout=0.1, **_TARGETS),
    dora=LoraConfig(r=4, use_dora=True, **_TARGETS),
    rslora=LoraConfig(r=4, use_rslora=True, bias="all", **_TARGETS),
    head_too=LoraConfig(r=4, modules_to_save=["lm_head"], **_TARGETS),
    embeddings=LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM"),
    pissa=LoraConfig(r=4, init_lora_weights="pissa", **_TARGETS),
    ia3=IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    prompt=PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    prefix=PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    loha=LoHaConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    vera=VeraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
def trained_as(given: Any, config: Any) -> Any:
    return adapted(given, config)


class Allocation(TrainerCallback):
    """As AdaLoRA's users call it, before gradients go."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.base_model.update_and_allocate(state.global_step)


@program
def adalora(given: Any) -> Any:
    config = AdaLoraConfig(init_r=6, target_r=3, total_step=6, tinit=1, tfinal=1, deltaT=1, **_TARGETS)
    return adapted(given, config, callbacks=[Allocation()], arguments={"max_steps": 6})


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=Rows(2)[1]["input_ids"][None]).logits


@program
def switched_off_and_on(given: Any) -> Any:
    def then(trainer: Trainer) -> dict[str, Any]:
        with_it = _logits(trainer.model)
        with trainer.model.disable_adapter():
            without = _logits(trainer.model)
        return {"with": with_it, "without": without, "again": _logits(trainer.model)}

    return adapted(given, LoraConfig(r=4, **_TARGETS), then)


@program
def merged_and_unloaded(given: Any) -> Any:
    def then(trainer: Trainer) -> dict[str, Any]:
        params = list(trainer.model.parameters())
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=given is not None):
            merged = trainer.model.merge_and_unload()
            return {"merged": {name: param.detach().clone() for name, param in merged.named_parameters()}}

    return adapted(given, LoraConfig(r=4, **_TARGETS), then)


@program
def merged_from_files(given: Any) -> Any:
    def then(_trainer: Trainer) -> dict[str, Any]:
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved_llama()), "saved")
        with deepspeed.zero.GatheredParameters(list(loaded.parameters()), modifier_rank=0, enabled=given is not None):
            merged = loaded.merge_and_unload()
            return {"merged": {name: param.detach().clone() for name, param in merged.named_parameters()}}

    return adapted(given, LoraConfig(r=4, **_TARGETS), then)


@program
def two_adapters(given: Any) -> Any:
    args = arguments(given)
    set_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(saved_llama()), LoraConfig(r=4, **_TARGETS))
    model.add_adapter("other", LoraConfig(r=2, **_TARGETS))
    model.set_adapter("other")
    trainer = Trainer(model=model, args=args, train_dataset=Rows())
    trainer.train()
    trainer.save_model("saved")
    of_other = _logits(trainer.model)
    trainer.model.set_adapter("default")
    adapter = read("saved/other/adapter_model.safetensors")
    return {"history": history(trainer), "adapter": adapter, "logits": [of_other, _logits(trainer.model)]}


@program
def saved_by_the_engine(given: Any) -> Any:
    """DeepSpeed's engine passes the call on to the model."""

    def then(trainer: Trainer) -> dict[str, Any]:
        engine = trainer.model if given is None else trainer.model_wrapped
        engine.save_pretrained("whole")
        engine.save_pretrained("chosen", selected_adapters=["default"], is_main_process=True)
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved_llama()), "whole")
        chosen = read("chosen/adapter_model.safetensors")
        with deepspeed.zero.GatheredParameters(list(loaded.parameters()), enabled=given is not None):
            logits = _logits(loaded)
        return {"whole": read("whole/adapter_model.safetensors"), "chosen": chosen, "logits": logits}

    return adapted(given, LoraConfig(r=4, **_TARGETS), then)
