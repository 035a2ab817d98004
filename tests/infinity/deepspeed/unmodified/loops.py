"""Loops of one's own over ``deepspeed.initialize``, each beside the loop that its user had before, of plain torch."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from tests.infinity.deepspeed.unmodified.nets import weights
from tests.infinity.deepspeed.unmodified.run import program


class Net(nn.Module):
    """Three layers, of which the middle one may be recomputed by ``checkpoint``."""

    def __init__(self, checkpoint: Any = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 4)
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        middle = lambda x: torch.tanh(self.middle(x))  # noqa: E731
        return self.last(middle(x) if self.checkpoint is None else self.checkpoint(middle, x))


def inputs(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 12, generator=generator) for _ in range(count)]


def config(given: Any, **others: Any) -> dict[str, Any]:
    """With an optimizer that steps as torch's fused AdamW does."""
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "optimizer": adam}
    return {**sizes, "zero_optimization": given["zero_optimization"], **others}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def seeded(made: Any = Net) -> Any:
    torch.manual_seed(1)
    return made()


def looped(given: Any, model: nn.Module, look: Any = None, **others: Any) -> tuple[dict[str, Any], Any]:
    """Losses and weights. ``look(model, engine or optimizer)`` is called between backward and step."""
    if given is not None:
        engine = deepspeed.initialize(model=model, config=config(given, **others), model_parameters=model.parameters())[
            0
        ]
    else:
        optimizer = adamw(model)
    losses, looks = [], []
    for x in inputs():
        out = (model if given is None else engine)(x)
        loss = out.square().mean()
        loss.backward() if given is None else engine.backward(loss)
        if look is not None:
            looks.append(look(model, optimizer if given is None else engine))
        (optimizer if given is None else engine).step()
        if given is None:
            optimizer.zero_grad()
        losses.append(loss.item())
    found = {"losses": losses, "looks": looks, "weights": weights(model)}
    return found, (optimizer if given is None else engine)


@program
def made_under_init(given: Any) -> Any:
    torch.manual_seed(1)
    if given is None or given["zero_optimization"]["stage"] < 3:
        model = Net()
    else:
        with deepspeed.zero.Init(config_dict_or_path=config(given)):
            model = Net()
    return looped(given, model)[0]


@program
def weights_written_by_the_first_rank(given: Any) -> Any:
    model = seeded()
    with deepspeed.zero.GatheredParameters([model.last.weight], modifier_rank=0, enabled=given is not None):
        torch.nn.init.constant_(model.last.weight, 0.25)
    return looped(given, model)[0]


@program
def gradients_and_states_read(given: Any) -> Any:
    def look(model: nn.Module, holder: Any) -> Any:
        if given is None:
            return [param.grad.clone() for param in model.parameters()]
        return [deepspeed.utils.safe_get_full_grad(param) for param in model.parameters()]

    model = seeded()
    found, holder = looped(given, model, look)
    names = ("exp_avg", "exp_avg_sq")
    if given is None:
        states = [[holder.state[param][name].clone() for name in names] for param in model.parameters()]
        masters = [param.detach().clone() for param in model.parameters()]
    else:
        get = deepspeed.utils.safe_get_full_optimizer_state
        states = [[get(param, name) for name in names] for param in model.parameters()]
        masters = [deepspeed.utils.safe_get_full_fp32_param(param) for param in model.parameters()]
    return {**found, "states": states, "masters": masters}


@program
def checkpointed_by_deepspeed(given: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if given is None:
        return looped(None, seeded(lambda: Net(lambda f, x: checkpoint(f, x, use_reentrant=True))))[0]
    deepspeed.checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=False)
    return looped(given, seeded(lambda: Net(deepspeed.checkpointing.checkpoint)))[0]


@program
def saved_in_16_bits(given: Any) -> Any:
    model = seeded()
    found, holder = looped(given, model)
    if given is None:
        torch.save(model.state_dict(), "pytorch_model.bin")
    else:
        assert holder.save_16bit_model(".", "pytorch_model.bin")
    return {**found, "file": torch.load("pytorch_model.bin")}


@program
def a_checkpoint_made_fp32(given: Any) -> Any:
    model = seeded()
    found, holder = looped(given, model)
    if given is None:
        return {**found, "fp32": {name: each.clone() for name, each in model.state_dict().items()}}
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    holder.save_checkpoint("saved", client_state={"epoch": 3})
    state = get_fp32_state_dict_from_zero_checkpoint("saved")
    return {**found, "fp32": {name: each.clone() for name, each in state.items()}}


@program
def inference(given: Any) -> Any:
    model = seeded().eval()
    if given is not None and given["zero_optimization"]["stage"] == 3:
        model = deepspeed.init_inference(model, config={"dtype": torch.float32, "zero": given["zero_optimization"]})
    with torch.no_grad():
        return {"outputs": [model(x) for x in inputs()]}


@program
def an_engine_that_only_evaluates(given: Any) -> Any:
    model = seeded().eval()
    if given is not None:
        sizes = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": given["zero_optimization"]}
        model = deepspeed.initialize(model=model, config=sizes)[0].eval()
    with torch.no_grad():
        return {"outputs": [model(x) for x in inputs()]}


@program
def clipped_and_accumulated(given: Any) -> Any:
    model = seeded()
    if given is None:
        optimizer, norms, losses = adamw(model), [], []
        for at, x in enumerate(inputs(8)):
            loss = model(x).square().mean()
            (loss / 2).backward()
            losses.append(loss.item())
            if at % 2:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
                optimizer.step()
                optimizer.zero_grad()
        return {"losses": losses, "norms": norms, "weights": weights(model)}
    sections = config(given, gradient_clipping=0.05, gradient_accumulation_steps=2)
    engine = deepspeed.initialize(model=model, config=sections, model_parameters=model.parameters())[0]
    losses, norms = [], []
    for x in inputs(8):
        loss = engine(x).square().mean()
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(loss.item())
        if boundary:
            norms.append(float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms, "weights": weights(model)}


@program
def a_scheduler_of_the_configuration(given: Any) -> Any:
    model = seeded()
    warm = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 3, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
    }
    if given is not None:
        return looped(given, model, scheduler=warm)[0]
    optimizer = adamw(model)
    losses = []
    for at, x in enumerate(inputs()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, max(0, at - 1) / 3)  # DeepSpeed's first two steps have the least rate
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "looks": [], "weights": weights(model)}
