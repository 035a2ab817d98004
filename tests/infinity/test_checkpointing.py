"""Checkpointed calls have the bits of torch's own, wherever their inputs wait for backward."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import infinity
from infinity import checkpointing
from infinity.config.sections import ActivationCheckpointing
from infinity.errors import ConfigError

WIDTH, NUM_BLOCKS = 48, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.dropout(self.outer(torch.relu(self.inner(x)))) * scale, mask


class Model(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.call = nn.ModuleList(Block() for _ in range(NUM_BLOCKS)), call
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(2, dtype=torch.long)
        for block in self.blocks:
            x, mask = self.call(block, x, mask, scale=self.scale * 2)
        return x.square().mean()


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> checkpointing.Checkpointing:
    """The process's settings are the test's alone."""
    own = checkpointing.Checkpointing()
    monkeypatch.setattr(checkpointing, "_process", own)
    return own


def torchs(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False, **kwargs)


def trained(call: Callable[..., Any], **sections: Any) -> dict[str, Tensor]:
    model = Model(call)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **sections,
    }
    with infinity.initialize(model=model, config=config)[0] as engine:
        torch.manual_seed(7)
        for _ in range(3):
            engine.backward(engine(torch.randn(2, WIDTH)))
            engine.step()
        weights: dict[str, Tensor] = engine.full_state_dict()
        return weights


def plain() -> dict[str, Tensor]:
    model = Model(torchs)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0, fused=True)
    torch.manual_seed(7)
    for _ in range(3):
        model(torch.randn(2, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


SECTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cpu": {"cpu_checkpointing": True},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": NUM_BLOCKS},
    "both": {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "number_checkpoints": NUM_BLOCKS},
    "partitioned": {"partition_activations": True, "synchronize_checkpoint_boundary": True},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_inputs_wait_where_they_are_told_to_and_no_bit_changes(
    section: str, process: checkpointing.Checkpointing
) -> None:
    memories: set[int] = set()
    keep = process._waiting

    def watched(tensor: Tensor) -> Any:
        kept = keep(tensor)
        if kept is not tensor:
            memories.add(kept._values.untyped_storage().data_ptr())
        return kept

    process._waiting = watched  # type: ignore[method-assign]
    weights, expected = trained(checkpointing.checkpoint, activation_checkpointing=SECTIONS[section]), plain()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    in_one_piece = "contiguous_memory_optimization" in SECTIONS[section]
    assert len(memories) == (2 if in_one_piece else 0), "one piece for activations, one for the scale"
    assert checkpointing.is_configured() is (section != "nothing")


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="host memory is another one than the device's")
def test_inputs_wait_in_host_memory(process: checkpointing.Checkpointing) -> None:
    process.configure(ActivationCheckpointing(cpu_checkpointing=True))
    device = torch.accelerator.current_accelerator()
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).to(device)
    x = torch.randn(4096, 4096, device=device, requires_grad=True)
    with torch.no_grad():
        expected = model(x)
    before = torch.accelerator.memory_allocated(device)
    y = x
    for layer in model:
        y = checkpointing.checkpoint(layer, y)
    held = torch.accelerator.memory_allocated(device) - before
    assert held < 2.5 * x.nbytes, "two activations at most are on the device"
    assert torch.equal(y, expected)
    y.sum().backward()  # type: ignore[no-untyped-call]


def test_more_checkpoints_than_were_told_of_are_refused() -> None:
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=NUM_BLOCKS - 1)
    model = Model(checkpointing.checkpoint)
    with pytest.raises(ConfigError, match="number of checkpointed calls") as refusal:
        model(torch.randn(2, WIDTH, requires_grad=True))
    assert refusal.value.key == "activation_checkpointing.number_checkpoints"
    checkpointing.set_num_layers(NUM_BLOCKS)
    for _ in range(2):  # slots are free again after backward, and where a graph is dropped
        model(torch.randn(2, WIDTH, requires_grad=True)).backward()
        model(torch.randn(2, WIDTH, requires_grad=True))
    losses: list[Tensor] = [model(torch.randn(2, WIDTH, requires_grad=True))]
    checkpointing.reset()
    losses.append(model(torch.randn(2, WIDTH, requires_grad=True)))
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]


def test_each_call_is_waited_for_and_timed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append(1))
    checkpointing.configure(None, synchronize=True, profile=True)
    model = Model(checkpointing.checkpoint)
    with caplog.at_level(logging.INFO, logger="infinity.checkpointing"):
        model(torch.randn(2, WIDTH, requires_grad=True)).backward()
    assert caplog.text.count("checkpoint forward:") == caplog.text.count("checkpoint backward:") == NUM_BLOCKS
    assert len(waited) == 4 * NUM_BLOCKS


def test_configure_reads_a_file_and_what_is_given_goes_before_it(tmp_path: Path, process: Any) -> None:
    assert not checkpointing.is_configured()
    path = tmp_path / "ds.json"
    section = {"cpu_checkpointing": True, "profile": True, "number_checkpoints": 3}
    path.write_text(json.dumps({"train_batch_size": 1, "activation_checkpointing": section}))
    checkpointing.configure(None, deepspeed_config=str(path), profile=False, partition_activations=True)
    assert checkpointing.is_configured()
    assert process.settings == ActivationCheckpointing(cpu_checkpointing=True, number_checkpoints=3)
    trained(checkpointing.checkpoint, activation_checkpointing={"synchronize_checkpoint_boundary": True})
    assert not process.settings.synchronize_checkpoint_boundary
    assert not process.settings.profile, "configure() goes before the engine's configuration"


def test_a_section_of_one_piece_that_nobody_configures_is_no_refusal(process: Any) -> None:
    """Files say so of scripts that never call ``configure``, which asks for the number."""
    one_piece = {"contiguous_memory_optimization": True, "partition_activations": True}
    trained(checkpointing.checkpoint, activation_checkpointing=one_piece)
    assert not process.settings.contiguous_memory_optimization
    with pytest.raises(ConfigError, match="how many calls there are"):
        checkpointing.configure(None, deepspeed_config={"train_batch_size": 1, "activation_checkpointing": one_piece})


def test_what_cannot_be_done_is_refused_by_name() -> None:
    class TwoRanks:
        def get_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(ConfigError, match="no model parallelism"):
        checkpointing.configure(TwoRanks())
    with pytest.raises(ConfigError, match="contiguous_memory_optimization needs"):
        checkpointing.configure(None, contiguous_checkpointing=True)


def test_outputs_come_as_in_the_dialect() -> None:
    x = torch.ones(2, requires_grad=True)
    assert isinstance(checkpointing.checkpoint(lambda y: [y * 2, 3], x), tuple)
    assert isinstance(checkpointing.checkpoint(lambda y: (y * 2,), x), Tensor)
    with torch.no_grad():
        assert torch.equal(checkpointing.checkpoint(torch.sin, x), torch.sin(x))


@pytest.mark.parametrize("in_cpu", [False, True])
def test_an_input_that_is_written_before_backward_is_an_error_as_torchs(in_cpu: bool) -> None:
    """Where inputs are to wait in host memory and are there already, they wait where they are."""
    checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    hidden = torch.ones(3, WIDTH) @ weight
    output = checkpointing.checkpoint(lambda x: (x @ weight).tanh(), hidden)
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
