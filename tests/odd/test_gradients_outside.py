"""Gradients that a user reaches for himself: clipping, scaling, reading, penalties, several backwards a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.odd.nets import ROWS, WIDTH, Net, Rule, batch, square, trains
from tests.support.cases import GROUPED_BF16, NVME, Case, Cases

cases = Cases(__name__)


@cases
def clip_grad_norm_between_backward_and_step(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        world.observe("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        engine.step()


@cases
def clip_grad_value_between_backward_and_step(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        engine.step()


@cases
def get_total_norm_of_the_gradients(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.backward(engine, square(engine(batch(world, 0))))
    world.observe("norm", nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    engine.step()


@cases
def a_gradient_is_read(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.backward(engine, square(engine(batch(world, 0))))
    world.observe("gradients", [None if p.grad is None else p.grad for p in model.parameters()])
    engine.step()


@cases
def a_gradient_is_scaled_in_place(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(2):
        world.backward(engine, square(engine(batch(world, step))))
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        engine.step()


@cases
def a_gradient_is_assigned(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.backward(engine, square(engine(batch(world, 0))))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    engine.step()


@cases(must="equal")
def gradients_of_a_layer_are_dropped(world: Any) -> None:
    """``param.grad = None``: the layer is not to be stepped."""
    model = Net()
    engine = world.initialize(model)
    for step in range(2):
        world.backward(engine, square(engine(batch(world, step))))
        model.head.weight.grad = None
        world.zero_grad(model.head)
        engine.step()


@cases(must="equal")
def zero_grad_of_the_module_instead_of_the_engine(world: Any) -> None:
    """What the accumulation has so far is to be dropped."""
    model = Net()
    engine = world.initialize(model)
    engine.backward(square(engine(batch(world, 0))))
    world.zero_grad(model)
    world.backward(engine, square(engine(batch(world, 1))))
    engine.step()


@cases(must="equal")
def zero_grad_of_a_part_of_the_module(world: Any) -> None:
    """Of two losses a step, the second alone counts for the first block; clipping by norm sees what is left."""
    model = Net()
    engine = world.initialize(model, clipping=0.01)
    for step in range(3):
        engine.backward(square(engine(batch(world, 2 * step))))
        world.zero_grad(model.blocks[0])
        world.backward(engine, square(engine(batch(world, 2 * step + 1))))
        engine.step()


@cases(must="equal")
def zero_grad_of_a_part_that_the_step_then_lacks(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        if step == 1:
            world.zero_grad(model.blocks[1])
        engine.step()


@cases
def gradients_that_another_models_loss_has_left(world: Any) -> None:
    """A GAN: the generator's loss gives the discriminator gradients, which its zero_grad() drops."""
    discriminator, generator = Net(1), Net(1)
    first, second = world.initialize(discriminator), world.initialize(generator)
    for step in range(3):
        world.zero_grad(discriminator)
        fake = second(batch(world, step))
        first.backward(square(first(batch(world, 10 + step))) - square(first(fake.detach())))
        first.step()
        world.zero_grad(generator)
        second.backward(square(first(fake)))
        second.step()
    world.zero_grad(discriminator)


