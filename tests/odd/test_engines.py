"""Several engines, teachers, parts of one module, destroyed and forgotten engines: each works or is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd.nets import WIDTH, Net, batch, square, trains
from tests.support.cases import DEFAULT, EACH, GROUPED, NVME, Case, Cases
from tests.support.world import Setting

cases = Cases(__name__)


@cases
def a_frozen_teacher_with_an_engine(world: Any) -> None:
    """Nothing to optimize: a reference model that is only to be offloaded."""
    teacher = world.initialize(Net().requires_grad_(False).eval(), optimizer=None)
    student = world.initialize(Net(1))
    for step in range(3):
        with torch.no_grad():
            target = teacher(batch(world, step))
        world.backward(student, F.mse_loss(student(batch(world, step)).float(), target.float()))
        student.step()


@cases
def a_frozen_teacher_with_the_optimizer_of_the_config(world: Any) -> None:
    teacher = world.initialize(Net().requires_grad_(False).eval())
    with torch.no_grad():
        world.observe("target", teacher(batch(world, 0)))


@cases(settings=[Setting(stage=stage, cpu=True, bf16=True) for stage in (0, 1, 2)], must="equal")
def a_frozen_teacher_whose_states_would_be_offloaded(world: Any) -> None:
    """Whole weights and nothing to optimize: nothing of it is kept anywhere else."""
    a_frozen_teacher_with_an_engine(world)


@cases(must="equal")
def a_plain_teacher_beside_an_engine(world: Any) -> None:
    """Distillation with a teacher that is no engine."""
    teacher = Net().to(world.dtype).eval()
    student = world.initialize(Net(1))
    for step in range(3):
        with torch.no_grad():
            target = teacher(batch(world, step))
        world.backward(student, F.mse_loss(student(batch(world, step)).float(), target.float()))
        student.step()


class Perceptual(nn.Module):
    """Compares what another engine's model, which is no part of this one, makes of its output."""

    def __init__(self, critic: Any) -> None:
        super().__init__()
        self.net, self.critic = Net(1), (critic,)

    def forward(self, x: Tensor) -> Any:
        made = self.net(x)
        return self.critic[0](torch.cat([made, torch.sin(made)], -1).repeat(1, WIDTH)[:, :WIDTH])


@cases(must="equal", also=(NVME,))
def an_engine_that_anothers_model_calls(world: Any) -> None:
    """A frozen critic of linear and normalised layers, inside the forward of what is trained by it."""
    critic = world.initialize(Net().requires_grad_(False).eval(), optimizer=None)
    trains(world, Perceptual(critic))


@cases(must="equal")
def two_engines_of_two_models(world: Any) -> None:
    """GAN: the generator's loss goes through the discriminator."""
    generator, discriminator = world.initialize(Net(1)), world.initialize(Net(2))
    for step in range(3):
        noise, real = batch(world, step), batch(world, step + 30)
        with torch.no_grad():
            fake = generator(noise)
        world.backward(discriminator, square(discriminator(real) - 1) + square(discriminator(fake)))
        discriminator.step()
        world.observe("score", discriminator(real))


@cases
def the_generator_learns_through_the_discriminator(world: Any) -> None:
    """One backward crosses two engines."""
    generator, discriminator = world.initialize(Net(1)), world.initialize(Net(2))
    for step in range(3):
        noise, real = batch(world, step), batch(world, step + 30)
        fake = generator(noise)
        world.backward(discriminator, square(discriminator(real) - 1) + square(discriminator(fake.detach())))
        discriminator.step()
        world.backward(generator, square(discriminator(fake) - 1))
        generator.step()
        discriminator.zero_grad()


