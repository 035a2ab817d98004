"""The optimizer that the user holds: torch's interface, state in chunks of the store.

``param_groups`` are live: learning-rate schedules write to them as to any torch optimizer. The state (master weights,
moments) is not in ``state``, which refuses to be read; ``state_dict()`` copies it where it lies in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from infinity.config import Optimizer as OptimizerConfig
from infinity.config.optimizer import HYPER_PARAMETERS, AdamOptimizer, MuonOptimizer
from infinity.config.sections import IoDaemon
from infinity.errors import ConfigError, EngineStateError
from infinity.update.algorithms import make_optimizer
from infinity.update.loss_scale import FixedLossScale, LossScale
from infinity.update.muon import split_groups
from infinity.update.rule import UpdateRule
from infinity.update.stored_state import (
    Packing,
    StoredState,
    check_retired,
    check_shown,
    has_step_of_its_own,
    hooks_around_step,
    refuse_group,
    refuse_load,
    take_back,
    with_dict_hooks,
    with_load_hooks,
)
from infinity.update.torch_rule import rule_of


class ShardedOptimizer(torch.optim.Optimizer):
    """Some optimizer's rule over sharded state, driven by the engine.

    ``sharded_from_config`` and ``sharded_from_torch`` make it.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]], defaults: dict[str, Any], rule: UpdateRule) -> None:
        self._update: Callable[[], None] | None = None
        self._drop_gradients: Callable[..., None] | None = None
        super().__init__(list(param_groups), defaults)
        self.state = self._unread = StoredState()  # type: ignore[assignment]
        self.rule = rule
        self.scale: LossScale = FixedLossScale()
        self._packed_states: Packing | None = None
        self.overflow = False
        """Whether the last step was skipped because a gradient was not finite."""
        self.taken_over: Any = None
        """The torch optimizer whose groups these are, if the user gave one; its schedulers go on working."""

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by now; 1 without fp16."""
        return self.scale.value

    cur_scale = loss_scale

    @property
    def loss_scaler(self) -> LossScale:
        """What decides on the scale, under DeepSpeed's name."""
        return self.scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether steps change the scale."""
        return self.scale.dynamic

    def bind(
        self,
        update: Callable[[], None],
        drop_gradients: Callable[..., None],
        scale: LossScale,
        states: Packing | None = None,
    ) -> None:
        """The engine's update of all chunks, run by ``step``, what ``zero_grad`` runs, its scale, and its states as
        ``state_dict()`` has them, None where they are too large for it."""
        self._update, self._drop_gradients, self.scale = update, drop_gradients, scale
        self._packed_states = states
        self._members = [list(group["params"]) for group in self.param_groups]

    def _check_groups(self) -> None:
        """Raises EngineStateError if parameters came, went or moved after the engine had made their shards."""
        found = [group["params"] for group in self.param_groups]
        if [[id(p) for p in params] for params in found] != [[id(p) for p in params] for params in self._members]:
            raise EngineStateError(
                f"the optimizer's param_groups had {[len(params) for params in self._members]} parameters at "
                f"infinity.initialize() and have {[len(params) for params in found]}, or others, which would not be "
                "heeded: make all groups before it, and change their options, such as lr, only"
            )
        check_shown(self)
        if self.taken_over is not None:
            check_retired(self.taken_over, self.param_groups)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Call ``engine.step()`` instead: it knows the boundary."""
        if closure is not None:
            raise ValueError("a closure would need a second forward inside the step; call engine(batch) before it")
        if self._update is None:
            raise RuntimeError("the optimizer is not bound to an engine")
        self._check_groups()
        with hooks_around_step(self.taken_over) if self.taken_over is not None else nullcontext():
            self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were accumulated since the last update, as torch's does. The engine goes on counting
        micro-batches; ``engine.zero_grad()``, which says what ``set_to_none`` is, begins the step anew."""
        if self._drop_gradients is not None:
            self._drop_gradients(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's, until the engine has made its shards; after that it is refused."""
        if self._update is not None:
            refuse_group(param_group)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Torch's, of this rank's states, which are copied; with states on NVMe its entry ``state`` refuses to be read
        or saved."""
        return with_dict_hooks(self, self.pack)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict()`` gave, on every rank; on one rank also what that of a torch optimizer gave.

        Raises:
            EngineStateError, WeightsError: it fits neither the groups nor the states, or these lie on NVMe; nothing has
                changed.
        """
        with_load_hooks(self, state_dict, self.unpack)

    def pack(self) -> dict[str, Any]:
        """``state_dict`` without hooks."""
        groups, first = [], 0
        for group in self.param_groups:
            numbers = list(range(first, first + len(group["params"])))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
            first += len(numbers)
        states = {"state": self._unread} if self._packed_states is None else self._packed_states.pack()
        return {**states, "param_groups": groups}

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """``load_state_dict`` without hooks."""
        given, wanted = packed["param_groups"], self.param_groups
        sizes = [[len(group["params"]) for group in groups] for groups in (given, wanted)]
        if sizes[0] != sizes[1]:
            raise EngineStateError(
                f"load_state_dict() of groups of {sizes[0]} parameters, and the optimizer has groups of {sizes[1]}: "
                "load the state of one of the same groups"
            )
        options = copy.deepcopy([{name: each[name] for name in each if name != "params"} for each in given])
        if packed["state"] is not self._unread:
            if self._packed_states is None:
                refuse_load()
            self._packed_states.unpack(packed)
        for group, own in zip(wanted, options, strict=True):
            group.update(own)


