"""Weights and buffers of several dtypes in one model, and the caller's autocast: kept or refused, never just cast."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.odd.nets import ROWS, WIDTH, Block, Net, square, trains
from tests.support.cases import (
    DEFAULT,
    EACH,
    EACH_BF16,
    GROUPED,
    GROUPED_BF16,
    NVME,
    SETTINGS,
    STAGE_2,
    STAGE_2_BF16,
    Case,
    Cases,
)

cases = Cases(__name__)

BOTH = (EACH, EACH_BF16)


class Mixed(nn.Module):
    """The middle layer computes in a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.middle.to(dtype)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        return self.last(self.middle(h.to(self.middle.weight.dtype)).to(x.dtype))


class Buffered(nn.Module):
    """A buffer of a dtype that a cast to bf16 would spoil."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", buffer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * (1 + self.table.abs().mean().to(x.dtype))


@cases
def a_bf16_layer_in_a_model(world: Any) -> None:
    trains(world, Mixed(torch.bfloat16))


@cases
def an_fp16_layer_in_a_model(world: Any) -> None:
    trains(world, Mixed(torch.float16))


@cases
def an_fp64_layer_in_a_model(world: Any) -> None:
    trains(world, Mixed(torch.float64))


@cases
def a_model_of_fp64_alone(world: Any) -> None:
    model = Net().double()
    engine = world.initialize(model)
    world.observe("dtypes", [str(p.dtype) for p in model.parameters()])
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step).double())))


@cases
def a_model_of_bf16_alone(world: Any) -> None:
    model = Net().bfloat16()
    engine = world.initialize(model)
    world.observe("dtypes", [str(p.dtype) for p in model.parameters()])
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step).bfloat16())))


@cases
def a_model_of_fp16_alone(world: Any) -> None:
    model = Net().half()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step).half())))


@cases
def a_frozen_fp64_parameter(world: Any) -> None:
    model = Mixed(torch.float64)
    model.middle.requires_grad_(False)
    trains(world, model)


class Adapted(nn.Module):
    """As PEFT makes it: a frozen base of bf16, adapters in another dtype, and a head of the base's that learns."""

    def __init__(self, adapter: torch.dtype) -> None:
        super().__init__()
        self.base, self.head = (nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(2))
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH).to(adapter)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.base(x) + self.adapter(x))


@cases(settings=(EACH_BF16, GROUPED_BF16, STAGE_2_BF16), must="equal")
def fp32_adapters_and_a_head_over_a_frozen_bf16_base(world: Any) -> None:
    trains(world, Adapted(torch.float32))


@cases(settings=(EACH_BF16,))
def fp16_adapters_and_a_head_over_a_frozen_bf16_base(world: Any) -> None:
    trains(world, Adapted(torch.float16))


@cases(settings=(EACH, GROUPED, DEFAULT, NVME, STAGE_2), must="equal")
def a_frozen_bf16_layer_and_a_frozen_fp16_one_between_layers_in_fp32(world: Any) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seeing, self.reading = Mixed(torch.bfloat16), Mixed(torch.float16)
            for tower in (self.seeing, self.reading):
                tower.middle.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.reading(self.seeing(x))

    trains(world, Towers())


@cases
def a_complex_parameter(world: Any) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> Any:
            return torch.fft.irfft(torch.fft.rfft(self.linear(x).float()) * self.filter, n=WIDTH)

    trains(world, Spectral())


@cases(settings=(*SETTINGS, NVME), must="equal")
def an_int8_frozen_parameter(world: Any) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            codes = torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8)
            self.codes = nn.Parameter(codes, requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(F.linear(x, self.codes.to(x.dtype) / 127))

    trains(world, Quantised())


@cases(settings=(*SETTINGS, NVME), must="equal")
def a_bool_frozen_parameter(world: Any) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.mask = nn.Parameter(torch.rand(WIDTH) > 0.5, requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x) * self.mask

    trains(world, Masked())


@cases(settings=(*SETTINGS, NVME), must="equal")
def a_float8_frozen_parameter(world: Any) -> None:
    class Eighth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.codes = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(F.linear(x, self.codes.to(x.dtype)))

    trains(world, Eighth())


@cases(must="equal")
def an_fp64_buffer(world: Any) -> None:
    model = Buffered(torch.linspace(0, 1, 7, dtype=torch.float64))
    trains(world, model)
    world.observe("dtype", str(model.table.dtype))


@cases(must="equal")
def an_int64_buffer(world: Any) -> None:
    trains(world, Buffered(torch.arange(7)))


@cases(must="equal")
def a_complex_buffer(world: Any) -> None:
    """Rotary embeddings are kept as complex numbers by some models."""
    model = Buffered(torch.polar(torch.ones(7), torch.linspace(0, 1, 7)))
    trains(world, model)
    world.observe("dtype", str(model.table.dtype))


@cases
def an_fp16_buffer(world: Any) -> None:
    model = Buffered(torch.linspace(0, 1, 7, dtype=torch.float16))
    trains(world, model)
    world.observe("dtype", str(model.table.dtype))


@cases
def a_buffer_that_is_cast_after_initialize(world: Any) -> None:
    """A user puts back what the cast to bf16 took from his positions."""
    model = Buffered(torch.linspace(0, 1, 7))
    engine = world.initialize(model)
    model.table = torch.linspace(0, 1, 7, dtype=torch.float32)
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step))))


