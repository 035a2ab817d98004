"""Small tools beside the engine: data sets, memory, caches, groups of ranks, parts of tensors, timers."""

# mypy: ignore-errors
from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed  # type: ignore[import-not-found]
import numpy
import torch
from deepspeed.accelerator import cuda_accelerator
from deepspeed.checkpoint import get_model_3d_descriptor, merge_state, model_3d_desc
from deepspeed.inference.v2.inference_utils import ceil_div
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset
from deepspeed.runtime.zero import unwrap_model_for_generation
from deepspeed.utils import debug, groups, nvtx
from deepspeed.utils.static_cache import DeepSpeedStaticCache, DeepSpeedStaticLayer
from deepspeed.utils.timer import ThroughputTimer

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, train


@case()
def memory_mapped_samples(directory: Path) -> Any:
    samples = [[3, 1, 4], [], [1, 5, 9, 2, 6], [5]]
    prefixes = []
    for number, kind in enumerate((numpy.int32, numpy.uint16, torch.int64)):
        prefix = str(directory / f"set{number}")
        builder = indexed_dataset.MMapIndexedDatasetBuilder(indexed_dataset.data_file_path(prefix), dtype=kind)
        builder.add_item(torch.tensor(samples[0]))
        builder.add_item_numpy(numpy.array(samples[1], dtype="int16"))
        builder.end_document()
        builder.add_items([numpy.array(each) for each in samples[2:]])
        builder.end_document()
        builder.finalize(indexed_dataset.index_file_path(prefix))
        prefixes.append(prefix)
    merged = indexed_dataset.MMapIndexedDatasetBuilder(str(directory / "both.bin"), dtype=numpy.int32)
    merged.add_item(torch.tensor([7]))
    merged.end_document()
    merged.merge_file_(prefixes[0])
    merged.finalize(str(directory / "both.idx"))
    seen = []
    for prefix in (*prefixes, str(directory / "both")):
        found = indexed_dataset.MMapIndexedDataset(prefix, skip_warmup=True)
        read = [found[number].tolist() for number in range(len(found))]
        parts = [each.tolist() for each in found[1:3]], found.get(len(found) - 2, offset=1, length=3).tolist()
        shown = found.sizes.tolist(), found.size(0), found.doc_idx.tolist(), str(numpy.dtype(found.dtype))
        files = [list((directory / f"{prefix}{end}").read_bytes()) for end in (".idx", ".bin")]
        seen.append((read, parts, shown, files, raised(lambda found=found: found[0:3:2])))
    exists = [indexed_dataset.MMapIndexedDataset.exists(each) for each in (prefixes[0], str(directory / "none"))]
    return seen, exists


@case()
def a_cache_for_generation(_directory: Path) -> Any:
    generator = torch.Generator().manual_seed(3)

    def new(rows: int, tokens: int = 1) -> torch.Tensor:
        return torch.randn(rows, 2, tokens, 3, generator=generator)

    layer = DeepSpeedStaticLayer(4)
    seen = [layer.get_seq_length(), layer.update(new(2, 3), new(2, 3))]
    layer.set_write_position(torch.tensor(3))
    seen += [layer.update(new(2), new(2)), layer.get_seq_length(), layer.get_mask_sizes(1)]
    layer.set_write_position(torch.tensor([1, 2]))
    seen += [layer.update(new(2), new(2)), layer.get_seq_length()]
    layer.reorder_cache(torch.tensor([1, 0]))
    seen += [layer.keys, layer.update(new(1), new(1))]
    layer.set_write_position(torch.tensor([1]))
    refused = [raised(lambda: layer.update(new(2), new(2)))]
    layer.set_write_position(torch.tensor([1, 4]))
    refused += [raised(lambda: layer.update(new(2), new(2))), raised(lambda: layer.set_write_position(torch.ones(2)))]
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2, hidden_size=6)
    cache = DeepSpeedStaticCache(config, 3, 4, device="cpu", dtype=torch.float32)
    positions = torch.tensor([0, 2, 1])
    cache.set_write_position(positions)
    seen += [cache.update(new(3), new(3), 1), cache.get_seq_length(), len(cache), cache.get_max_cache_shape()]
    cache.compact(torch.tensor([2, 1]))
    seen += [cache.layers[1].keys, positions]
    cache.trim_left(1)
    seen += [cache.layers[1].values]
    refused += [raised(lambda given=given: cache.compact(torch.tensor(given))) for given in ([1, 1], [3])]
    refused += [raised(lambda: cache.trim_left(-1))]
    cache.reset()
    return seen, refused, cache.layers[1].keys


@case()
def a_timer_of_samples(_directory: Path) -> Any:
    lines = []
    timer = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=True), 8, 1, 2, logging_fn=lines.append)
    seen = []

    def look() -> None:
        counts = timer.micro_step_count, timer.global_step_count, timer._is_report_boundary()
        times = [getattr(timer, f"{name}_time") > 0 for name in ("start", "end", "total_elapsed", "step_elapsed")]
        seen.append((timer.initialized, timer.started, counts, times, len(lines)))

    timer.stop()
    for number in range(9):
        look()
        timer.start()
        look()
        timer.stop(global_step=number % 2 == 1)
    timer.update_epoch_count()
    look()
    still = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=False), None)
    still.start()
    return seen, still.started, still.batch_size, still._is_report_boundary(), timer.epoch_count


