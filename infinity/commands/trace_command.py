"""``infinity trace``: the step of a model as its daemon would see it, for ``io-daemon bench step``.

The engine that trains is built over a store in memory (``tiers/recording.py``) and takes a few steps. A model that fits
is really trained, and what passes between two requests is measured. One that does not fit is trained on the meta
device, which moves no bytes: the requests are the same, and FLOPs are counted instead of seconds.

Of a job of several ranks the first one is run, with its share of the model and of the node's budget; its peers are
played by ``absent_peers.py``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infinity.commands.absent_peers import AbsentPeers
from infinity.commands.standard_model import standard_model, standard_shape
from infinity.config import Config, parse_config
from infinity.engine.build import build_engine
from infinity.errors import ConfigError
from infinity.plan.precision import Precision
from infinity.plan.staging_plan import activation_bytes, budget_beside, staging_plan
from infinity.tiers.connection import NodePlace
from infinity.tiers.daemon import chunk_spec
from infinity.tiers.recording import RecordingTier, StepRecorder
from infinity.update.optimizer import group_indices, refuse_storage, sharded_from_config
from infinity.weights.sharded_model import Layout
from io_daemon.command.output_files import check_output
from io_daemon.machine.cpu_load import CpuLoad
from io_daemon.machine.cpuinfo import processor_name
from io_daemon.policy.step_trace import SUFFIX, CpuRates, StepTrace, save, world_text
from io_daemon.shared.metrics import size_text

WARM_UP_STEPS: Final = 3
"""In the first nothing is gathered ahead, in the second memory is still faulted in."""
MEASURED_STEPS: Final = 5
DERIVED_WARM_UP_STEPS: Final = 3
"""The first begins with no update due, the second is the first of those that are alike."""
META: Final = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is to be traced."""

    name: str
    model: nn.Module
    batch: tuple[Any, ...]
    """Arguments of the model's forward, which returns the loss or something with a ``loss``."""
    tokens_per_micro_batch: int | None


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that train together."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