@cases
def one_model_whose_parts_have_an_engine_each(world: Any) -> None:
    """GAN in one module: two engines on its two children."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.discriminator = Net(1), Net(1)

    both = Both()
    generator, discriminator = world.initialize(both.generator), world.initialize(both.discriminator)
    for step in range(2):
        with torch.no_grad():
            fake = generator(batch(world, step))
        world.backward(discriminator, square(discriminator(fake)))
        discriminator.step()
        world.backward(generator, square(generator(batch(world, step))))
        generator.step()


@cases
def two_engines_that_share_a_part(world: Any) -> None:
    """An encoder with two heads, an engine for each: the encoder would have two owners."""

    class Headed(nn.Module):
        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.encoder(x))

    encoder = Net(1)
    first = world.initialize(Headed(encoder))
    second = world.initialize(Headed(encoder))
    for step in range(2):
        for engine in (first, second):
            world.backward(engine, square(engine(batch(world, step))))
            engine.step()


@cases
def an_engine_over_a_module_that_already_has_one(world: Any) -> None:
    model = Net()
    trains(world, model, num_steps=1)
    trains(world, model, num_steps=1)


@cases
def an_engine_over_the_parent_of_a_module_that_has_one(world: Any) -> None:
    model = Net(1)
    trains(world, model, num_steps=1)
    trains(world, nn.Sequential(model, nn.Linear(WIDTH, WIDTH)), num_steps=1)


@cases
def a_second_engine_after_destroying_the_first(world: Any) -> None:
    """The user goes on with the same module."""
    model = Net()
    engine = trains(world, model)
    world.retire(engine)
    trains(world, model)


@cases(must="equal")
def a_second_engine_from_the_full_state_dict_of_the_first(world: Any) -> None:
    engine = trains(world, Net())
    weights = engine.full_state_dict()
    world.retire(engine)
    again = Net()
    again.load_state_dict(weights)
    trains(world, again)


@cases(must="equal")
def engines_one_after_the_other(world: Any) -> None:
    """A hyper-parameter search."""
    for trial in range(3):
        torch.manual_seed(trial)
        engine = trains(world, Net(1), num_steps=2)
        world.observe("trial", engine.full_state_dict())
        world.retire(engine)


@cases(must="equal", also=(NVME,))
def engines_that_are_collected_without_destroy(world: Any) -> None:
    """Dropped without a word: everything must be freed when the garbage collector has seen it."""
    alive = []
    for trial in range(3):
        torch.manual_seed(trial)
        engine = trains(world, Net(1), num_steps=2)
        alive.append(weakref.ref(engine))
        world.forget(engine)
        del engine
        gc.collect()
    world.observe("alive", [reference() is not None for reference in alive])


def after_destroy(call: str, use: Any) -> None:
    def script(world: Any) -> None:
        model = Net()
        engine = trains(world, model, num_steps=1)
        loss = square(engine(batch(world, 0)))
        world.retire(engine)
        use(world, engine, model, loss)

    script.__name__ = f"{call}_after_destroy"
    script.__doc__ = f"After destroy() the user goes on with {call.replace('_', ' ')}: plain torch or words."
    cases(about="destroy")(script)


after_destroy("forward", lambda world, engine, _model, _loss: world.observe("y", engine(batch(world, 1))))
after_destroy("backward", lambda world, engine, _model, loss: world.backward(engine, loss))
after_destroy("step", lambda _world, engine, _model, loss: (engine.backward(loss), engine.step()))
after_destroy("full_state_dict", lambda world, engine, _model, _loss: world.observe("w", engine.full_state_dict()))
after_destroy("module_forward", lambda world, _engine, model, _loss: world.observe("y", model(batch(world, 1))))
after_destroy("zero_grad", lambda _world, engine, _model, _loss: engine.zero_grad())
after_destroy("reading_a_weight", lambda world, _engine, model, _loss: world.observe("w", model.head.weight + 0))
after_destroy("copying_the_module", lambda world, _e, model, _l: world.observe("w", copy.deepcopy(model).state_dict()))
after_destroy("destroy", lambda _world, engine, _model, _loss: engine.destroy())
after_destroy("train_and_eval", lambda _world, engine, _model, _loss: (engine.train(), engine.eval()))


@cases(must="equal")
def a_model_that_nobody_refers_to_any_more(world: Any) -> None:
    """Once its engine has ended, nothing of ours keeps it."""
    model = Net()
    engine = world.initialize(model)
    world.backward(engine, square(engine(batch(world, 0))))
    engine.step()
    gone = weakref.ref(model)
    world.retire(engine)
    world.models.clear()
    del model, engine
    gc.collect()
    world.observe("gone", gone() is None)


@cases
def a_loss_from_before_a_step(world: Any) -> None:
    """A stale graph: plain torch says that a saved tensor was modified by the step."""
    engine = world.initialize(Net())
    stale = square(engine(batch(world, 0)))
    world.backward(engine, square(engine(batch(world, 1))))
    engine.step()
    world.backward(engine, stale)
    engine.step()


@cases
def step_without_backward(world: Any) -> None:
    engine = world.initialize(Net())
    engine.step()
    world.observe("steps", engine.global_steps)


@cases(must="equal")
def evaluation_between_micro_batches(world: Any) -> None:
    model = Net()
    engine = world.initialize(model, accumulation=2)
    for step in range(4):
        world.backward(engine, square(engine(batch(world, step))))
        engine.eval()
        with torch.no_grad():
            world.observe("evaluation", engine(batch(world, 90)))
        engine.train()
        engine.step()


@cases(must="equal")
def evaluation_between_forward_and_backward(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(3):
        loss = square(engine(batch(world, step)))
        with torch.no_grad():
            world.observe("evaluation", engine(batch(world, 90)))
        world.backward(engine, loss)
        engine.step()


@cases(must="equal")
def evaluation_under_inference_mode(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(2):
        with torch.inference_mode():
            world.observe("evaluation", engine(batch(world, 90)).clone())
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()


@cases(must="equal")
def eval_mode_with_gradients(world: Any) -> None:
    """Training in eval mode, as with frozen batch norms."""
    engine = world.initialize(Net())
    engine.eval()
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases(must="equal")
def an_evaluation_that_keeps_its_graph(world: Any) -> None:
    """Forward in eval mode with gradients on, never differentiated."""
    engine = world.initialize(Net())
    engine.eval()
    world.observe("kept", engine(batch(world, 90)))
    engine.train()
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases(must="equal")
def the_engines_inner_module_is_called_in_training(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(3):
        world.backward(engine, square(engine.module(batch(world, step))))
        engine.step()


@cases(must="equal", also=(NVME,))
def the_engines_inner_module_is_called_in_eval(world: Any) -> None:
    """As Transformers' generate does."""
    engine = world.initialize(Net())
    for step in range(2):
        engine.module.eval()
        with torch.no_grad():
            for turn in range(3):
                world.observe("generated", engine.module(batch(world, turn)[: turn + 1]))
        engine.module.train()
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()


