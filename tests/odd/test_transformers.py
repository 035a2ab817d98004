"""Models of Transformers from config objects, tiny, with and without PEFT, over every threshold."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import DEFAULT, EACH, EACH_BF16, GROUPED, NVME, Case, Cases

pytest.importorskip("transformers")
pytest.importorskip("peft")

cases = Cases(__name__)
EVERY = (EACH, GROUPED, DEFAULT, EACH_BF16)
WORDS = 61
LENGTH = 8


def text(world: Any, step: int) -> dict[str, Any]:
    tokens = world.tokens(2, LENGTH, below=WORDS, seed=step)
    return {"input_ids": tokens, "labels": tokens}


def encoded(world: Any, step: int) -> dict[str, Any]:
    """For encoders: a mask, and a class a token."""
    tokens = world.tokens(2, LENGTH, below=WORDS, seed=step)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def pairs(world: Any, step: int) -> dict[str, Any]:
    return {
        "input_ids": world.tokens(2, LENGTH, below=WORDS, seed=step),
        "labels": world.tokens(2, LENGTH, below=WORDS, seed=step + 50),
    }


def pictures(world: Any, step: int) -> dict[str, Any]:
    return {"pixel_values": world.randn(2, 3, 16, 16, seed=step), "labels": torch.tensor([0, 1])}


def sounds(world: Any, step: int) -> dict[str, Any]:
    return {"input_features": world.randn(2, 8, 32, seed=step), "labels": world.tokens(2, 5, below=WORDS, seed=step)}


def build(model: str, config: str, **settings: Any) -> nn.Module:
    """A model of Transformers by the names of its class and its configuration's."""
    library = importlib.import_module("transformers")
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built: nn.Module = getattr(library, model)(getattr(library, config)(**settings))
    return built.train()


LLAMA: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VIT: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WHISPER: dict[str, Any] = {
    "vocab_size": WORDS,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def trained(world: Any, engine: Any, inputs: Callable[[Any, int], dict[str, Any]], num_steps: int = 2) -> None:
    world.train(engine, lambda step: engine(**inputs(world, step)).loss, num_steps=num_steps)


LIKE_OTHERS = ("mistral", "qwen2", "gemma", "roberta", "distilbert", "albert", "opt", "gpt_neox", "bloom", "mamba")
"""Left to the slow tests."""


def model(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[Any, int], dict[str, Any]] = text,
    *,
    init: bool = True,
    **kwargs: Any,
) -> None:
    """Cases that train the model, built plainly and (once, the dearer way) under Init."""

    def script(world: Any) -> None:
        engine = world.initialize(make())
        trained(world, engine, inputs)
        engine.eval()
        with torch.no_grad():
            world.observe("evaluation", engine(**inputs(world, 9)).loss)

    script.__name__ = name
    script.__doc__ = name.replace("_", " ")
    options: dict[str, Any] = {"must": "equal", "settings": EVERY, "slow": name in LIKE_OTHERS, **kwargs}
    cases(**options)(script)
    if init:

        def under_init(world: Any) -> None:
            trained(world, world.initialize(world.build(make)), inputs)

        under_init.__name__ = f"{name}_under_init"
        under_init.__doc__ = f"{name.replace('_', ' ')} under Init"
        cases(must="equal", settings=(EACH, DEFAULT))(under_init)


