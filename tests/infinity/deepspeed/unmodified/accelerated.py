"""Loops of one's own with Accelerate."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, get_scheduler, set_seed

from tests.infinity.deepspeed.unmodified.nets import Rows, llama_config, padded, read, weights
from tests.infinity.deepspeed.unmodified.run import program, programs_over


def accelerator_of(given: Any, **others: Any) -> Accelerator:
    plugin = None if given is None else DeepSpeedPlugin(hf_ds_config=given)
    return distributed(Accelerator(deepspeed_plugin=plugin, **{"gradient_accumulation_steps": 2, **others}), given)


def distributed(accelerator: Accelerator, given: Any) -> Accelerator:
    """It, if it makes engines where there is a configuration: it leaves the plugin out without a word for cpu=True."""
    if (accelerator.distributed_type is DistributedType.DEEPSPEED) is (given is None):
        raise AssertionError(accelerator.distributed_type)
    return accelerator


def parts(accelerator: Accelerator, *, ragged: bool = False) -> tuple[Any, ...]:
    set_seed(0)
    model = LlamaForCausalLM(llama_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = get_scheduler("cosine", optimizer, 1, 12)
    loader = DataLoader(Rows(11 if ragged else 12, ragged=ragged), batch_size=2, collate_fn=padded)
    return accelerator.prepare(model, optimizer, loader, schedule)


def epoch(accelerator: Accelerator, made: tuple[Any, ...], clip: float | None = 1.0) -> dict[str, list[float]]:
    model, optimizer, loader, schedule = made
    losses, norms, rates = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                norms.append(None if norm is None else float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(schedule.get_last_lr())
    return {"losses": losses, "norms": norms, "rates": rates}


@program
def accumulated_and_clipped(given: Any) -> Any:
    config = None if given is None else {**given, "gradient_clipping": 1.0}
    accelerator = accelerator_of(config)
    made = parts(accelerator)
    first, second = epoch(accelerator, made), epoch(accelerator, made)
    for found in (first, second):
        del found["norms"]  # DeepSpeed clips inside its step: Accelerate has no norm to return before it
    return {"first": first, "second": second, "state": accelerator.get_state_dict(made[0])}


@program
def an_epoch_that_ends_within_an_accumulation(given: Any) -> Any:
    accelerator = accelerator_of(
        given if given is None else {**given, "gradient_clipping": 0.0}, gradient_accumulation_steps=4
    )
    made = parts(accelerator, ragged=True)
    found = [epoch(accelerator, made, None), epoch(accelerator, made, None)]
    return {"epochs": found, "state": accelerator.get_state_dict(made[0])}


@program
def saved_and_loaded(given: Any) -> Any:
    accelerator = accelerator_of(given if given is None else {**given, "gradient_clipping": 0.0})
    made = parts(accelerator)
    accelerator.register_for_checkpointing(Counter())
    first = epoch(accelerator, made, None)
    accelerator.save_state("state")
    second = epoch(accelerator, made, None)
    accelerator.load_state("state")
    again = epoch(accelerator, made, None)
    if again != second:
        raise AssertionError("what was loaded is not what was saved")
    return {"first": first, "second": second, "state": accelerator.get_state_dict(made[0])}


class Counter:
    """What scripts keep beside the model."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state != {"count": 3}:
            raise ValueError(state)


@program
def unwrapped_and_saved(given: Any) -> Any:
    accelerator = accelerator_of(given if given is None else {**given, "gradient_clipping": 0.0})
    made = parts(accelerator)
    epoch(accelerator, made, None)
    state = accelerator.get_state_dict(made[0])
    accelerator.unwrap_model(made[0]).save_pretrained("saved", state_dict=state, save_function=accelerator.save)
    accelerator.save_model(made[0], "modelled")
    return {"saved": read("saved/model.safetensors"), "modelled": read("modelled/model.safetensors")}