class StepOfModel:
    """A model in an engine over recorded memory, as the first rank of ``world`` has it, ready to take steps."""

    def __init__(self, subject: Subject, config: Config, world: World, device: torch.device, *, staged: bool) -> None:
        """``staged``: training will build the model under ``Init``, whose staging area is part of the budget."""
        if not config.offloads:
            raise ConfigError("zero_optimization.offload_optimizer.device", "none", "nothing reaches a daemon: offload")
        if config.optimizer is None:
            raise ConfigError("optimizer", None, 'write {"type": "AdamW", "params": {"lr": ...}}')
        self.subject, self.config, self.world = subject, config, world
        model = subject.model
        self.num_params = sum(param.numel() for param in model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = sharded_from_config(config.optimizer, trained, dtype=Precision.of(config).update)
        refuse_storage(optimizer, config.io_daemon)
        collectives = AbsentPeers(world.num_ranks)
        self.layout = layout = Layout.of(model, config, collectives.world_size)
        optimizer_groups = group_indices(optimizer, layout.index_of, layout.params)
        self.staging_bytes = activation_bytes(config, world.ranks_per_node)
        if staged:
            self.staging_bytes += staging_plan(config, world.ranks_per_node).arena_bytes * world.ranks_per_node
        self.tier = RecordingTier(device)
        self.engine = build_engine(
            model,
            layout,
            optimizer,
            optimizer_groups,
            config=config,
            collectives=collectives,
            device=device,
            place=NodePlace(node="", local_rank=0, local_world_size=world.ranks_per_node),
            tier=self.tier,
            budget_bytes=budget_beside(self.staging_bytes, config),
        )

    def take(self, clock: Callable[[], float] | None = None) -> StepRecorder | None:
        """One optimizer step; recorded if there is a ``clock``."""
        recorder = None if clock is None else StepRecorder(clock)
        self.tier.store.recorder = recorder
        for _ in range(self.config.gradient_accumulation_steps):
            output = self.engine(*self.subject.batch)
            self.engine.backward(_loss_in(output, self.subject.name))
            self.engine.step()
        if recorder is not None:
            recorder.end()
        self.tier.store.recorder = None
        return recorder

    def trace(self, recorder: StepRecorder, rates: CpuRates | None) -> StepTrace:
        plan, store = self.tier.plan, self.tier.store
        if plan is None:
            raise AssertionError("the engine opened no store")
        tokens, num_micro_batches = self.subject.tokens_per_micro_batch, self.config.gradient_accumulation_steps
        specs = [chunk_spec(layout, store.pinned_mask) for layout in store.layouts]
        return StepTrace(
            model=self.subject.name,
            num_params=self.num_params,
            tokens_per_step=None if tokens is None else tokens * num_micro_batches * self.world.num_ranks,
            num_nodes=self.world.num_nodes,
            ranks_per_node=self.world.ranks_per_node,
            gap_unit="seconds" if rates else "flops",
            tail=recorder.tail,
            rates=rates,
            machine=machine_name(),
            config=self.config.model_dump(mode="json", exclude_defaults=True),
            host_budget_bytes=self.config.io_daemon.host_budget_bytes,
            staging_bytes=self.staging_bytes,
            frame_bytes=plan.frame_bytes,
            num_frames=plan.num_frames,
            chunks=[(list(spec.object_bytes), spec.pinned_mask) for spec in specs],
            accesses=[(a.chunk, a.read_mask, a.write_mask, a.dead_mask) for a in store.traces[store.trace_id]],
            leases=recorder.leases,
            events=recorder.events,
        )


def measured_trace(step: StepOfModel, progress: Callable[[str], None]) -> StepTrace:
    """Train for real; of the measured steps the one in the middle by its work is kept."""
    recorders: list[StepRecorder] = []
    rates: list[CpuRates] = []
    with CpuLoad(torch.get_num_threads()) as load:
        for number in range(WARM_UP_STEPS):
            progress(f"step {number + 1}, to warm up")
            step.take()
        for number in range(MEASURED_STEPS):
            rates.append(load.calibrate())
            recorder = step.take(time.perf_counter)
            if recorder is not None:
                recorders.append(recorder)
                progress(f"step {WARM_UP_STEPS + number + 1}: {recorder.total:.3f} s of work")
    recorders.sort(key=lambda recorder: recorder.total)
    return step.trace(recorders[len(recorders) // 2], _middle(rates))


def derived_trace(step: StepOfModel, progress: Callable[[str], None]) -> StepTrace:
    """Train on the meta device, counting FLOPs."""
    for number in range(DERIVED_WARM_UP_STEPS):
        progress(f"step {number + 1}, on the meta device")
        step.take()
    with FlopCounterMode(display=False) as counter:
        recorder = step.take(lambda: float(counter.get_total_flops()))
    if recorder is None:
        raise AssertionError("a clock was given")
    progress(f"{recorder.total:.4g} FLOPs a step")
    return step.trace(recorder, None)


def _middle(rates: Sequence[CpuRates]) -> CpuRates:
    return CpuRates(
        num_threads=rates[0].num_threads,
        flops=statistics.median(each.flops for each in rates),
        copied_bytes=statistics.median(each.copied_bytes for each in rates),
        updated_bytes=statistics.median(each.updated_bytes for each in rates),
    )


def machine_name() -> str:
    """For people: what the seconds were measured on."""
    return f"{processor_name() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


# --- from the command line


def trace(parsed: argparse.Namespace) -> int:
    """``parsed``: see ``infinity.commands.cli``."""
    if parsed.out is not None:
        check_output("out", Path(parsed.out))
    step, made = traced(parsed)
    of_world = f"-{made.num_nodes}x{made.ranks_per_node}" if step.world.num_ranks > 1 else ""
    path = Path(parsed.out or f"{made.model}{of_world}{SUFFIX}")
    save(made, path)
    _show(made, path, as_json=parsed.json)
    return 0


def traced(parsed: argparse.Namespace) -> tuple[StepOfModel, StepTrace]:
    """A step, taken, and its trace; the engine has ended. Raises ConfigError, of it BudgetError."""
    world = World(num_nodes=parsed.nnodes, ranks_per_node=parsed.nproc_per_node)
    config = _config(parsed, world)
    if parsed.threads is not None or world.ranks_per_node > 1:
        torch.set_num_threads(parsed.threads or 1)  # torchrun starts several ranks with one thread each
    meta = parsed.meta or parsed.model_params is not None
    with META if meta else torch.device("cpu"):
        subject = _subject(parsed, config)
    if meta:
        # a norm is a number, and there are none on the meta device; the requests are the same without clipping
        config = config.model_copy(update={"gradient_clipping": 0.0})
    step = StepOfModel(subject, config, world, META if meta else torch.device("cpu"), staged=not parsed.no_init)
    try:
        return step, (derived_trace if meta else measured_trace)(step, say)
    finally:
        step.engine.destroy()


def say(line: str) -> None:
    """A line for a person who waits."""
    print(f"infinity: {line}", file=sys.stderr)


def _config(parsed: argparse.Namespace, world: World) -> Config:
    config = parse_config(parsed.config, world_size=world.num_ranks, check_paths=False)
    if parsed.host_budget_bytes is None:
        return config
    daemon = config.io_daemon.model_copy(update={"host_budget_bytes": parsed.host_budget_bytes})
    return config.model_copy(update={"io_daemon": daemon})


def _subject(parsed: argparse.Namespace, config: Config) -> Subject:
    batch_size = config.train_micro_batch_size_per_gpu
    if parsed.model_params is not None:
        shape = standard_shape(int(parsed.model_params))
        tokens = torch.zeros(batch_size, parsed.sequence + 1, dtype=torch.int64)
        return Subject(
            name=f"llama-{_count_text(shape.numel)}",
            model=standard_model(shape),
            batch=(tokens,),
            tokens_per_micro_batch=batch_size * parsed.sequence,
        )
    model, batch = _call_factory(parsed.model)
    batch = batch if isinstance(batch, tuple) else (batch,)
    tokens_per_micro_batch = None
    if isinstance(batch[0], torch.Tensor) and not batch[0].is_floating_point():
        tokens_per_micro_batch = batch[0].numel()
    num_params = sum(param.numel() for param in model.parameters())
    return Subject(
        name=f"{type(model).__name__.lower()}-{_count_text(num_params)}",
        model=model,
        batch=batch,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )


def _loss_in(output: Any, model: str) -> torch.Tensor:
    loss = getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise ConfigError("model", model, f"its forward returns {what}: return the loss, or something with a .loss")


def _count_text(num_params: int) -> str:
    return f"{num_params / 1e9:.3g}b" if num_params >= 1e9 else f"{num_params / 1e6:.3g}m"


def _call_factory(place: str) -> tuple[nn.Module, Any]:
    module_name, _, name = place.partition(":")
    with _importable_from_here():
        try:
            factory = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError("model", place, f"cannot be imported ({error}): write module:function") from error
        made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError("model", place, f"returned a {type(made).__name__}, not a pair (model, batch)")
    return made


@contextmanager
def _importable_from_here() -> Iterator[None]:
    """Modules beside the user are found, as under ``python -m``."""
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())


def _show(trace: StepTrace, path: Path, *, as_json: bool) -> None:
    num_leases = len(trace.leases.chunk)
    work = sum(trace.events.gap) + trace.tail
    swap_bytes = trace.swap_bytes * trace.ranks_per_node
    arena_bytes = trace.num_frames * trace.frame_bytes * trace.ranks_per_node
    if as_json:
        facts = {
            "file": str(path),
            "model": trace.model,
            "parameters": trace.num_params,
            "nodes": trace.num_nodes,
            "ranks_per_node": trace.ranks_per_node,
            "tokens_per_step": trace.tokens_per_step,
            "measured": trace.rates is not None,
            trace.gap_unit: work,
            "swap_bytes": swap_bytes,
            "arena_bytes": arena_bytes,
            "chunks": len(trace.chunks),
            "leases_per_step": num_leases,
        }
        print(json.dumps(facts, indent=2))
        return
    amount = f"{work:.3f} s of work" if trace.rates else f"{work:.3g} FLOPs"
    print(
        f"{path}: {trace.model}, {trace.num_params:,} parameters, "
        f"{world_text(trace.num_nodes, trace.ranks_per_node)}\n"
        f"  a node: {size_text(swap_bytes)} of swap, {size_text(arena_bytes)} of arena\n"
        f"  a rank: {len(trace.chunks)} chunks, {num_leases} leases and {amount} a step"
    )