@cases(must="equal")
def a_step_that_is_given_up_by_the_modules_zero_grad(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        if step == 1:
            world.zero_grad(model)
            continue
        engine.step()


@cases
def grad_scaler_on_the_loss(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    optimizer = getattr(engine, "optimizer", None)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        loss = square(engine(batch(world, step)))
        engine.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        engine.step()
        scaler.update()


@cases
def loss_backward_instead_of_engine_backward(world: Any) -> None:
    """Plain torch only needs the engine's step; here the engine must see the backward, or say so."""
    engine = world.initialize(Net())
    loss = square(engine(batch(world, 0)))
    loss.backward()
    world.observe("steps", engine.global_steps)


@cases(must="equal")
def backward_with_retain_graph(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(3):
        loss = square(engine(batch(world, step)))
        world.backward(engine, loss, retain_graph=True)
        world.backward(engine, loss)
        engine.step()


@cases(must="equal")
def several_backwards_of_several_forwards_a_step(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(3):
        first, second = engine(batch(world, step)), engine(batch(world, step + 50))
        world.backward(engine, square(first))
        world.backward(engine, square(second) * 0.5)
        engine.step()


@cases(must="equal")
def two_losses_over_one_trunk(world: Any) -> None:
    engine = world.initialize(Rule(lambda net, x: (lambda h: torch.stack([net.a(h), net.b(h)]))(torch.tanh(x))))
    for step in range(3):
        left, right = engine(batch(world, step)).unbind(0)
        world.backward(engine, square(left), retain_graph=True)
        world.backward(engine, square(right))
        engine.step()


@cases(must="equal")
def accumulation(world: Any) -> None:
    trains(world, Net(), accumulation=3)


@cases(must="equal")
def accumulation_with_a_module_used_in_one_micro_batch_only(world: Any) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, *, gated: bool) -> Any:
            return self.extra(self.trunk(x)) if gated else self.trunk(x)

    engine = world.initialize(Gated(), accumulation=2)
    for step in range(6):
        world.backward(engine, square(engine(batch(world, step), gated=step % 4 == 1)))
        engine.step()


@cases(must="equal")
def gradient_penalty_on_the_input(world: Any) -> None:
    """WGAN-GP: double backward through every layer."""
    engine = world.initialize(Net())
    for step in range(3):
        x = world.randn(ROWS, WIDTH, seed=step, requires_grad=True)
        output = engine(x)
        (gradient,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
        world.backward(engine, square(output) + (gradient.float().norm(dim=1) - 1).square().mean())
        engine.step()


@cases
def gradient_penalty_on_the_weights(world: Any) -> None:
    """The gradient with respect to parameters, kept in the graph."""
    model = Net()
    engine = world.initialize(model)
    for step in range(2):
        loss = square(engine(batch(world, step)))
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        world.backward(engine, loss + sum(g.float().square().sum() for g in gradients))
        engine.step()


@cases
def autograd_grad_with_respect_to_a_weight(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    loss = square(engine(batch(world, 0)))
    (gradient,) = torch.autograd.grad(loss, [model.head.weight], retain_graph=True)
    world.observe("gradient", gradient)
    world.backward(engine, loss)
    engine.step()


@cases(must="equal")
def gradient_of_the_input(world: Any) -> None:
    """Adversarial examples: the gradient of a leaf of the user's own."""
    engine = world.initialize(Net())
    for step in range(2):
        x = world.randn(ROWS, WIDTH, seed=step, requires_grad=True)
        world.backward(engine, square(engine(x)))
        world.observe("input gradient", x.grad)
        engine.step()


@cases
def jacobian_of_the_model(world: Any) -> None:
    engine = world.initialize(Net(1))
    x = world.randn(WIDTH)
    world.observe("jacobian", torch.autograd.functional.jacobian(engine, x))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases(must="equal")
def a_hook_on_a_parameter_scales_its_gradient(world: Any) -> None:
    model = Net()
    model.head.weight.register_hook(lambda gradient: gradient * 0.25)
    trains(world, model)


@cases(must="equal")
def a_hook_registered_after_initialize_scales_a_gradient(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    model.head.weight.register_hook(lambda gradient: gradient * 0.25)
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases
def a_post_accumulate_hook_reads_the_gradient(world: Any) -> None:
    """As optimizers in backward do."""
    model = Net()
    engine = world.initialize(model)
    norms: list[float] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: norms.append(float(p.grad.float().norm())))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)
    world.observe("norms", norms)


@cases(must="equal")
def a_full_backward_hook_on_a_module(world: Any) -> None:
    model = Net()
    seen: list[torch.Tensor] = []
    model.blocks[1].register_full_backward_hook(lambda _m, _i, grads: seen.append(grads[0].detach().clone()))
    trains(world, model, num_steps=2)
    world.observe("seen", seen)


@cases(must="equal")
def a_backward_pre_hook_changes_the_gradient(world: Any) -> None:
    model = Net()
    model.blocks[1].register_full_backward_pre_hook(lambda _m, grads: tuple(g * 2 for g in grads))
    trains(world, model, num_steps=2)


@cases(must="equal")
def the_norm_without_clipping(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(3):
        engine.get_global_grad_norm()
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
    world.observe("norm", float(engine.get_global_grad_norm()), tolerance=1e-5)


@cases(must="equal")
def the_norm_is_there_whenever_asked(world: Any) -> None:
    """A logger asks every few steps, the first time after some steps."""
    engine = world.initialize(Net())
    for step in range(4):
        engine.get_global_grad_norm()
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        if step >= 2:
            norm = engine.get_global_grad_norm()
            world.observe(
                "norm", None if norm is None else float(norm), tolerance=1e-5 if world.dtype.itemsize == 4 else 1e-2
            )


@cases(must="equal")
def a_loss_that_uses_no_parameter_of_a_layer(world: Any) -> None:
    engine = world.initialize(Rule(lambda net, x: net.a(x)))
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases
def a_loss_without_a_graph(world: Any) -> None:
    """Plain torch says that it does not require grad."""
    engine = world.initialize(Net())
    engine.backward(square(engine(batch(world, 0)).detach()))


@cases
def a_second_backward_without_retain_graph(world: Any) -> None:
    engine = world.initialize(Net())
    loss = square(engine(batch(world, 0)))
    engine.backward(loss)
    engine.backward(loss)


@cases
def a_loss_of_several_elements(world: Any) -> None:
    engine = world.initialize(Net())
    engine.backward(engine(batch(world, 0)))


@cases(must="equal")
def a_loss_that_is_not_the_engines_output_alone(world: Any) -> None:
    """Two forwards before one backward (contrastive learning)."""
    engine = world.initialize(Net())
    for step in range(3):
        left, right = engine(batch(world, step)), engine(batch(world, step + 9))
        world.backward(engine, square(left - right) + square(left * right))
        engine.step()


@cases(also=(NVME, GROUPED_BF16), must="equal")
def forces_in_training_and_in_an_evaluation(world: Any) -> None:
    """A potential, whose forward asks for a gradient also where the caller has switched gradients off."""

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = Net(1), nn.Linear(WIDTH, 1)

        def forward(self, positions: Tensor) -> Any:
            with torch.enable_grad():
                positions = positions.detach().requires_grad_()
                energy = self.head(torch.tanh(self.net(positions))).sum()
                (slope,) = torch.autograd.grad(energy, positions, create_graph=self.training)
            return energy, -slope

    engine = world.initialize(Potential())
    for step in range(3):
        energy, forces = engine(batch(world, step))
        world.backward(engine, energy.float().square() + square(forces))
        engine.step()
        engine.eval()
        with torch.no_grad():
            world.observe("evaluation", engine(batch(world, 9)))
        engine.train()


@cases.parametrized()
def test_gradients_outside(case: Case, judged: Any) -> None:
    judged(__name__, case)