def sharded_from_config(
    config: OptimizerConfig, params: Sequence[Any], *, dtype: torch.dtype, names: Mapping[int, str] | None = None
) -> ShardedOptimizer:
    """The optimizer that the configuration names.

    Args:
        names: what the model calls each parameter, by its id(), for what decides by names.
        params: parameters, or dicts with their own hyper-parameters, as torch takes them.
        dtype: what the optimizer computes in.

    Raises:
        ConfigError: a hyper-parameter that the optimizer does not know or take, or an optimizer that cannot be sharded.
    """
    groups = [dict(p) for p in params] if params and isinstance(params[0], dict) else [{"params": list(params)}]
    if isinstance(config, MuonOptimizer):
        groups = split_groups(groups, config.params, names or {})
    try:
        defaults = make_optimizer(config, [{}]).defaults
        for number, group in enumerate(groups):
            for name in (group.keys() & HYPER_PARAMETERS) - defaults.keys():
                remedy = f"{config.type} takes no such option: leave it out; known here: {', '.join(sorted(defaults))}"
                raise ConfigError(f"model_parameters[{number}].{name}", group[name], remedy)
        optimizer = make_optimizer(config, [{k: v for k, v in group.items() if k != "params"} for group in groups])
    except ConfigError:
        raise
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError("optimizer.params", config.params.model_dump(exclude_unset=True), str(error)) from error
    asks_for_torch = isinstance(config, AdamOptimizer) and config.params.torch_adam
    rule = rule_of(optimizer, dtype=dtype, prefers_fused=not asks_for_torch)
    return ShardedOptimizer(groups, optimizer.defaults, rule)


def sharded_from_torch(optimizer: torch.optim.Optimizer, *, dtype: torch.dtype) -> ShardedOptimizer:
    """Take over groups and hyper-parameters of a fresh torch optimizer that treats each element by itself.

    Raises:
        ConfigError: another optimizer, one that has taken steps, or an option with no sharded form.
    """
    take_back(optimizer)
    if has_step_of_its_own(optimizer):
        raise ConfigError(
            "optimizer",
            type(optimizer).__name__,
            "has a step() of its own on the object, which the engine would not call: define it in a class derived from "
            "the optimizer's, or register what it does around a step with register_step_post_hook()",
        )
    if any(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise ConfigError(
            "optimizer",
            type(optimizer).__name__,
            "has train() and eval(), by which schedule-free optimizers write weights outside of a step, and those are "
            "the engine's by then: use an optimizer that writes them in step() alone, such as torch's AdamW",
        )
    for group in optimizer.param_groups:
        for name in ("capturable", "differentiable"):
            if group.get(name):
                raise ConfigError(f"optimizer.{name}", True, "not available with sharded state: set it to False")
    rule = rule_of(optimizer, dtype=dtype)
    groups = optimizer.param_groups
    sharded = ShardedOptimizer([dict(group) for group in groups], dict(optimizer.defaults), rule)
    sharded.param_groups = groups  # the same dicts: a schedule made on the given optimizer drives this one
    sharded.taken_over = optimizer
    return sharded


def refuse_storage(optimizer: ShardedOptimizer | None, config: IoDaemon) -> None:
    """Raise ConfigError where the optimizer's states cannot be stored as the configuration says.

    Masters cannot be split where no state has a sign to spare, and nothing but fp32 states can be narrowed.
    ``optimizer``: None where nothing trains, and nothing of it is stored.
    """
    if optimizer is None:
        return
    if config.moments != "fp32":
        states = optimizer.rule.states
        others = [label for label, dtype in states.items() if dtype is not torch.float32]
        if others or not states:
            kept = f"keeps {', '.join(others)} in another dtype than fp32" if others else "keeps no state"
            remedy = f'{optimizer.rule.name} {kept}, and only fp32 states can be rounded: write "fp32"'
            raise ConfigError("io_daemon.moments", config.moments, remedy)
    if config.master_weights == "split" and optimizer.rule.markers is None:
        raise ConfigError(
            "io_daemon.master_weights",
            "split",
            f"{optimizer.rule.name} keeps no fp32 state that is never negative, whose signs are needed: use one that "
            'does, as AdamW, or write "fp32"',
        )


def group_indices(
    optimizer: ShardedOptimizer | None,
    index_of: dict[int, int],
    params: Sequence[nn.Parameter],
) -> list[int]:
    """Optimizer group of each parameter, -1 for those without: the optimizer leaves them as they are, as torch's does.

    Args:
        optimizer: None where nothing trains.
        index_of: id(param) -> index.

    Raises:
        ConfigError: a parameter in a group is not the model's.
    """
    groups = [-1] * len(params)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for param in group["params"]:
            if id(param) not in index_of:
                raise ConfigError(
                    "model_parameters",
                    tuple(param.shape),
                    "the parameter does not belong to the model: register it there, or give it an optimizer of its own",
                )
            groups[index_of[id(param)]] = number
    return groups
