"""What users do to the optimizer and the gradients that they made themselves: it counts, or is refused."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from tests.odd.nets import ROWS, WIDTH, Made, Net, batch, loop, square
from tests.support.cases import EACH, EACH_BF16, NVME, STAGE_2, STAGE_2_BF16, STAGE_2_NVME, Case, Cases

cases = Cases(__name__)
SETTINGS = (EACH, STAGE_2, NVME, EACH_BF16, STAGE_2_BF16, STAGE_2_NVME)
IN_FP32 = (EACH, STAGE_2, NVME, STAGE_2_NVME)
"""Where plain torch's optimizer steps the weights themselves, not their masters."""


# Hooks around its step


@cases(settings=SETTINGS, must="equal")
def a_hook_after_its_step_changes_the_rate(world: Any) -> None:
    class Halving(Made):
        def __call__(self, params: Any) -> torch.optim.SGD:
            made = super().__call__(params)
            made.register_step_post_hook(_halve)
            return made

    loop(world, world.initialize(Net(), optimizer=Halving()), 3)


@cases(settings=SETTINGS, must="equal")
def a_hook_before_its_step_comes_late_and_changes_the_rate(world: Any) -> None:
    made = Made()
    engine = world.initialize(Net(), optimizer=made)
    loop(world, engine, 1)
    handle = made.optimizer.register_step_pre_hook(_halve)
    loop(world, engine, 2)
    handle.remove()
    loop(world, engine, 1)
    world.observe("lr", made.optimizer.param_groups[0]["lr"])


@cases(settings=IN_FP32)
def a_hook_after_its_step_reads_weights(world: Any) -> None:
    made = Made()
    model = Net()
    engine = world.initialize(model, optimizer=made)
    norms: list[float] = []
    made.optimizer.register_step_post_hook(lambda *_: norms.append(float(model.head.weight.detach().float().norm())))
    loop(world, engine)
    world.observe("norms", norms)