@cases(must="equal", settings=BOTH)
def a_norm_kept_in_fp32_by_forward(world: Any) -> None:
    class Careful(Block):
        def forward(self, x: torch.Tensor) -> Any:
            weight, bias = self.norm.weight.float(), self.norm.bias.float()
            h = F.layer_norm(x.float(), (WIDTH,), weight, bias).to(x.dtype)
            return x + self.contract(F.gelu(self.expand(h)))

    trains(world, nn.Sequential(Careful(), Careful()))


@cases(must="equal")
def the_callers_autocast(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(3):
        with world.autocast():
            loss = square(engine(world.randn(ROWS, WIDTH, seed=step)))
        world.backward(engine, loss)
        engine.step()


@cases(must="equal")
def autocast_inside_forward(world: Any) -> None:
    class Autocast(Net):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    trains(world, Autocast())


@cases(settings=(EACH, GROUPED, DEFAULT, EACH_BF16, STAGE_2), must="equal")
def autocast_around_two_forwards_of_one_pass(world: Any) -> None:
    """Its cache must not give the second forward weights that were resharded after the first."""
    engine = world.initialize(Net())
    for step in range(3):
        with world.autocast():
            first = engine(world.randn(ROWS, WIDTH, seed=step))
            loss = square(engine(first)) + square(first)
        world.backward(engine, loss)
        engine.step()


@cases(settings=(EACH, GROUPED, DEFAULT, EACH_BF16, STAGE_2))
def autocast_around_backward_and_step(world: Any) -> None:
    """Its cache is not cleared between steps: torch goes on with casts of before."""
    engine = world.initialize(Net())
    with world.autocast():
        for step in range(3):
            world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=step))))
            engine.step()


@cases(must="equal")
def autocast_around_an_evaluation(world: Any) -> None:
    engine = world.initialize(Net())
    with world.autocast(), torch.no_grad():
        world.observe("before", engine(world.randn(ROWS, WIDTH)))
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step))))
    with world.autocast(), torch.no_grad():
        world.observe("after", engine(world.randn(ROWS, WIDTH)))


def moved(change: str) -> Any:
    def script(world: Any) -> None:
        model = Net()
        engine = world.initialize(model)
        world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step))), num_steps=1)
        dtype = {"half": torch.float16, "double": torch.float64, "to_double": torch.float64}.get(change, world.dtype)
        match change:
            case "to_double":
                model.to(torch.float64)
            case "to_cpu":
                model.to("cpu")
            case "to_meta":
                model.to("meta")
            case "to_empty":
                model.to_empty(device="cpu")
            case "cuda":
                model.cuda()
            case "share_memory":
                model.share_memory()
            case _:
                getattr(model, change)()
        world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step).to(dtype))), num_steps=1)

    script.__name__ = f"module_{change}_after_initialize"
    script.__doc__ = f"The user moves or casts the module himself: {change}."
    return script


for name in ("half", "double", "float", "bfloat16", "to_double", "to_cpu", "to_meta", "cuda", "cpu", "share_memory"):
    cases(moved(name))


@cases
def a_layer_is_cast_after_initialize(world: Any) -> None:
    model = Mixed(torch.float32)
    engine = world.initialize(model)
    model.middle.double()
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step))))


@cases(must="equal")
def the_default_dtype_is_fp64_while_training(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step))))
    finally:
        torch.set_default_dtype(before)


@cases.parametrized()
def test_dtypes(case: Case, judged: Any) -> None:
    judged(__name__, case)