@program
def evaluated_between(given: Any) -> Any:
    accelerator = accelerator_of(given if given is None else {**given, "gradient_clipping": 0.0})
    made = parts(accelerator)
    test = accelerator.prepare(DataLoader(Rows(5), batch_size=2, collate_fn=padded))
    found = []
    for _ in range(2):
        made[0].eval()
        for batch in test:
            with torch.no_grad():
                logits = made[0](**batch).logits
            found.append(accelerator.gather_for_metrics((logits, batch["labels"]))[0])
        made[0].train()
        epoch(accelerator, made, None)
    generated = accelerator.unwrap_model(made[0]).generate(
        input_ids=Rows(2)[0]["input_ids"][None], max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    return {"logits": found, "tokens": generated, "weights": weights(accelerator.unwrap_model(made[0]))}


@program
def two_models_two_optimizers(given: Any) -> Any:
    """A frozen teacher and a pupil, of which Accelerate makes an engine each."""
    plugins = None
    if given is not None:
        first = {**given, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 2}
        second = dict(first)
        plugins = {"pupil": DeepSpeedPlugin(hf_ds_config=first), "rival": DeepSpeedPlugin(hf_ds_config=second)}
    accelerator = distributed(Accelerator(deepspeed_plugins=plugins), given)
    set_seed(0)
    models = [LlamaForCausalLM(llama_config()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    loader = DataLoader(Rows(8), batch_size=2, collate_fn=padded)
    prepared = []
    for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        if given is not None:
            accelerator.state.select_deepspeed_plugin(("pupil", "rival")[at])
        prepared.append(accelerator.prepare(model, optimizer))
    loader = accelerator.prepare(loader)
    losses = []
    for batch in loader:
        for model, optimizer in prepared:
            loss = model(**batch).loss
            accelerator.backward(loss) if given is None else model.backward(loss)
            optimizer.step() if given is None else model.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "weights": [weights(accelerator.unwrap_model(model)) for model, _ in prepared]}


class Signed(torch.optim.AdamW):
    """An optimizer of somebody's own, with the groups of AdamW."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad.sign(), alpha=-group["lr"])


def stepped(given: Any, make: Any) -> dict[str, Any]:
    """Three steps by the optimizer that ``make`` gives for parameters."""
    accelerator = accelerator_of(given if given is None else {**given, "gradient_clipping": 0.0})
    set_seed(0)
    model = LlamaForCausalLM(llama_config())
    loader = DataLoader(Rows(12), batch_size=2, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, make(list(model.parameters())), loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": accelerator.get_state_dict(model)}


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    optimizer.register_step_pre_hook(halve)
    return optimizer


def halve(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def stepped_before(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(params, lr=1e-2)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@programs_over(
    a_subclass=lambda params: Signed(params, lr=1e-2),
    sgd=lambda params: torch.optim.SGD(params, lr=1e-2),
    hooked=hooked,
    stepped_before=stepped_before,
    adam=lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    adagrad=lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.5),
)
def stepped_by(given: Any, make: Any) -> Any:
    """Under offload_optimizer Accelerate puts DeepSpeedCPUAdam in its place, or DeepSpeedCPUAdagrad."""
    return stepped(given, make)


def clipped(given: Any, configured: float, max_norm: float, norm_type: float = 2.0, params: Any = None) -> Any:
    accelerator = accelerator_of(given if given is None else {**given, "gradient_clipping": configured})
    model, optimizer, loader, _ = parts(accelerator)
    norms, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                clipped = model.parameters() if params is None else params(accelerator.unwrap_model(model))
                norms.append(float(accelerator.clip_grad_norm_(clipped, max_norm, norm_type=norm_type)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


@programs_over(
    the_same={"configured": 0.5, "max_norm": 0.5},
    nothing={"configured": 0.0, "max_norm": float("inf")},
    another_norm={"configured": 1.0, "max_norm": 0.3},
    not_configured={"configured": 0.0, "max_norm": 1.0},
    another_type={"configured": 1.0, "max_norm": 1.0, "norm_type": float("inf")},
    a_part={"configured": 0.1, "max_norm": 0.1, "params": lambda model: model.model.parameters()},
)
def clipped_to(given: Any, words: dict[str, Any]) -> Any:
    return clipped(given, **words)


def two_models(given: Any, loss_of: Any) -> Any:
    accelerator = accelerator_of(
        given if given is None else {**given, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 2},
        gradient_accumulation_steps=1,
    )
    set_seed(0)
    models = [LlamaForCausalLM(llama_config()) for _ in range(2)]
    made = [accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in models]
    losses = []
    for number in range(2):
        batch = padded([Rows()[number]])
        loss = loss_of([model(**batch).loss for model, _ in made])
        accelerator.backward(loss)
        for _, optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": [weights(accelerator.unwrap_model(model)) for model, _ in made]}


@programs_over(the_second=lambda losses: losses[1], both=sum)
def two_models_one_accelerator(given: Any, loss_of: Any) -> Any:
    return two_models(given, loss_of)


@program
def prepared_apart(given: Any) -> Any:
    accelerator = accelerator_of(
        given if given is None else {**given, "train_micro_batch_size_per_gpu": 2}, gradient_accumulation_steps=1
    )
    set_seed(0)
    model = LlamaForCausalLM(llama_config())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(**padded([Rows()[0]])).loss)
    optimizer.step()
    return {"weights": weights(accelerator.unwrap_model(model))}
