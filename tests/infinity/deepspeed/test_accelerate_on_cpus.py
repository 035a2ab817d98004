"""Accelerate asks for no backend where it sees no GPU, and would count one process; it steps inside its backward."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

pytest.importorskip("accelerate")

COUNTING = """
import json
import infinity.deepspeed as deepspeed
deepspeed.install()
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from infinity.errors import ConfigError

config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": False}
seen = []
for counted in (None, None, 1):
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(config)))
    if counted is not None:
        AcceleratorState._shared_state["num_processes"] = counted
    model = torch.nn.Linear(4, 2)
    try:
        _, _, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters()), DataLoader(torch.arange(32.0).reshape(8, 4), batch_size=2)
        )
        firsts = [batch[0, 0].item() for batch in loader]
        seen.append([accelerator.num_processes, accelerator.process_index, *firsts])
    except ConfigError as error:
        seen.append(str(error))
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
print(json.dumps(seen))
"""


def test_it_is_told_the_backend_and_shares_the_data_out(tmp_path: Path) -> None:
    """Where it starts torch.distributed itself, where that runs already, and where it counts others all the same."""
    ended = run_ranks(COUNTING, tmp_path, num_ranks=2)
    for rank, (started, found, refused) in enumerate(each.answer for each in ended):
        assert started == found == [2, rank, 8.0 * rank, 16 + 8.0 * rank]
        assert refused.startswith("accelerator.num_processes = 1: there are 2 ranks, ")
        assert 'InitProcessGroupKwargs(backend="gloo")' in refused


BESIDE = """
import json
import infinity.deepspeed as deepspeed
deepspeed.install()
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from infinity.errors import EngineStateError

config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3},
    "zero_force_ds_cpu_optimizer": False,
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss = lambda: model(torch.ones(2, 4)).square().mean()
for _ in range(6):
    loss().backward()
    model.step()
seen = [model.global_steps]
for number in range(3):
    try:
        loss().backward()
        optimizer.step()
    except EngineStateError as error:
        seen += [number, str(error)]
model.zero_grad()
with accelerator.accumulate(model):
    accelerator.backward(loss())
print(json.dumps([*seen, model.global_steps]))
"""


def test_a_backward_of_the_scripts_own_that_nothing_steps_by_is_refused(tmp_path: Path) -> None:
    """Under DeepSpeed Accelerate's ``optimizer.step()`` does nothing: the script would train nothing, in silence."""
    (ended,) = run_ranks(BESIDE, tmp_path, num_ranks=1)
    steps, number, said, steps_later = ended.answer
    assert (steps, number) == (3, 2)
    assert "accelerator.backward(loss)" in said
    assert "model.step()" in said
    assert steps_later in (3, 4)


SEVERAL = """
import json
import infinity.deepspeed as deepspeed
deepspeed.install()
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState

config = {
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
}

def losses_of(model, number):
    out = model(torch.full((2, 4), 1.0 + number))
    return out.square().mean(), out.abs().mean(), model(torch.ones(2, 4)).mean()

found = []
for plain in (True, False):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not plain:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(3):
        first, second, third = losses_of(model, number)
        first.backward(retain_graph=True)
        second.backward()
        third.backward()
        (optimizer if plain else model).step()
        optimizer.zero_grad()
    found.append([value.tolist() for value in model.state_dict().values()])
print(json.dumps(found))
"""


def test_several_losses_of_one_step_are_the_scripts_own(tmp_path: Path) -> None:
    """``model.step()`` ends it, as under DeepSpeed: no run of the model lies between their backwards."""
    (ended,) = run_ranks(SEVERAL, tmp_path, num_ranks=1)
    plain, ours = ended.answer
    assert plain == ours