@cases(settings=SETTINGS)
def a_hook_before_its_step_clamps_gradients(world: Any) -> None:
    made = Made()
    engine = world.initialize(Net(), optimizer=made)

    def clamp(optimizer: torch.optim.SGD, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.clamp_(-1e-3, 1e-3)

    made.optimizer.register_step_pre_hook(clamp)
    loop(world, engine)


def _halve(optimizer: torch.optim.SGD, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


# What is put in the place of its parts


@cases(settings=SETTINGS, must="refused", about="has a step.. of its own")
def its_step_is_replaced_on_the_object(world: Any) -> None:
    class Replaced(Made):
        def __call__(self, params: Any) -> torch.optim.SGD:
            made = super().__call__(params)
            before = made.step

            def step(self: Any) -> None:
                before()
                _halve(self)

            made.step = MethodType(step, made)
            return made

    loop(world, world.initialize(Net(), optimizer=Replaced()))


@cases(settings=SETTINGS, must="equal")
def a_schedule_of_torchs_has_wrapped_its_step(world: Any) -> None:
    class Scheduled(Made):
        def __call__(self, params: Any) -> torch.optim.SGD:
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(super().__call__(params), 0.5)
            return self.optimizer

    made = Scheduled()
    engine = world.initialize(Net(), optimizer=made)
    for _ in range(3):
        loop(world, engine, 1)
        made.schedule.step()


@cases(settings=SETTINGS, must="refused", about="load_state_dict")
def the_state_of_another_is_loaded_into_it(world: Any) -> None:
    made, other = Made(), Made()
    plain = nn.Linear(2, 2)
    other(plain.parameters())
    engine = world.initialize(Net(), optimizer=made)
    saved = made.optimizer.state_dict() if world.name == "plain" else other.optimizer.state_dict()
    made.optimizer.load_state_dict(saved)
    loop(world, engine)


@cases(settings=SETTINGS, must="refused", about="state of the SGD that was passed")
def its_state_is_replaced(world: Any) -> None:
    made = Made()
    engine = world.initialize(Net(), optimizer=made)
    made.optimizer.state = {}
    world.backward(engine, square(engine(batch(world))))
    if world.name != "plain":
        engine.step()


@cases(settings=SETTINGS, must="refused", about="param_groups of the SGD that was passed")
def its_groups_are_replaced(world: Any) -> None:
    made = Made()
    engine = world.initialize(Net(), optimizer=made)
    made.optimizer.param_groups = [dict(group, lr=0.5) for group in made.optimizer.param_groups]
    loop(world, engine)


# What it looks at


class _Own(torch.optim.Optimizer):
    """Somebody's rule, whose options have no ``lr``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"alpha": 0.1})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    small = p.numel() < 100 and p.dim() > 1  # no part of a parameter shows it
                    factor = self.scale * (0.5 if small else 1.0)
                    p.add_(p.grad, alpha=-group["alpha"] * factor)


class _Maker:
    """Makes an optimizer by a function, and keeps it."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, params: Any) -> Any:
        self.optimizer = self.make(params)
        return self.optimizer


@cases(settings=SETTINGS, must="equal")
def a_rule_of_shapes_whose_scale_is_changed_between_steps(world: Any) -> None:
    made = _Maker(_Own)
    engine = world.initialize(Net(), optimizer=made)
    for scale in (1.0, 0.5, 0.25):
        made.optimizer.scale = scale
        loop(world, engine, 1)


@cases(settings=SETTINGS, must="equal")
def a_rate_that_is_a_tensor_written_in_place(world: Any) -> None:
    rate = torch.tensor(1e-2)
    engine = world.initialize(Net(), optimizer=_Maker(lambda params: torch.optim.AdamW(params, lr=rate)))
    for _ in range(3):
        loop(world, engine, 1)
        rate.mul_(0.5)


@cases(settings=SETTINGS, must="refused", about="SGD keeps momentum_buffer")
def momentum_comes_after_the_first_step(world: Any) -> None:
    made = _Maker(lambda params: torch.optim.SGD(params, lr=0.1))
    engine = world.initialize(Net(), optimizer=made)
    loop(world, engine, 1)
    made.optimizer.param_groups[0]["momentum"] = 0.9
    loop(world, engine, 2)


@cases(settings=SETTINGS, must="refused", about="holds another that has parameters")
def an_optimizer_within_another(world: Any) -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params, {"lr": 0.1})
            self.inner = torch.optim.SGD(params, lr=0.1)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    loop(world, world.initialize(Net(), optimizer=_Maker(Around)))


@cases(settings=SETTINGS, must="equal")
def groups_have_names_and_scales_of_their_own(world: Any) -> None:
    """Rates that decay with depth, as those who fine-tune vision transformers have them."""
    model = Net()
    groups = [
        {"params": [param], "name": name, "lr_scale": 0.7**depth, "weight_decay": 0.1 * (param.dim() > 1)}
        for depth, (name, param) in enumerate(reversed(list(model.named_parameters())))
    ]
    engine = world.initialize(model, parameters=groups)
    for step in range(3):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) * group["lr_scale"]
        loop(world, engine, 1)
    world.observe("groups", [(group["name"], group["lr_scale"]) for group in engine.optimizer.param_groups])


# Gradients from before


@cases(settings=IN_FP32, must="equal")
def gradients_from_before_are_added_to(world: Any) -> None:
    model = Net()
    square(model(world.randn(ROWS, WIDTH, seed=7).to(next(model.parameters()).dtype))).backward()
    loop(world, world.initialize(model))


@cases(settings=IN_FP32, must="equal")
def gradients_from_before_are_dropped_by_the_user(world: Any) -> None:
    model = Net()
    square(model(world.randn(ROWS, WIDTH, seed=7).to(next(model.parameters()).dtype))).backward()
    engine = world.initialize(model)
    engine.zero_grad()
    loop(world, engine)


@cases.parametrized()
def test_users_optimizers(case: Case, judged: Any) -> None:
    judged(__name__, case)
