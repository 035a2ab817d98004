"""Linear layers, builders of extensions, figures of memory, and what the optimizer says of its loss scale."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import infinity.deepspeed as deepspeed
from infinity.deepspeed.accelerators import get_accelerator
from infinity.deepspeed.linear_layers import LinearFunctionForZeroStage3, LinearModuleForZeroStage3, zero3_linear_wrap
from infinity.deepspeed.page_locked import NativePinnedMemory
from infinity.deepspeed.tensors import see_memory_usage
from infinity.errors import ConfigError


def config(**sections: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def test_its_linear_layer_trains_as_torchs() -> None:
    weights = []
    for kind in (LinearModuleForZeroStage3, nn.Linear):
        torch.manual_seed(0)
        model = nn.Sequential(kind(8, 8), nn.Tanh(), kind(8, 8, bias=False))
        engine, *_ = deepspeed.initialize(model=model, config=config())
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)).square().sum())
            engine.step()
        weights.append(engine.full_state_dict())
        engine.destroy()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    for function in (zero3_linear_wrap, LinearFunctionForZeroStage3.apply):
        assert torch.equal(function(x, weight, bias), nn.functional.linear(x, weight, bias))
        assert torch.equal(function(x, weight), nn.functional.linear(x, weight))


def test_memory_is_told_whatever_the_process_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is the script's, cut after 15 bytes, which may be amid a letter."""
    own = Path(f"/proc/self/task/{os.getpid()}/comm")
    before = own.read_bytes()
    own.write_bytes("entraînement-é".encode())
    try:
        assert not os.fsdecode(own.read_bytes()).strip().isprintable(), "it is cut amid a letter"
        see_memory_usage("now", force=True)
        if not torch.accelerator.is_available():
            assert get_accelerator().memory_allocated() > 1 << 20
    finally:
        own.write_bytes(before)
    assert re.search(r"now: .* process (\d+\.\d+) GB", capsys.readouterr().out)


def test_builders_say_what_is_served_and_load_nothing() -> None:
    builders = importlib.import_module("infinity.deepspeed.ops.op_builder")
    ops = importlib.import_module("infinity.deepspeed.ops")
    assert ops.__compatible_ops__[builders.CPUAdamBuilder.NAME]
    assert builders.AsyncIOBuilder().is_compatible()
    assert not ops.__compatible_ops__["sparse_attn"]
    with pytest.raises(ImportError, match="cpu_adam"):
        builders.CPUAdamBuilder().load()
    with pytest.raises(ImportError, match="nothing is compiled"):
        importlib.import_module("infinity.deepspeed.ops.op_builder.TransformerBuilder")


def test_the_optimizer_says_how_its_loss_scale_moves() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 3, "min_loss_scale": 4}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config(fp16=fp16))
    assert optimizer.dynamic_loss_scale
    assert optimizer.loss_scaler.cur_scale == optimizer.loss_scaler.loss_scale == optimizer.cur_scale == 2.0**8
    assert (optimizer.loss_scaler.scale_window, optimizer.loss_scaler.cur_hysteresis) == (2, 3)
    assert optimizer.loss_scaler.min_scale == 4
    next(engine.module.parameters()).grad = torch.full((4, 4), torch.inf, dtype=torch.float16)
    engine.step()
    assert optimizer.overflow
    assert optimizer.loss_scaler.cur_hysteresis == 2
    engine.destroy()
    _, fixed, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config(fp16={"enabled": True, "loss_scale": 16}))
    assert not fixed.dynamic_loss_scale
    assert fixed.loss_scaler.loss_scale == 16


def test_memory_that_was_pinned_is_known_by_its_views_until_it_is_given_back() -> None:
    pins = NativePinnedMemory()
    source = torch.arange(6.0).reshape(2, 3)
    pinned, flat = pins.pin(source), pins.pin(source, make_copy=False, match_shape=False)
    empty = pins.pin_empty(torch.empty(1, dtype=torch.bfloat16), (4, 2))
    assert torch.equal(pinned, source)
    assert (flat.shape, empty.shape, empty.dtype) == ((6,), (4, 2), torch.bfloat16)
    assert all(pins.is_pinned(each) for each in (pinned, pinned[1:], pinned.t(), flat, empty))
    others = (source, torch.empty(2, device="meta"), FakeTensorMode().from_tensor(source))
    assert not any(pins.is_pinned(each) for each in others)
    view = pinned[1:]
    assert pins.unpin(pinned)
    assert not pins.unpin(source)
    assert not pins.is_pinned(pinned)
    assert not pins.is_pinned(view)
    assert torch.equal(view, source[1:]), "its values stay"
    del flat, empty
    gc.collect()
    assert not pins._ends, "what nobody has any more is given back"