@cases(must="equal")
def a_part_of_the_module_is_called_in_eval(world: Any) -> None:
    """Embeddings are asked for features between steps."""
    model = Net()
    engine = world.initialize(model)
    for step in range(2):
        with torch.no_grad():
            world.observe("features", model.blocks[1](batch(world, 50)))
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()


@cases
def a_part_of_the_module_is_called_in_training(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(2):
        world.backward(engine, square(model.head(model.blocks[1](batch(world, step)))))
        engine.step()


@cases(must="equal")
def a_forward_that_raises_and_the_step_after_it(world: Any) -> None:
    """The user catches the exception and goes on with the next batch."""
    model = Net()
    engine = world.initialize(model)
    for step in range(4):
        try:
            loss = square(engine(batch(world, step)[:, : 3 if step == 1 else WIDTH]))
        except RuntimeError:
            world.observe("caught", step)
            continue
        world.backward(engine, loss)
        engine.step()


@cases(must="equal")
def attributes_of_the_module_through_the_engine(world: Any) -> None:
    model = Net()
    model.answer = 42
    engine = world.initialize(model)
    world.observe("answer", engine.answer)
    world.observe("names", [name for name, _ in engine.module.named_parameters()])
    world.observe("is a module", isinstance(engine, nn.Module))
    world.observe("training", engine.training)


@cases(must="equal")
def parameters_through_the_engine(world: Any) -> None:
    """Trainer asks ``model.parameters()`` and ``zero_grad()`` of the engine."""
    engine = world.initialize(Net())
    world.observe("numels", [p.numel() for p in engine.parameters()])
    engine.zero_grad()


@cases(must="equal", settings=(EACH, GROUPED, DEFAULT))
def dropout_draws_the_same_numbers(world: Any) -> None:
    model = nn.Sequential(Net(1), nn.Dropout(0.3), Net(1))
    engine = world.initialize(model)
    torch.manual_seed(5)
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases.parametrized()
def test_engines(case: Case, judged: Any) -> None:
    judged(__name__, case)
