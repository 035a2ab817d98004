"""``initialize``: from a model and a configuration to an engine. Everything that cannot work is refused here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from infinity.checkpointing import apply_section
from infinity.config import Config, parse_config, read_environment, shared_keys
from infinity.engine import Engine
from infinity.engine.build import build_engine
from infinity.errors import ConfigError
from infinity.observe.breakdowns import Memory, Progress, WallClock, tell_configuration
from infinity.observe.comms import CommsLog
from infinity.observe.flops import FlopsOfAStep
from infinity.observe.heard import OBSERVED, asks_for_lines, print_unheard
from infinity.observe.monitors import monitors_of
from infinity.observe.observer import Observer, Observers
from infinity.plan.leaves import mark_leaves
from infinity.plan.precision import Precision
from infinity.plan.registered import named_parameters, parameters
from infinity.plan.staging_plan import activation_bytes, activations_plan, budget_beside
from infinity.tiers.activations import ActivationStore
from infinity.tiers.collectives import Collectives
from infinity.tiers.connection import DaemonConnection, NodePlace
from infinity.tiers.said import in_words
from infinity.tiers.world import used_device
from infinity.update.client_schedule import Client, choose_schedule
from infinity.update.optimizer import (
    ShardedOptimizer,
    group_indices,
    refuse_storage,
    sharded_from_config,
    sharded_from_torch,
)
from infinity.update.stored_state import retire
from infinity.weights import shard_copies
from infinity.weights.admission import refuse_owned, refuse_without_values
from infinity.weights.heap import return_freed
from infinity.weights.sharded_model import Layout
from infinity.weights.staging import StagingArea, staged_param

Initialized = tuple[Engine, ShardedOptimizer | None, "DataLoader[Any] | None", LRScheduler | None]

_log = logging.getLogger(__name__)


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str | os.PathLike[str],
    model_parameters: Iterable[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Client | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    engine_class: type[Engine] = Engine,
    may_lack_optimizer: bool = False,
) -> Initialized:
    """Shard ``model`` and build its engine. Collective over the ranks that share the model.

    Args:
        model: built plainly or under ``Init``. Its parameters are sharded in place; rank 0's values are everyone's.
        config: DeepSpeed's JSON dialect, as a dict or a path; ``infinity config keys`` lists it.
        model_parameters: parameters, (name, parameter) with each, or dicts with their own hyper-parameters, for the
            optimizer of the config.
        optimizer: a torch optimizer instead of the config's, any that treats each element by itself; its groups are
            taken over and shared.
        lr_scheduler: a scheduler on ``optimizer``, or a function from the engine's optimizer to one.
        training_data: a dataset, to get a loader of micro-batches back.
        collate_fn: makes a micro-batch of its samples; by default torch's own.
        process_group: the ranks that share the model; by default all, whom this starts torch.distributed for where
            RANK and WORLD_SIZE are set and nobody has.
        engine_class: ``Engine``, or a class derived of it that answers in another way.
        may_lack_optimizer: without an optimizer the engine only evaluates; else that is refused where anything trains.

    Returns:
        engine, optimizer or None where nothing trains, data loader or None, scheduler or None.

    Raises:
        ConfigError, BudgetError, SwapSpaceError, DaemonLostError: on every rank, before anything is trained.
    """
    with torch.inference_mode(mode=False), ExitStack() as cleanup:  # what is made here is written to outside, too
        collectives = Collectives.join(process_group)
        cleanup.callback(collectives.close)
        parse = partial(parse_config, config, world_size=collectives.world_size)
        parsed = collectives.together(parse, "read the configuration")
        _check_same_config(parsed, collectives)
        for note in parsed.notes if collectives.rank == 0 else ():
            _log.warning("%s", note)
        sharded_optimizer = None
        if optimizer is not None or parsed.optimizer is not None or not may_lack_optimizer:
            sharded_optimizer = _optimizer(model, parsed, model_parameters, optimizer)
            refuse_storage(sharded_optimizer, parsed.io_daemon)
        schedule = choose_schedule(parsed.scheduler, lr_scheduler, optimizer=sharded_optimizer, passed=optimizer)
        areas = _staging_areas(model)
        for area in areas:
            shard_copies.check(area)
            _check_same_ranks(area, collectives)
        ending = _ending(areas, model, collectives)
        # from here on a refusal costs what Init staged; what is wrong with the configuration alone is known by now
        for area in ending:
            cleanup.callback(area.close)
        environment = read_environment()
        place = NodePlace.find(collectives, environment)
        device = _device(environment.local_rank if environment.launched else place.local_rank)
        refuse_owned(named_parameters(model), lambda owner: isinstance(owner, StagingArea))
        unmet = mark_leaves(model, parsed.zero_optimization.leaf_module)
        for word in unmet if collectives.rank == 0 else ():
            _log.warning("zero_optimization.leaf_module: %s means nothing in this model", word)
        refuse_without_values(model)
        layout = Layout.of(model, parsed, collectives.world_size, trains=sharded_optimizer is not None)
        _check_same_model(layout, collectives)
        optimizer_groups = group_indices(sharded_optimizer, layout.index_of, layout.params)
        if sharded_optimizer is not None and collectives.rank == 0:
            _note_left_out(layout, optimizer_groups)
        connection = next((area.connection for area in ending if area.connection is not None), None)
        if connection is None and parsed.needs_daemon:
            connection = DaemonConnection(parsed, environment, collectives, place)
            cleanup.callback(connection.close)
        if connection is not None and device.type == "cpu" and place.local_rank == 0:
            _note_threads(place.local_world_size, spins_as_told=environment.spins_as_told)
        activations = None
        if connection is not None and parsed.io_daemon.activation_checkpoints:
            activations = _open_activations(parsed, connection, collectives, place, device)
        looking = partial(_observers, parsed, model, device, collectives)
        observers = collectives.together(looking, "set up what looks on")
        cleanup.callback(observers.close)
        engine = build_engine(
            model,
            layout,
            sharded_optimizer,
            optimizer_groups,
            config=parsed,
            collectives=collectives,
            device=device,
            place=place,
            tier=connection,
            budget_bytes=budget_beside(
                sum(area.arena_bytes for area in areas) + activation_bytes(parsed, place.local_world_size), parsed
            ),
            poison=environment.poison,
            observers=observers,
            kind=engine_class,
            spare_bytes=sum(area.swap_bytes for area in ending),
            when_written=partial(_close_stores, ending),
        )
        cleanup.callback(engine.destroy)
        return_freed()
        engine.lr_scheduler = schedule
        apply_section(parsed.activation_checkpointing, activations)
        loader = None if training_data is None else engine.make_training_loader(training_data, collate_fn)
        if optimizer is not None and sharded_optimizer is not None:
            retire(optimizer, sharded_optimizer)
        cleanup.pop_all()  # all of it is the engine's now
    return engine, sharded_optimizer, loader, engine.lr_scheduler


def _close_stores(areas: Sequence[StagingArea]) -> None:
    for area in areas:
        area.close_store()


def _open_activations(
    config: Config, connection: DaemonConnection, collectives: Collectives, place: NodePlace, device: torch.device
) -> ActivationStore:
    """Ends with the connection."""
    plan = activations_plan(config, place.local_world_size)
    store = collectives.together(
        lambda: connection.open(plan, job=f"{connection.job}-activations", pinned_mask=0, device=device),
        "open a store for activations",
    )
    activations = ActivationStore(store, frame_bytes=plan.frame_bytes, num_frames=plan.num_frames)
    connection.closed_first.append(activations.close)
    return activations


def _note_threads(num_ranks: int, *, spins_as_told: bool) -> None:
    """Say that no core is left for the daemon, where threads spin on all. The number of threads stays the user's: bits
    of sums depend on it."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if threads >= cores and not spins_as_told:
        return  # each rank's spinning is cut short while it waits for I/O
    if threads * num_ranks >= cores > 1:
        _log.info(
            "%d ranks of %d threads compute on %d cores, one of which the I/O daemon needs: threads that wait for each "
            "other spin; torch.set_num_threads(%d) leaves it one, and gives other bits than %d threads do",
            num_ranks,
            threads,
            cores,
            max(1, (cores - 1) // num_ranks),
            threads,
        )


def _optimizer(
    model: nn.Module, config: Config, model_parameters: Iterable[Any] | None, optimizer: torch.optim.Optimizer | None
) -> ShardedOptimizer | None:
    """None where nothing trains: a teacher, a reference model."""
    dtype = Precision.of(config).update
    if optimizer is None and not any(param.requires_grad for param in model.parameters()):
        return None
    if optimizer is not None:
        if config.optimizer is not None:
            raise ConfigError("optimizer", config.optimizer.type, "an optimizer object was passed too: remove one")
        if model_parameters is not None:
            raise ConfigError("model_parameters", "given", "the optimizer object has groups already: remove one")
        return sharded_from_torch(optimizer, dtype=dtype)
    if config.optimizer is None:
        raise ConfigError("optimizer", None, 'write {"type": "AdamW", "params": {"lr": ...}}, or pass an optimizer')
    params = _to_train(model.parameters() if model_parameters is None else model_parameters)
    if not params:
        raise ConfigError("model_parameters", [], "no parameter is trainable: there is nothing to optimize")
    names = {id(param): name for name, param in named_parameters(model)}
    return sharded_from_config(config.optimizer, params, dtype=dtype, names=names)


def _to_train(given: object) -> list[Any]:
    """Parameters that train, or (name, parameter) with them, or dicts, as optimizers of torch's take them."""
    remedy = "pass parameters, (name, parameter) with each, or dicts with these under params; a list of one for one"
    if isinstance(given, torch.Tensor | Mapping | str) or not isinstance(given, Iterable):
        raise ConfigError("model_parameters", type(given).__name__, remedy)
    found = list(given)
    if all(isinstance(each, dict) for each in found):
        return found
    params = [each[-1] if isinstance(each, tuple) and each else each for each in found]
    for each, param in zip(found, params, strict=True):
        if not isinstance(param, torch.Tensor):
            raise ConfigError("model_parameters", f"with {type(each).__name__}", remedy)
    return [each for each, param in zip(found, params, strict=True) if param.requires_grad]


def _note_left_out(layout: Layout, optimizer_groups: Sequence[int]) -> None:
    trained = zip(layout.names, layout.params, optimizer_groups, strict=True)
    names = [name for name, param, group in trained if param.requires_grad and group < 0]
    if names:
        others = f" and {len(names) - 10} more" if len(names) > 10 else ""
        _log.warning(
            "%s%s: in no group of the optimizer, which leaves such parameters as they are; requires_grad_(False) "
            "before initialize() spares the memory and the time that their gradients take",
            ", ".join(names[:10]),
            others,
        )


def _device(index: int) -> torch.device:
    used = used_device()
    if used.type == "cpu":
        return used
    torch.accelerator.set_device_index(index)
    return torch.device(used.type, index)


def _check_same_ranks(area: StagingArea, collectives: Collectives) -> None:
    if not collectives.is_among_ranks_of(area.collectives):
        raise ConfigError(
            "process_group",
            f"{collectives.world_size} ranks",
            f"Init staged the model on {area.collectives.world_size} others: pass the same group to both",
        )


def _check_same_config(config: Config, collectives: Collectives) -> None:
    """Ranks that clip, scale or average in different ways would train to weights that are neither's."""
    told = [f"{key} = {value!r}" for key, value in shared_keys(config)]
    lines = collectives.first_unlike(told, "compare the configurations")
    if lines:
        key = lines[0].partition(" = ")[0]
        raise ConfigError(key, "differs from rank to rank", f"{_told(lines)}: give all ranks one configuration")


def _check_same_model(layout: Layout, collectives: Collectives) -> None:
    """Ranks exchange shards by their place: a model that differs on one rank would be mixed with the others'."""
    lines = collectives.first_unlike(layout.description(), "compare the models")
    if lines:
        raise ConfigError("model", "differs from rank to rank", f"{_told(lines)}: build the same model on all ranks")


def _told(lines: Sequence[str]) -> str:
    return in_words(enumerate(lines), " has ", " have ")


def _staging_areas(model: nn.Module) -> list[StagingArea]:
    """Raises WeightsError for one that an ``initialize`` before gave up."""
    found = [staged for param in parameters(model) if (staged := staged_param(param)) is not None]
    for staged in found:
        staged.check_kept()
    return list(dict.fromkeys(staged.area for staged in found))


def _ending(areas: Sequence[StagingArea], model: nn.Module, collectives: Collectives) -> list[StagingArea]:
    """Those of ``areas`` where nothing but ``model`` is staged. A rank may have dropped what another one still has."""
    if not areas:
        return []
    stays = [area.has_others(parameters(model)) for area in areas]
    stay = torch.tensor(stays, dtype=torch.uint8, device="cpu")
    collectives.max(stay, "tell who else is staged by Init")
    return [area for area, is_used in zip(areas, stay.tolist(), strict=True) if not is_used]


def _observers(config: Config, model: nn.Module, device: torch.device, collectives: Collectives) -> Observers:
    """Who looks on, as the configuration asks: rank 0 writes and logs, every rank counts its collectives."""
    collectives.log = CommsLog(config.comms_logger)
    if config.log_level is not None:
        for name in ("infinity", "io_daemon"):
            logging.getLogger(name).setLevel(config.log_level.upper())
            print_unheard(name)
    if asks_for_lines(config):
        print_unheard(OBSERVED)
    if collectives.rank:
        return Observers()
    if config.dump_state:
        tell_configuration(config)
    progress = Progress(config.steps_per_print, config.timers.throughput, device)
    observers: list[Observer] = [*monitors_of(config), progress]
    if config.wall_clock_breakdown:
        observers.append(WallClock(config.steps_per_print))
    if config.memory_breakdown:
        observers.append(Memory(config.steps_per_print, device))
    if config.flops_profiler.enabled:
        observers.append(FlopsOfAStep(config.flops_profiler, model))
    return Observers(observers)
