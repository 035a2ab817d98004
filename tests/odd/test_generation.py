"""Texts written between steps: beams and samples, their scores, and what learns from them; PEFT's other adapters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.odd.test_transformers import GPT2, LLAMA, T5, WHISPER, WORDS, adapted, build, pairs, sounds, text, trained
from tests.support.cases import EACH_BF16, STAGE_2_BF16, Case, Cases

pytest.importorskip("transformers")
pytest.importorskip("peft")

cases = Cases(__name__)
SETTINGS = (EACH_BF16, STAGE_2_BF16)


def _gpt2() -> Any:
    return build("GPT2LMHeadModel", "GPT2Config", **GPT2)


def _llama() -> Any:
    return build("LlamaForCausalLM", "LlamaConfig", **LLAMA)


def _t5() -> Any:
    return build("T5ForConditionalGeneration", "T5Config", **T5, pad_token_id=0, eos_token_id=1)


def written(world: Any, model: Any, name: str, *, step: int, **options: Any) -> Any:
    """What ``generate`` gives of a seed, with its scores."""
    model.eval()
    torch.manual_seed(100 + step)
    prompt = world.tokens(2, 3, below=WORDS, seed=step)
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=5,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    world.observe(f"{name}: tokens", out.sequences)
    world.observe(f"{name}: scores", [torch.nan_to_num(score) for score in out.scores])
    model.train()
    return out.sequences


def loop(name: str, make: Callable[[], Any], inputs: Any = text, **options: Any) -> None:
    def script(world: Any) -> None:
        model = make()
        engine = world.initialize(model)
        for step in range(2):
            written(world, model, name, step=step, **options)
            world.backward(engine, engine(**inputs(world, step)).loss)
            engine.step()
        written(world, model, name, step=2, **options)

    script.__name__, script.__doc__ = name, name.replace("_", " ")
    cases(settings=SETTINGS, must="equal", slow=name not in ("beams", "samples"))(script)


BEAMS = {"num_beams": 3, "do_sample": False, "num_return_sequences": 2}
SAMPLES = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3}
loop("beams", _gpt2, **BEAMS)
loop("samples", _llama, **SAMPLES)
loop("sampled_beams", _llama, num_beams=2, do_sample=True)
loop("samples_without_a_cache", _gpt2, use_cache=False, **SAMPLES)
loop("samples_with_a_static_cache", _llama, cache_implementation="static", **SAMPLES)
loop("samples_with_an_offloaded_cache", _llama, cache_implementation="dynamic", **SAMPLES)
loop("penalties", _gpt2, do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=2)
loop("beams_of_an_adapter", adapted(_llama, target_modules=["q_proj", "v_proj"]), **BEAMS)
loop("samples_by_lookup", _llama, prompt_lookup_num_tokens=2, do_sample=False)


@cases(settings=SETTINGS, must="equal")
def beams_of_an_encoder_and_decoder(world: Any) -> None:
    model = _t5()
    engine = world.initialize(model)
    for step in range(2):
        written(world, model, "t5", step=step, **BEAMS)
        world.backward(engine, engine(**pairs(world, step)).loss)
        engine.step()
    written(world, model, "t5", step=2, **SAMPLES)


@cases(settings=SETTINGS, must="equal")
def an_assistant_drafts(world: Any) -> None:
    """Two engines: the smaller one proposes."""
    model, assistant = _llama(), build("LlamaForCausalLM", "LlamaConfig", **{**LLAMA, "num_hidden_layers": 1})
    engine, other = world.initialize(model), world.initialize(assistant)
    for step in range(2):
        model.eval()
        assistant.eval()
        prompt = world.tokens(1, 3, below=WORDS, seed=step)
        with torch.no_grad():
            world.observe(
                "drafted",
                model.generate(prompt, assistant_model=assistant, max_new_tokens=6, do_sample=False, pad_token_id=0),
            )
        model.train()
        assistant.train()
        for each in (engine, other):
            world.backward(each, each(**text(world, step)).loss)
            each.step()


@cases(settings=SETTINGS, must="equal")
def policy_gradient_of_samples(world: Any) -> None:
    """As GRPO: samples, their log-probabilities now and of the reference, a weighted loss."""
    model: Any = adapted(_llama, target_modules=["q_proj", "v_proj"])()
    engine = world.initialize(model, accumulation=2)
    for step in range(4):
        with torch.no_grad():
            tokens = written(world, model, "policy", step=step, **SAMPLES)
        with torch.no_grad(), model.disable_adapter():
            reference = engine(input_ids=tokens).logits.float().log_softmax(-1)
        now = engine(input_ids=tokens).logits.float().log_softmax(-1)
        loss = (now - reference).square().mean() - now.gather(-1, tokens[..., None]).mean()
        world.backward(engine, loss)
        engine.step()


@cases(settings=SETTINGS, must="equal")
def preferences_of_two_answers(world: Any) -> None:
    """DPO: two forwards a loss, and two without gradients."""
    model: Any = adapted(_llama, target_modules=["q_proj", "v_proj"])()
    engine = world.initialize(model)

    def logp(tokens: Any) -> Any:
        return engine(input_ids=tokens).logits.float().log_softmax(-1).gather(-1, tokens[..., None]).sum((1, 2))

    for step in range(2):
        good, bad = (world.tokens(2, 6, below=WORDS, seed=2 * step + k) for k in range(2))
        with torch.no_grad(), model.disable_adapter():
            base = logp(good) - logp(bad)
        world.backward(engine, -F.logsigmoid(0.1 * (logp(good) - logp(bad) - base)).mean())
        engine.step()


@cases(settings=SETTINGS)
def embeddings_grow_between_init_and_initialize(world: Any) -> None:
    for make in (_llama, _t5):
        model: Any = world.build(make)
        torch.manual_seed(5)
        model.resize_token_embeddings(WORDS + 7, mean_resizing=False)
        engine = world.initialize(model)
        trained(world, engine, text if make is _llama else pairs)
        written(world, model, "grown", step=1, **SAMPLES)


@cases(settings=SETTINGS)
def embeddings_grow_by_the_mean_between_init_and_initialize(world: Any) -> None:
    model: Any = world.build(_llama)
    torch.manual_seed(5)
    model.resize_token_embeddings(WORDS + 7)
    trained(world, world.initialize(model), text)


@cases(settings=SETTINGS)
def embeddings_shrink_after_initialize(world: Any) -> None:
    model: Any = _llama()
    engine = world.initialize(model)
    trained(world, engine, text, 1)
    model.resize_token_embeddings(WORDS - 7, mean_resizing=False)
    trained(world, engine, lambda w, s: {k: v.clamp(max=WORDS - 8) for k, v in text(w, s).items()}, 1)


@cases(settings=SETTINGS, must="equal")
def whisper_writes(world: Any) -> None:
    model: Any = build("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER)
    engine = world.initialize(model)
    for step in range(2):
        world.backward(engine, engine(**sounds(world, step)).loss)
        engine.step()
        model.eval()
        with torch.no_grad():
            features = world.randn(1, 8, 32, seed=step)
            encoded = model.get_encoder()(features)
            world.observe("encoded", encoded[0])
        model.train()


# Other adapters


def adapter(name: str, make_config: Callable[[Any], Any], **options: Any) -> None:
    def script(world: Any) -> None:
        peft = importlib.import_module("peft")
        base: Any = _llama()
        torch.manual_seed(2)
        model = peft.get_peft_model(base, make_config(peft)).train()
        engine = world.initialize(model)
        trained(world, engine, text, 3)
        written(world, model, name, step=1, **SAMPLES)

    def under_init(world: Any) -> None:
        peft = importlib.import_module("peft")
        base: Any = world.build(_llama)
        torch.manual_seed(2)
        model = peft.get_peft_model(base, make_config(peft)).train()
        trained(world, world.initialize(model), text, 2)

    for function, suffix in ((script, ""), (under_init, "_after_init")):
        function.__name__ = name + suffix
        function.__doc__ = function.__name__.replace("_", " ")
        cases(settings=SETTINGS, slow=True, **options)(function)


QV = ["q_proj", "v_proj"]
adapter(
    "ia3",
    lambda p: p.IA3Config(target_modules=[*QV, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
)
adapter(
    "adalora",
    lambda p: p.AdaLoraConfig(
        target_modules=QV, init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, task_type="CAUSAL_LM"
    ),
)
adapter("prompt_tuning", lambda p: p.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
adapter("prefix_tuning", lambda p: p.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
adapter("p_tuning", lambda p: p.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"))
adapter("vera", lambda p: p.VeraConfig(target_modules=QV, r=4, task_type="CAUSAL_LM"))
adapter("loha", lambda p: p.LoHaConfig(target_modules=QV, r=3, task_type="CAUSAL_LM", init_weights=False))
adapter("lokr", lambda p: p.LoKrConfig(target_modules=QV, r=3, task_type="CAUSAL_LM", init_weights=False))
adapter(
    "oft", lambda p: p.OFTConfig(target_modules=QV, oft_block_size=4, r=0, task_type="CAUSAL_LM", init_weights=False)
)
adapter(
    "boft",
    lambda p: p.BOFTConfig(target_modules=["q_proj"], boft_block_size=4, task_type="CAUSAL_LM", init_weights=False),
)
adapter("fourier", lambda p: p.FourierFTConfig(target_modules=["q_proj"], n_frequency=20, task_type="CAUSAL_LM"))
adapter("norms", lambda p: p.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"))
adapter(
    "some_tokens",
    lambda p: p.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[3, 5], task_type="CAUSAL_LM"),
)
adapter("hra", lambda p: p.HRAConfig(target_modules=QV, r=4, task_type="CAUSAL_LM"))
adapter(
    "rank_stabilised",
    lambda p: p.LoraConfig(
        target_modules=QV, r=3, use_rslora=True, init_lora_weights="gaussian", task_type="CAUSAL_LM"
    ),
)
adapter("pissa", lambda p: p.LoraConfig(target_modules=QV, r=3, init_lora_weights="pissa", task_type="CAUSAL_LM"))
adapter("olora", lambda p: p.LoraConfig(target_modules=QV, r=3, init_lora_weights="olora", task_type="CAUSAL_LM"))
adapter(
    "lora_with_dropout_and_bias",
    lambda p: p.LoraConfig(target_modules=QV, r=3, lora_dropout=0.3, bias="all", task_type="CAUSAL_LM"),
)
adapter(
    "lora_that_saves_modules",
    lambda p: p.LoraConfig(target_modules=QV, r=3, modules_to_save=["lm_head", "embed_tokens"], task_type="CAUSAL_LM"),
)
adapter(
    "lora_of_parameters_and_tokens",
    lambda p: p.LoraConfig(target_modules=QV, r=3, trainable_token_indices=[3, 5], task_type="CAUSAL_LM"),
)


def _two(peft: Any) -> Any:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, target_modules=QV, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(_llama(), config)
    model.add_adapter("other", config)
    return model.train()


@cases(settings=SETTINGS)
def two_adapters_in_turn(world: Any) -> None:
    peft = importlib.import_module("peft")
    model = _two(peft)
    engine = world.initialize(model)
    for step in range(4):
        model.set_adapter("other" if step % 2 else "default")
        world.backward(engine, engine(**text(world, step)).loss)
        engine.step()


@cases(settings=SETTINGS, must="equal")
def two_adapters_in_turn_that_train_from_the_start(world: Any) -> None:
    """As the refusal of the other case says."""
    peft = importlib.import_module("peft")
    model = _two(peft)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    engine = world.initialize(model)
    for step in range(4):
        model.set_adapter("other" if step % 2 else "default")
        world.backward(engine, engine(**text(world, step)).loss)
        engine.step()


@cases(settings=SETTINGS)
def two_adapters_at_once(world: Any) -> None:
    peft = importlib.import_module("peft")
    model = _two(peft)
    model.base_model.set_adapter(["default", "other"])
    engine = world.initialize(model)
    trained(world, engine, text, 2)


@cases(settings=SETTINGS)
def adapters_are_merged_and_unmerged_between_steps(world: Any) -> None:
    model: Any = adapted(_llama, target_modules=QV)()
    engine = world.initialize(model)
    for step in range(2):
        trained(world, engine, text, 1)
        model.merge_adapter()
        written(world, model, "merged", step=step, **SAMPLES)
        model.unmerge_adapter()


@cases(settings=SETTINGS)
def an_adapter_is_deleted(world: Any) -> None:
    peft = importlib.import_module("peft")
    model = _two(peft)
    engine = world.initialize(model)
    trained(world, engine, text, 1)
    model.delete_adapter("other")
    trained(world, engine, text, 1)


@cases(settings=SETTINGS)
def an_adapter_is_added_after_a_step(world: Any) -> None:
    peft = importlib.import_module("peft")
    model: Any = adapted(_llama, target_modules=QV)()
    engine = world.initialize(model)
    trained(world, engine, text, 1)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=QV))
    trained(world, engine, text, 1)


@cases(settings=SETTINGS)
def weighted_adapters(world: Any) -> None:
    peft = importlib.import_module("peft")
    model = _two(peft)
    engine = world.initialize(model)
    trained(world, engine, text, 1)
    model.add_weighted_adapter(["default", "other"], [0.3, 0.7], "both", combination_type="linear")
    model.set_adapter("both")
    with torch.no_grad():
        world.observe("both", engine(**text(world, 3)).loss)


@cases(settings=SETTINGS)
def adalora_is_updated_each_step(world: Any) -> None:
    peft = importlib.import_module("peft")
    torch.manual_seed(2)
    config = peft.AdaLoraConfig(
        target_modules=QV, init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, deltaT=1, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(_llama(), config).train()
    engine = world.initialize(model)
    for step in range(4):
        world.backward(engine, engine(**text(world, step)).loss)
        model.base_model.update_and_allocate(step)
        engine.step()


@cases(settings=SETTINGS)
def layers_are_dropped_by_chance(world: Any) -> None:
    """LayerDrop: what is called depends on numbers drawn."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
            self.head = nn.Linear(24, 24)

        def forward(self, x: Any) -> Any:
            for layer in self.body:
                if torch.rand(()) < 0.5:
                    x = x + layer(x).tanh()
            return self.head(x)

    engine = world.initialize(Dropping())
    for step in range(5):
        torch.manual_seed(step)
        world.backward(engine, engine(world.randn(4, 24, seed=step)).float().square().mean())
        engine.step()


@cases.parametrized()
def test_generation(case: Case, judged: Any) -> None:
    judged(__name__, case)