@case()
def ranks_that_share_out_experts(_directory: Path) -> Any:
    seen = []
    for world, tensor, expert, stages in itertools.product((8, 16, 12), (1, 2), (1, 2, 4), (1, 2)):
        for before in (False, True):
            given = (world, tensor, expert, stages, before)
            failed = raised(lambda given=given: groups._get_expert_parallel_ranks(*given))
            seen.append(groups._get_expert_parallel_ranks(*given) if failed == "nothing" else failed)
    return seen, raised(lambda: groups._ensure_divisibility(7, 2)), raised(lambda: groups._ensure_divisibility(8, 2))


@case()
def degrees_of_a_smaller_world(_directory: Path) -> Any:
    seen = []
    for given in itertools.product((1, 2, 4), (1, 2), (1, 2)):
        source = model_3d_desc(*given)
        for asked in itertools.product((1, 2), (1, 2, 4), (1, 2)):
            target = model_3d_desc(*asked)
            can, why = source.can_reshape(target)
            seen.append((can, len(why)))
            if not can:
                seen.append(raised(lambda source=source, target=target: source.reshape(target)))
                continue
            maps = source.reshape(target)
            seen.append([(each.pp_degree, each.tp_degree, each.get_data(), each.get_data(0, 0)) for each in maps])
        seen.append((source.get_desc(), source.world_size(), source.is_valid(0, 1, 5)[0]))
    return seen


DEGREES = {
    "none": (None, None),
    "alike": ({"pp_degree": 1, "tp_degree": 2},) * 2,
    "some": ({"pp_degree": 1, "tp_degree": 2}, None),
    "other": ({"pp_degree": 1, "tp_degree": 2}, {"pp_degree": 2, "tp_degree": 1}),
    "wrong": ({"pp_degree": 2, "tp_degree": 2},) * 2,
}


@cases_over(DEGREES)
def degrees_of_files(directory: Path, degrees: tuple[dict[str, int] | None, ...]) -> Any:
    for number, degree in enumerate(degrees):
        state = {"module": {}} | ({"checkpoint_parallel_dimensions": degree} if degree else {})
        torch.save(state, directory / f"mp_rank_{number:02}_model_states.pt")
        for copy in range(3):
            torch.save({}, directory / f"bf16_zero_pp_rank_{copy}_mp_rank_{number:02}_optim_states.pt")
    failed = raised(lambda: get_model_3d_descriptor(str(directory)))
    return get_model_3d_descriptor(str(directory)).get_desc() if failed == "nothing" else failed


@case()
def states_as_one(_directory: Path) -> Any:
    first = {"a": torch.ones(2), "b": [1, (torch.zeros(1),)], "c": "x"}
    second = {"a": torch.zeros(1), "b": [2, (torch.ones(1),)], "c": "y", "d": 4}
    return merge_state(first, second), [raised(lambda: merge_state([1], [1, 2])), raised(lambda: merge_state(1, [1]))]


@case()
def parts_that_are_rounded_up(_directory: Path) -> Any:
    return [ceil_div(a, b) for a, b in ((0, 3), (1, 3), (3, 3), (4, 3))], raised(lambda: debug.printflock("a", 1))


@cases_over({"even": (4, 6), "uneven": (5, 3), "small": (1,), "scalars": (3, 1, 1)}, ranks=2)
def parts_of_a_tensor(_directory: Path, shape: tuple[int, ...]) -> Any:
    deepspeed.init_distributed("gloo")
    group = deepspeed.comm.new_group(ranks=[0, 1])
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    part = runtime_utils.PartitionedTensor(whole, group=group)
    seen = [part.full_size(), part.local_size(), part.data(), part.full(), part.to_meta(), part.num_parts, part.rank]
    again = runtime_utils.PartitionedTensor.from_meta(part.to_meta(), part.local_data, group, device="cpu")
    return seen, again.full_size(), again.local_size(), again.to_meta(), again.partition


@case(ranks=2)
def gradients_of_experts(_directory: Path) -> Any:
    deepspeed.init_distributed("gloo")
    rank = deepspeed.comm.get_rank()
    for size in (1, 2, 2):
        groups._create_expert_and_data_parallel(size)
    refused_too = raised(lambda: groups._create_expert_and_data_parallel(3))
    ranks = [
        (
            list(groups._get_expert_parallel_group_ranks(f"ep_size_{size}")),
            list(groups._get_expert_data_parallel_group_ranks(f"ep_size_{size}")),
            deepspeed.comm.get_world_size(groups._get_expert_parallel_group(f"ep_size_{size}")),
            deepspeed.comm.get_world_size(groups._get_expert_data_parallel_group(f"ep_size_{size}")),
        )
        for size in (1, 2)
    ]
    plain, expert = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    expert.allreduce, expert.group_name = False, "ep_size_2"
    plain.grad, expert.grad = torch.ones(2), torch.ones(2) * (rank + 1)
    norm = runtime_utils.clip_grad_norm_([plain, expert], max_norm=0.1)
    expert.grad = torch.full((2,), float("inf") if rank else 1.0)
    check = runtime_utils.CheckOverflow([[plain, expert]])
    found = [check.check(), check.check_using_norm([float("inf") if rank else 1.0], reduce_overflow=False)]
    found += [check.check_using_norm([-1.0 if rank else 1.0]), check.check_using_norm([2.0])]
    return refused_too, ranks, norm, plain.grad, found, groups._get_max_expert_size()