def test_an_engine_that_ends_leaves_no_hook_on_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    engine, *_ = deepspeed.initialize(model=model, config=config())
    assert model._forward_hooks
    engine.destroy()
    assert not model._forward_hooks


def test_the_optimizer_of_stage_3_lists_the_parameters_of_leaves() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    deepspeed.utils.set_z3_leaf_module(model[0], True)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config())
    assert list(optimizer.leaf_parameters) == [model[0]]
    assert all(a is b for a, b in zip(optimizer.leaf_parameters[model[0]], model[0].parameters(), strict=True))
    engine.destroy()


def test_both_ways_of_checkpointing_are_one_and_model_parallel_seeds_are_refused_with_the_reason() -> None:
    checkpointing = deepspeed.checkpointing
    assert checkpointing.non_reentrant_checkpoint is checkpointing.checkpoint
    for name in ("get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"):
        with pytest.raises(AttributeError, match=r"there is no model parallelism, .* torch\.manual_seed\(\) seeds"):
            getattr(checkpointing, name)


def test_swap_directories_are_made_as_there_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "weights" / "here")},
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "weights" / "here")},
    }
    with deepspeed.zero.Init(config_dict_or_path=config(zero_optimization=zero)):
        model = nn.Linear(8, 8)
    assert (tmp_path / "weights" / "here").is_dir()
    assert caplog.text.count("was not there: made") == 1
    deepspeed.initialize(model=model, config=config(zero_optimization=zero))[0].destroy()
    for path, told in (
        ("~/swap", "stand for nothing"),
        ("none", "environment"),
        (str(Path(__file__) / "under"), "Not a directory"),
    ):
        zero["offload_param"] = zero["offload_optimizer"] = {"device": "nvme", "nvme_path": path}
        with pytest.raises(ConfigError, match=rf"nvme_path = '{re.escape(path)}'.*{told}"):
            deepspeed.initialize(model=nn.Linear(8, 8), config=config(zero_optimization=zero))
    zero["offload_param"] = zero["offload_optimizer"] = {"device": "cpu", "nvme_path": str(tmp_path / "unused")}
    deepspeed.initialize(model=nn.Linear(8, 8), config=config(zero_optimization=zero))[0].destroy()
    assert not (tmp_path / "unused").exists()


def test_gradients_are_parted_by_their_dtype() -> None:
    stage_2 = importlib.import_module("infinity.deepspeed.runtime.zero.stage_1_and_2")
    dense = [torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.float64, torch.float32)]
    parted = stage_2.split_half_float_double(each for each in [*dense, torch.eye(2).to_sparse(), dense[3][:1]])
    assert [[each.dtype for each in several] for several in parted] == [
        [torch.float32] * 2,
        [torch.float64],
        [torch.bfloat16],
    ]
    assert parted[0][0] is dense[3]


def test_the_level_of_the_logger_is_the_configurations() -> None:
    own = importlib.import_module("infinity.deepspeed.runtime.config")
    others = importlib.import_module("infinity.deepspeed.utils.logging").logger
    before = [logging.getLogger(name).level for name in ("infinity", "io_daemon", others.name)]
    others.setLevel(logging.DEBUG)
    try:
        for level, found in ((None, logging.DEBUG), ("ERROR", logging.ERROR)):
            given = config(**({"log_level": level} if level else {}))
            assert own.get_log_level(given) == level
            engine = deepspeed.initialize(model=nn.Linear(8, 8), config=given)[0]
            assert engine.log_level() == level
            assert others.getEffectiveLevel() == found
            engine.destroy()
    finally:
        for name, former in zip(("infinity", "io_daemon", others.name), before, strict=True):
            logging.getLogger(name).setLevel(former)
