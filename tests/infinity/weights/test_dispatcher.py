"""Whatever reads a sharded parameter past Python is refused by the parameter's name: there is nothing to be read."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import WeightsError
from infinity.weights import access, dispatcher, placeholder

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}
VALUES = torch.arange(12.0).view(4, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        with torch.no_grad():
            self.layer.weight.copy_(VALUES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with infinity.initialize(model=Net(), config=CONFIG)[0] as engine:
        yield engine


@pytest.fixture
def param(engine: Any) -> nn.Parameter:
    found: nn.Parameter = engine.module.layer.weight
    assert placeholder.is_held_by(found)
    return found


FIRST_ENGINES = """
import threading
import torch
from infinity.weights import dispatcher

meeting, registered, failed = threading.Barrier(2), [], []
library = torch.library.Library

class Slow(library):
    def fallback(self, *args, **kwargs):
        try:  # whoever else is on its way to the same registration gets here first
            meeting.wait(1)
        except threading.BrokenBarrierError:
            pass
        registered.append(args[1])
        super().fallback(*args, **kwargs)

def watch():
    try:
        dispatcher.watch()
    except Exception as error:
        failed.append(error)

torch.library.Library = Slow
threads = [threading.Thread(target=watch) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(registered), failed)
"""


def test_threads_that_make_their_first_engines_at_once_register_once() -> None:
    run = subprocess.run([sys.executable, "-c", FIRST_ENGINES], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1 []"


PAST_PYTHON: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.tensor": torch.tensor,
    "new_tensor": torch.zeros(1).new_tensor,
    "new": torch.zeros(1).new,
    "sparse_coo_tensor": lambda param: torch.sparse_coo_tensor(torch.arange(4)[None], param),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("read", PAST_PYTHON.values(), ids=PAST_PYTHON)
def test_what_reads_it_past_python_is_refused(param: nn.Parameter, read: Any) -> None:
    for tensor in (param, param.detach(), param.data):
        with pytest.raises(WeightsError, match=r"layer\.weight .*past Python.*param\.clone\(\)"):
            read(tensor)
    assert torch.equal(read(param.clone()).to_dense(), VALUES), "the remedy"


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_weights_are_lent_to_scripted_functions_and_modules(param: nn.Parameter) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    class Twice(nn.Module):
        def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
            return parts[0] * 2

    scripted, module = torch.jit.script(twice), torch.jit.script(Twice())
    for tensor in (param, param.data):
        assert torch.equal(scripted(tensor), VALUES * 2)
        assert torch.equal(module([tensor]), VALUES * 2)
    assert placeholder.is_held_by(param)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_a_scripted_function_writes_to_weights_is_refused(param: nn.Parameter) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    with pytest.raises(WeightsError, match=r"layer\.weight .*changed in place"):
        torch.jit.script(double)(param.data)
    assert torch.equal(param.clone(), VALUES)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_scripted_function_is_told_size_and_kind(param: nn.Parameter) -> None:
    def kind_of(x: torch.Tensor) -> tuple[int, int, int, bool, bool]:
        return x.size(0), x.numel(), x.stride(0), x.is_floating_point(), x.is_contiguous()

    assert torch.jit.script(kind_of)(param) == (4, 12, 3, True, True)


def test_it_is_refused_in_another_thread(param: nn.Parameter) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            torch.zeros(1).new(param)
        except WeightsError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert "layer.weight" in str(caught)


def test_with_the_weights_here_nothing_is_refused(param: nn.Parameter) -> None:
    with infinity.zero.GatheredParameters(param):
        assert torch.equal(torch.zeros(1).new(param), VALUES)
    assert torch.equal(param, VALUES)


def thieves(param: nn.Parameter) -> dict[str, torch.Tensor]:
    return {"the parameter": param, "its data": param.data, "detached": param.detach()}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("given", ["the parameter", "its data", "detached"])
def test_no_other_tensor_takes_its_memory_over(param: nn.Parameter, given: str, mode: Any) -> None:
    thief = torch.zeros(4, 3)
    with mode(), pytest.raises(WeightsError, match=r"layer\.weight .*take its memory over.*param\.clone\(\)"):
        thief.data = thieves(param)[given]
    assert torch.equal(thief, torch.zeros(4, 3)), "it is what it was"
    thief.share_memory_()  # type: ignore[no-untyped-call]  # which would end the process with a placeholder's
    thief.data = param.clone()
    assert torch.equal(thief, VALUES), "the remedy"


def test_memory_is_known_by_its_parameter_whoever_else_has_none(engine: Any) -> None:
    with access.raw():
        for param in engine.module.parameters():
            assert dispatcher._param_with_memory_of(param) is param
        assert dispatcher._param_with_memory_of(torch.zeros(4, 3)) is None


def test_the_memory_of_a_parameter_that_is_gone_is_refused() -> None:
    engine = infinity.initialize(model=Net(), config=CONFIG)[0]
    given = next(engine.module.parameters())
    engine.destroy()
    del engine
    thief = torch.zeros(4, 3)
    with pytest.raises(WeightsError, match="take its memory over"):
        thief.data = given


def test_training_goes_on_after_refusals(engine: Any, param: nn.Parameter) -> None:
    x = torch.ones(2, 3)
    expected = engine(x).detach().clone()
    with pytest.raises(WeightsError):
        torch.zeros(1).new(param)
    loss = engine(x).square().mean()
    assert torch.equal(engine(x), expected)
    engine.backward(loss)
    engine.step()
    assert not torch.equal(engine(x), expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_weights_come_and_go_in_every_mode(engine: Any, param: nn.Parameter, mode: Any) -> None:
    with mode():
        before = param.clone()
        assert torch.equal(engine.module(torch.eye(3)), engine.module(torch.eye(3)))
        with pytest.raises(WeightsError, match=r"layer\.weight"):
            torch.zeros(1).new(param)
    assert torch.equal(param, before)


def test_a_placeholder_has_every_dtype_and_no_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64):
        made = placeholder.make((1 << 40,), dtype)
        assert (made.shape, made.dtype, made.device.type) == ((1 << 40,), dtype, "cpu")
    assert not placeholder.is_held_by(torch.zeros(1))


def test_on_the_meta_device_a_parameter_takes_it_and_gives_it_back() -> None:
    param = nn.Parameter(torch.empty(4, 3, device="meta"))
    param.data = placeholder.make(param.shape, param.dtype, "meta")
    assert (param.shape, param.device.type) == ((4, 3), "meta")
    param.data = torch.empty(4, 3, device="meta")
    assert param.is_contiguous()