class _Recorder:
    """An accelerator that keeps what it was told."""

    def __init__(self, has_domains: bool) -> None:
        self.told = []
        self.supports_nvtx_domain = has_domains

    def range_push(self, *given: Any, **named: Any) -> None:
        self.told.append(("push", given, named))

    def range_pop(self, *given: Any, **named: Any) -> None:
        self.told.append(("pop", given, named))


@case()
def ranges_around_functions(_directory: Path) -> Any:
    @nvtx.instrument_w_nvtx
    def double(number: int) -> int:
        return 2 * number

    seen = []
    for has_domains, enabled, compiling in itertools.product((False, True), repeat=3):
        recorder = _Recorder(has_domains)
        with (
            mock.patch.object(nvtx, "get_accelerator", lambda recorder=recorder: recorder),
            mock.patch.object(nvtx, "enable_nvtx", enabled),
            mock.patch.object(nvtx, "is_compiling", lambda compiling=compiling: compiling),
        ):
            seen.append((double(3), recorder.told))
    return seen, nvtx.enable_nvtx, nvtx.DEEPSPEED_NVTX_DOMAIN


@case()
def ranges_of_a_gpus_profiler(_directory: Path) -> Any:
    told = []

    def domain(name: str) -> Any:
        told.append(name)
        push = lambda **named: told.append(sorted(named.items(), key=str)) or 7  # noqa: E731
        return SimpleNamespace(push_range=push, pop_range=lambda: told.append("pop") or 8)

    accelerator = object.__new__(cuda_accelerator.CUDA_Accelerator)
    accelerator._nvtx_domains = {}
    pushed = mock.patch.object(torch.cuda.nvtx, "range_push", lambda message: told.append(message) or 5)
    popped = mock.patch.object(torch.cuda.nvtx, "range_pop", return_value=6)
    returned = []
    with pushed, popped:
        for package in (SimpleNamespace(get_domain=domain), None):
            with mock.patch.object(cuda_accelerator, "nvtx", package):
                for where in ({"domain": "d"}, {}):
                    returned += [accelerator.range_push("m", **where), accelerator.range_pop(**where)]
                returned += [accelerator.range_push("n", domain="d", category="c")]
    return told, returned, sorted(accelerator._nvtx_domains), accelerator.supports_nvtx_domain


@case()
def a_lock_that_is_somebody_elses(_directory: Path) -> Any:
    locked = []
    lock = SimpleNamespace(LOCK_EX=2, LOCK_UN=8, flock=lambda _file, how: locked.append(how))
    with mock.patch.object(debug, "fcntl", lock):
        debug.printflock("a")
    return locked[0]


@case()
def hooks_around_generation(_directory: Path) -> Any:
    engine = start(stack(), config(3))
    hooks, seen = engine.optimizer.parameter_offload, []

    def look() -> None:
        seen.append((bool(hooks.forward_hooks), hooks.get_param_coordinator().is_invalid_trace()))

    for number in range(2):
        train(engine, 2)
        seen.append(bool(hooks.forward_hooks))
        look()
        with unwrap_model_for_generation(engine) as model:
            seen.append(bool(hooks.forward_hooks))
            out = model.module(*batches(1)[0])
            seen.append((number, out.shape))
        look()
    return seen


@case()
def a_write_that_nobody_is_to_keep(_directory: Path) -> Any:
    engine = start(stack(), config(3, zero={"enable_sanity_checks": True}))
    param = next(engine.module.parameters())
    gathered, told = deepspeed.zero.GatheredParameters([param]), "nothing"
    gathered.__enter__()
    with torch.no_grad():
        param.fill_(7.0)
    seen = param.flatten()[0].item()
    try:
        gathered.__exit__(None, None, None)
    except RuntimeError as error:
        told = "in-place modification" in str(error)
    return seen, told


@cases_over({"0": 0, "3": 3})
def an_engines_timer(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=2))
    timer = engine.tput_timer
    facts = [(timer.batch_size, timer.start_step, timer.initialized, timer.started, timer.global_step_count)]
    train(engine, 6)
    facts += [(timer.initialized, timer.started, timer.micro_step_count, timer.global_step_count)]
    engine.eval()
    with torch.no_grad():
        engine(*batches(1)[0])
    return [*facts, timer.started, timer.micro_step_count]
