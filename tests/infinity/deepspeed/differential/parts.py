"""Small public parts: tiled and linear layers, numbers and tensors, loss scalers, estimates."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed.runtime import utils  # type: ignore[import-not-found]
from deepspeed.runtime.fp16.loss_scaler import (  # type: ignore[import-not-found]
    CreateLossScaler,
    DynamicLossScaler,
    LossScaler,
)
from deepspeed.runtime.zero import linear  # type: ignore[import-not-found]
from deepspeed.runtime.zero.tiling import (  # type: ignore[import-not-found]
    TiledLinear,
    TiledLinearReturnBias,
    split_tensor_along_last_dim,
)
from torch import nn

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import config, start


@cases_over({f"{i}x{o}": (i, o) for i in (1, 2, 5) for o in (1, 3)})
def tiled_linear(_directory: Path, splits: tuple[int, int]) -> Any:
    torch.manual_seed(0)
    base = nn.Linear(20, 12)
    tiled = TiledLinear(20, 12, bias=True, init_linear=base, in_splits=splits[0], out_splits=splits[1])
    x = torch.randn(4, 20, requires_grad=True)
    out = tiled(x)
    out.pow(2).mean().backward()
    return [
        out, x.grad, len(list(tiled.parameters())), len(tiled.linears), len(tiled.linears[0]),
        [[list(tile.weight.shape) for tile in row] for row in tiled.linears],
        [[tile.bias is not None for tile in row] for row in tiled.linears],
    ]  # fmt: skip


@cases_over(
    {
        "no-bias": {"bias": False},
        "uncombined": {"combine_out_splits": False},
        "pre-split": {"input_is_already_split": True},
    }
)
def tiled_linear_with(_directory: Path, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    base = nn.Linear(8, 6, bias=options.get("bias", True))
    tiled = TiledLinear(8, 6, init_linear=base, in_splits=2, out_splits=3, **options)
    x = torch.randn(2, 8)
    given = list(torch.split(x, 4, dim=-1)) if "input_is_already_split" in options else x
    return tiled(given), base(x)


@case()
def tiled_linear_refuses(_directory: Path) -> Any:
    return [
        raised(lambda: TiledLinear(8, 6, in_splits=0)), raised(lambda: TiledLinear(8, 6, in_splits=20)),
        raised(lambda: TiledLinear(8, 6, out_splits=20)), raised(lambda: TiledLinear(8, 6, out_splits=0)),
    ]  # fmt: skip


@case()
def tiled_linear_copies(_directory: Path) -> Any:
    torch.manual_seed(0)
    base, tiled = nn.Linear(7, 5), TiledLinear(7, 5, in_splits=2, out_splits=2)
    tiled.copy_params_from(base)
    x = torch.randn(3, 7)
    return torch.allclose(tiled(x), base(x), atol=1e-6)


@case()
def tiled_linear_of_anothers_class(_directory: Path) -> Any:
    class Returning(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.linear(x, self.weight), self.bias

    torch.manual_seed(0)
    base = Returning(6, 4)
    tiled = TiledLinearReturnBias(6, 4, linear_cls=Returning, init_linear=base, in_splits=2, out_splits=2)
    x = torch.randn(2, 6)
    out, bias = tiled(x)
    return out, bias, base(x)


@case()
def tiled_linear_trained(_directory: Path) -> Any:
    torch.manual_seed(0)
    with deepspeed.zero.Init(dtype=torch.float32):
        tiled = TiledLinear(8, 6, in_splits=2, out_splits=2)
    engine = start(tiled, config(3))
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 8)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@case()
def split_of_the_last_dimension(_directory: Path) -> Any:
    tensor = torch.arange(12.0).reshape(2, 6)
    parts = split_tensor_along_last_dim(tensor, [2, 3, 1])
    return parts, [part.is_contiguous() for part in split_tensor_along_last_dim(tensor, [3, 3], True)]


@cases_over({"fp32": torch.float32, "bf16": torch.bfloat16})
def zero_linear(_directory: Path, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    layer = linear.LinearModuleForZeroStage3(5, 3).to(dtype)
    x = torch.randn(2, 5, dtype=dtype, requires_grad=True)
    out = layer(x)
    out.float().pow(2).mean().backward()
    wrapped = linear.zero3_linear_wrap(x, layer.weight, layer.bias)
    return out, x.grad, layer.weight.grad, layer.bias.grad, torch.equal(out, wrapped), str(layer)


@cases_over({"bias": True, "no-bias": False})
def zero_linear_as_a_function(_directory: Path, with_bias: bool) -> Any:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    bias = torch.randn(4, requires_grad=True) if with_bias else None
    out = linear.LinearFunctionForZeroStage3.apply(x, weight, bias)
    out.sum().backward()
    return out, x.grad, weight.grad, None if bias is None else bias.grad


@case()
def zero_linear_under_autocast(_directory: Path) -> Any:
    torch.manual_seed(0)
    layer = linear.LinearModuleForZeroStage3(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(2, 5))
    out.float().sum().backward()
    return str(out.dtype), str(layer.weight.grad.dtype), layer.weight.grad


@cases_over({"even": (8, 4), "odd": (10, 4), "few": (3, 5), "one": (7, 1)})
def partition_uniform(_directory: Path, given: tuple[int, int]) -> Any:
    return utils.partition_uniform(*given)


@cases_over({
    "even": ([1, 1, 1, 1], 2), "first": ([10, 1, 1, 1], 2), "last": ([1, 1, 1, 10], 3), "float": ([0.5, 2.5, 1.0], 2),
    "zeros": ([0, 0, 0, 5], 2), "many": ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 4), "one": ([1, 2, 3], 1),
    "more-parts": ([1, 2], 4),
})  # fmt: skip
def partition_balanced(_directory: Path, given: tuple[list[float], int]) -> Any:
    return utils.partition_balanced(*given)


@case()
def prefix_sum(_directory: Path) -> Any:
    return utils.prefix_sum_inc([3, 4, 5]), utils.prefix_sum_inc([1])


@cases_over({"2": 2, "inf": float("inf"), "1": 1})
def clipped_gradients(_directory: Path, norm_type: float) -> Any:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(1))]
    params[0].grad, params[1].grad = torch.arange(3.0), torch.full((2, 2), 2.0)
    norm = utils.clip_grad_norm_(params, 1.5, norm_type=norm_type)
    return float(norm), params[0].grad, params[1].grad


@case(ranks=2)
def clipped_gradients_of_two(_directory: Path) -> Any:
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.full((4,), float(deepspeed.comm.get_rank() + 1))
    return float(utils.clip_grad_norm_([param], 0.5)), param.grad


@case()
def norms(_directory: Path) -> Any:
    tensors = [torch.arange(4.0), torch.full((3,), -2.0)]
    out = [float(utils.get_global_norm_of_tensors(tensors)), float(utils.get_global_norm(norm_list=[3.0, 4.0]))]
    out.append(float(utils.get_global_norm_of_tensors(tensors, norm_type=float("inf"))))
    params = [nn.Parameter(torch.full((2,), 3.0))]
    params[0].grad = torch.ones(2)
    out += [float(utils.get_weight_norm(params)), float(utils.get_flattened_grad_norm(params))]
    copies = [each.clone() for each in tensors]
    out.append(float(utils.clip_tensors_by_global_norm(copies, max_norm=1.0)))
    return out, copies


@case()
def invalid_norms(_directory: Path) -> Any:
    found = []
    for bad in (-1.0, -0.5, float("nan"), float("inf"), 0.0):
        as_tensor = torch.tensor([bad, 1.0])
        found.append([
            utils.is_invalid_grad_norm(bad), utils.is_invalid_grad_norm(as_tensor),
            utils.get_global_norm([3.0, bad]), utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(bad)]),
            utils.CheckOverflow().check_using_norm([1.0, bad], reduce_overflow=False),
        ])  # fmt: skip
    return found, utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(4.0)])


@case()
def tensors_by_dtype(_directory: Path) -> Any:
    from deepspeed.runtime.zero.stage_1_and_2 import split_half_float_double

    given = [torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.float64, torch.float32)]
    parted = split_half_float_double([*given, torch.eye(2).to_sparse(), torch.ones(3)])
    return [[str(each.dtype) for each in several] for several in parted]


@case()
def overflow_is_found(_directory: Path) -> Any:
    checker = utils.CheckOverflow()
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    good.grad, bad.grad = torch.ones(2), torch.tensor([1.0, float("inf")])
    return [
        bool(checker.has_overflow([good])), bool(checker.has_overflow([good, bad])),
        bool(checker.has_overflow_serial([bad])), bool(utils.CheckOverflow._has_inf_or_nan(bad.grad, 0)),
    ]  # fmt: skip


@case()
def small_functions(directory: Path) -> Any:
    utils.ensure_directory_exists(str(directory / "a" / "b" / "file"))
    return [
        (directory / "a" / "b").is_dir(), utils.call_to_str("base", 1, x=2), utils.get_only_unique_item([3, 3]),
        raised(lambda: utils.get_only_unique_item([3, 4])), utils.see_memory_usage("x"),
        [list(each.shape) for each in utils.align_dense_tensors([torch.ones(3), torch.ones(2)], 4)],
        utils.get_inactive_params([nn.Parameter(torch.ones(2))]), utils.noop_decorator(len) is len,
        utils.is_model_parallel_parameter(nn.Parameter(torch.ones(1))),
    ]  # fmt: skip


@case()
def seeds(_directory: Path) -> Any:
    utils.set_random_seed(5)
    return torch.rand(2)


@case(ranks=2)
def partitioned_tensors(_directory: Path) -> Any:
    group = deepspeed.comm.new_group([0, 1])
    tensor = torch.arange(10.0).reshape(5, 2)
    part = utils.PartitionedTensor(tensor, group=group)
    again = utils.PartitionedTensor.from_meta(part.to_meta(), part.data(), group=group, device="cpu")
    return (
        part.local_size(),
        part.full_size(),
        part.data(),
        torch.equal(part.full(), tensor),
        torch.equal(again.full(), tensor),
    )


@case()
def loss_scalers(_directory: Path) -> Any:
    fixed = LossScaler(8)
    dynamic = DynamicLossScaler(
        init_scale=2.0**6, scale_window=2, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    seen = []
    for overflow in (False, False, True, True, False, False, False, True, True, True):
        dynamic.update_scale(overflow)
        seen.append((dynamic.loss_scale, dynamic.cur_hysteresis, dynamic.cur_iter, dynamic.last_overflow_iter))
    param = nn.Parameter(torch.ones(2))
    fixed.backward((param * 2).sum())
    return [
        fixed.loss_scale, fixed.dynamic, dynamic.dynamic, param.grad, fixed.cur_scale, dynamic.scale_window,
        dynamic.min_scale, dynamic.scale_factor, dynamic.delayed_shift, dynamic.consecutive_hysteresis, seen,
    ]  # fmt: skip


@case()
def loss_scalers_made(_directory: Path) -> Any:
    arguments = {
        "init_scale": 16,
        "scale_window": 3,
        "min_scale": 2,
        "delayed_shift": 1,
        "consecutive_hysteresis": True,
    }
    made = [
        CreateLossScaler(torch.half, 4, False, None), CreateLossScaler(torch.half, 0, True, arguments),
        CreateLossScaler(torch.float32, 4, True, None), CreateLossScaler(torch.bfloat16, 4, False, None),

    ]  # fmt: skip
    return [(type(each).__name__, each.loss_scale) for each in made]


@case()
def the_least_scale_of_a_scaler(_directory: Path) -> Any:
    scaler = DynamicLossScaler(2, 10, 1, 1, False)
    scaler.update_scale(True)
    at_least = scaler.loss_scale
    silent = DynamicLossScaler(1, 10, 1, 1, False, raise_error_at_min_scale=False)
    silent.update_scale(True)
    return at_least, raised(lambda: scaler.update_scale(True)), silent.loss_scale


@case()
def on_a_device(_directory: Path) -> Any:
    with deepspeed.OnDevice(dtype=torch.half, device="meta"):
        model = nn.Linear(3, 3)
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="cpu"):
        other = nn.Linear(3, 3)
    return [
        str(model.weight.device),
        str(model.weight.dtype),
        str(other.weight.dtype),
        str(nn.Linear(2, 2).weight.dtype),
    ]


@case()
def accelerator(_directory: Path) -> Any:
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-not-found]

    found = get_accelerator()
    return [
        found.device_name(), found.current_device_name(), found.communication_backend_name() in ("ccl", "gloo"),
        found.is_fp16_supported() in (True, False), found.is_bf16_supported(), found.device_name(0) in ("cpu", "cpu:0"),
        str(found.current_device()) in ("cpu", "0"), found.is_synchronized_device(),
        found.on_accelerator(torch.ones(1)), found.synchronize() is None, found.device_count() >= 1,
    ]  # fmt: skip


@case()
def places_of_modules(_directory: Path) -> Any:
    import importlib

    names = [
        "runtime.config",
        "runtime.zero.config",
        "runtime.zero.utils",
        "runtime.zero.stage3",
        "runtime.zero.stage_1_and_2",
        "runtime.zero.partition_parameters",
        "runtime.zero.linear",
        "runtime.zero.tiling",
        "runtime.fp16.loss_scaler",
        "runtime.fp16.fused_optimizer",
        "runtime.fp16.unfused_optimizer",
        "runtime.bf16_optimizer",
        "runtime.lr_schedules",
        "runtime.utils",
        "runtime.dataloader",
        "runtime.engine",
        "runtime.base_optimizer",
        "runtime.constants",
        "utils.groups",
        "utils.tensor_fragment",
        "utils.z3_leaf_module",
        "utils.zero_to_fp32",
        "utils.logging",
        "utils.init_on_device",
        "comm",
        "comm.comm",
        "accelerator",
        "ops.adam",
        "ops.op_builder",
        "checkpoint.constants",
        "checkpoint.utils",
        "runtime.activation_checkpointing.checkpointing",
        "launcher.runner",
        "launcher.launch",
        "runtime.zero.offload_config",
        "runtime.config_utils",
        "utils.torch",
    ]
    return [importlib.import_module(f"deepspeed.{name}").__name__ for name in names]