model("gpt2", lambda: build("GPT2LMHeadModel", "GPT2Config", **GPT2), also=(NVME,))
model("llama", lambda: build("LlamaForCausalLM", "LlamaConfig", **LLAMA), also=(NVME,))
model("llama_tied", lambda: build("LlamaForCausalLM", "LlamaConfig", **LLAMA, tie_word_embeddings=True))
model("mistral", lambda: build("MistralForCausalLM", "MistralConfig", **LLAMA), init=False)
model("qwen2", lambda: build("Qwen2ForCausalLM", "Qwen2Config", **LLAMA), init=False)
model("gemma", lambda: build("GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=8), init=False)
model("mixtral", lambda: build("MixtralForCausalLM", "MixtralConfig", **LLAMA, **EXPERTS), also=(NVME,))
model(
    "qwen2_moe",
    lambda: build(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **LLAMA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    init=False,
)
model("t5", lambda: build("T5ForConditionalGeneration", "T5Config", **T5), pairs, also=(NVME,))
model("bert", lambda: build("BertForMaskedLM", "BertConfig", **BERT), encoded)
model("roberta", lambda: build("RobertaForMaskedLM", "RobertaConfig", **BERT), encoded, init=False)
model(
    "distilbert",
    lambda: build(
        "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48
    ),
    encoded,
    init=False,
)
model(
    "albert",
    lambda: build("AlbertForMaskedLM", "AlbertConfig", **BERT, embedding_size=16),
    encoded,
    init=False,
)
model("vit", lambda: build("ViTForImageClassification", "ViTConfig", **VIT), pictures)
model("whisper", lambda: build("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), sounds, init=False)
model(
    "opt",
    lambda: build(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=WORDS,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        pad_token_id=0,
    ),
    init=False,
)
model("gpt_neox", lambda: build("GPTNeoXForCausalLM", "GPTNeoXConfig", **BERT), init=False)
model(
    "bloom",
    lambda: build("BloomForCausalLM", "BloomConfig", vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4),
    init=False,
)
model(
    "mamba",
    lambda: build(
        "MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
    init=False,
)


def checkpointed(use_reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        built: Any = build("LlamaForCausalLM", "LlamaConfig", **LLAMA, use_cache=False)
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        if use_reentrant:
            built.enable_input_require_grads()
        return built

    return make


model("llama_checkpointed", checkpointed(False), init=False)
model("llama_checkpointed_with_reentrance", checkpointed(True), init=False)


def adapted(
    base: Callable[[], nn.Module], *, checkpoint: bool | None = None, **settings: Any
) -> Callable[[], nn.Module]:
    """A PEFT model; ``checkpoint`` is use_reentrant."""

    def make() -> nn.Module:
        peft = importlib.import_module("peft")
        model: Any = base()
        if checkpoint is not None:
            model.config.use_cache = False
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoint})
            model.enable_input_require_grads()
        torch.manual_seed(2)
        config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, init_lora_weights=False, **settings)
        return peft.get_peft_model(model, config).train()

    return make


def _llama() -> nn.Module:
    return build("LlamaForCausalLM", "LlamaConfig", **LLAMA)


QKV = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
model("lora", adapted(_llama, **QKV), also=(NVME,))
model("lora_on_all_linears", adapted(_llama, target_modules="all-linear"), init=False)
model("lora_with_embeddings", adapted(_llama, target_modules=["q_proj", "embed_tokens"]), init=False)
model("lora_with_modules_to_save", adapted(_llama, **QKV, modules_to_save=["lm_head"]), init=False)
model("lora_checkpointed", adapted(_llama, checkpoint=False, **QKV), init=False)
model("lora_checkpointed_with_reentrance", adapted(_llama, checkpoint=True, **QKV), init=False)
model("dora", adapted(_llama, use_dora=True, **QKV))
model("dora_checkpointed", adapted(_llama, checkpoint=False, use_dora=True, **QKV), init=False)
model(
    "lora_on_gpt2",
    adapted(lambda: build("GPT2LMHeadModel", "GPT2Config", **GPT2), target_modules=["c_attn"], fan_in_fan_out=True),
    init=False,
)


def _gpt2() -> Any:
    return build("GPT2LMHeadModel", "GPT2Config", **GPT2)


@cases(must="equal", settings=(*EVERY, NVME))
def generate_between_steps(world: Any) -> None:
    """``engine.module.generate`` never calls the engine."""
    built = _gpt2()
    engine = world.initialize(built)
    for step in range(2):
        built.eval()
        prompt = world.tokens(1, 3, below=WORDS, seed=step)
        with torch.no_grad():
            world.observe("generated", built.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0))
        built.train()
        world.backward(engine, engine(**text(world, step)).loss)
        engine.step()


@cases
def generate_through_the_engine(world: Any) -> None:
    engine = world.initialize(_gpt2())
    trained(world, engine, text, 1)
    engine.eval()
    prompt = world.tokens(1, 3, below=WORDS)
    world.observe("generated", engine.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0))


@cases
def save_pretrained(world: Any) -> None:
    """It writes what ``state_dict`` gives."""
    import tempfile

    import safetensors.torch

    built = _gpt2()
    trained(world, world.initialize(built), text, 1)
    with tempfile.TemporaryDirectory() as directory:
        built.save_pretrained(directory)
        world.observe("file", safetensors.torch.load_file(f"{directory}/model.safetensors"))


@cases(must="equal")
def save_pretrained_on_a_rank_that_writes_nothing(world: Any) -> None:
    """As ``accelerator.unwrap_model(model).save_pretrained(...)`` is called on all ranks."""
    import tempfile
    from pathlib import Path

    built = _gpt2()
    trained(world, world.initialize(built), text, 1)
    with tempfile.TemporaryDirectory() as directory:
        built.save_pretrained(directory, is_main_process=False)
        world.observe("files", len(list(Path(directory).iterdir())))


@cases
def save_pretrained_of_a_child(world: Any) -> None:
    import tempfile

    import safetensors.torch

    built = _gpt2()
    trained(world, world.initialize(built), text, 1)
    with tempfile.TemporaryDirectory() as directory:
        built.transformer.save_pretrained(directory)
        world.observe("file", safetensors.torch.load_file(f"{directory}/model.safetensors"))


@cases(must="equal")
def save_pretrained_with_the_full_state_dict(world: Any) -> None:
    import tempfile

    import safetensors.torch

    built = _gpt2()
    engine = world.initialize(built)
    trained(world, engine, text, 1)
    with tempfile.TemporaryDirectory() as directory:
        built.save_pretrained(directory, state_dict=engine.full_state_dict())
        world.observe("file", safetensors.torch.load_file(f"{directory}/model.safetensors"))


@cases
def save_pretrained_of_an_adapter(world: Any) -> None:
    import tempfile

    import safetensors.torch

    built: Any = adapted(_llama, **QKV)()
    trained(world, world.initialize(built), text, 1)
    with tempfile.TemporaryDirectory() as directory:
        built.save_pretrained(directory)
        world.observe("file", safetensors.torch.load_file(f"{directory}/adapter_model.safetensors"))


@cases
def merge_and_unload_after_training(world: Any) -> None:
    built: Any = adapted(_llama, **QKV)()
    engine = world.initialize(built)
    trained(world, engine, text, 1)
    merged = built.merge_and_unload()
    with torch.no_grad():
        world.observe("merged", merged(**text(world, 3)).loss)


@cases
def the_adapter_is_disabled_for_a_reference(world: Any) -> None:
    """DPO without a second model."""
    built: Any = adapted(_llama, **QKV)()
    engine = world.initialize(built)
    for step in range(2):
        with torch.no_grad(), built.disable_adapter():
            world.observe("reference", engine(**text(world, step)).loss)
        world.backward(engine, engine(**text(world, step)).loss)
        engine.step()


@cases
def resize_token_embeddings_before_initialize(world: Any) -> None:
    built: Any = world.build(_gpt2)
    torch.manual_seed(5)
    built.resize_token_embeddings(WORDS + 6, mean_resizing=False)
    trained(world, world.initialize(built), text)


@cases
def resize_token_embeddings_after_a_step(world: Any) -> None:
    built = _gpt2()
    engine = world.initialize(built)
    trained(world, engine, text, 1)
    torch.manual_seed(5)
    built.resize_token_embeddings(WORDS + 6, mean_resizing=False)
    with torch.no_grad():  # training on, torch's fused optimizer reads beyond the old moments and crashes
        world.observe("evaluation", engine(**text(world, 1)).loss)


@cases
def adapters_added_between_init_and_initialize(world: Any) -> None:
    peft = importlib.import_module("peft")
    base: Any = world.build(_llama)
    torch.manual_seed(2)
    built = peft.get_peft_model(base, peft.LoraConfig(r=3, init_lora_weights=False, **QKV)).train()
    trained(world, world.initialize(built), text)


@cases
def dora_added_between_init_and_initialize(world: Any) -> None:
    peft = importlib.import_module("peft")
    base: Any = world.build(_llama)
    torch.manual_seed(2)
    built = peft.get_peft_model(base, peft.LoraConfig(r=3, use_dora=True, init_lora_weights=False, **QKV)).train()
    trained(world, world.initialize(built), text)


@cases
def the_trainers_gradient_clipping(world: Any) -> None:
    """``accelerator.clip_grad_norm_`` without an integration."""
    built = _gpt2()
    engine = world.initialize(built)
    for step in range(2):
        world.backward(engine, engine(**text(world, step)).loss)
        nn.utils.clip_grad_norm_(built.parameters(), 0.1)
        engine.step()


@cases
def num_parameters_and_floating_point_ops(world: Any) -> None:
    built = _gpt2()
    trained(world, world.initialize(built), text, 1)
    world.observe("parameters", built.num_parameters())
    world.observe("dtype", str(built.dtype))
    world.observe("device", str(built.device))


@cases(must="equal")
def outputs_with_hidden_states_and_attentions(world: Any) -> None:
    built: Any = build("GPT2LMHeadModel", "GPT2Config", **GPT2, attn_implementation="eager")
    engine = world.initialize(built)
    for step in range(2):
        output = engine(**text(world, step), output_hidden_states=True, output_attentions=True)
        hidden: Tensor = output.hidden_states[1]
        world.backward(engine, output.loss + hidden.float().square().mean() + output.attentions[0].float().std())
        engine.step()


@cases
def a_state_dict_goes_through_bytes(world: Any) -> None:
    built = _gpt2()
    trained(world, world.initialize(built), text, 1)
    file = io.BytesIO()
    torch.save(built.state_dict(), file)
    file.seek(0)
    world.observe("weights", dict(torch.load(file)))


@cases.parametrized()
def test_transformers(case: Case, judged: Any) -> None:
    judged(__name__, case)
