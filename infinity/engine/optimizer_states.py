"""What ``state_dict()`` of an engine's optimizer holds, in torch's form, and its way back into the store.

A rank that has whole parameters gives what torch's optimizer would give, and takes what torch's gave. One that has
parts of them gives its parts, 1-D, each of which is taken back by the same rank of as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import nn

from infinity.engine.runtime import Runtime
from infinity.engine.state_access import checksum_of
from infinity.errors import EngineStateError, WeightsError
from infinity.states import StepPhase
from infinity.update.dry_run import in_words
from infinity.update.optimizer import ShardedOptimizer
from infinity.update.rule import numbers_of
from infinity.update.update import Update
from infinity.weights import shard_copies
from infinity.weights.param import ShardedParam
from io_daemon.shared.protocol import ObjectKind

MASTERS: Final = "fp32_weights"
SCALE: Final = "loss_scale"
SHARER: Final = "rank_of_ranks"
_OTHER: Final = "load the state of the same kind of optimizer, over the same parameters in the same order"


class OptimizerStates:
    def __init__(self, runtime: Runtime, update: Update, optimizer: ShardedOptimizer) -> None:
        self._runtime, self._update, self._optimizer = runtime, update, optimizer
        self._rule = optimizer.rule
        self._labels = {*self._rule.states, *self._rule.numbers}
        self._sharer = (runtime.sharded.sharers.rank, runtime.sharded.sharers.world_size)

    def pack(self) -> dict[str, Any]:
        """Copies of this rank's states by the parameters' numbers, and what torch's optimizers have none of: fp32
        weights beside those of 16 bits, the loss scale, and which of several ranks this is."""
        runtime, histories = self._runtime, self._update.histories
        runtime.refuse_over("state_dict() of the optimizer")
        packed: dict[str, Any] = {"state": {}}
        masters = {}
        for number, (param, sharded) in enumerate(self._params()):
            history = histories[sharded.index]
            if history is not None and self._labels and runtime.io.own_range(sharded)[1]:
                states = {label: self._read(param, sharded, label) for label in self._rule.states}
                packed["state"][number] = numbers_of(self._rule.numbers, history, torch.device("cpu")) | states
            if self._has_master(sharded):
                masters[number] = self._read(param, sharded, None)
        if masters:
            packed[MASTERS] = masters
        if scale := self._update.scale.state_dict():
            packed[SCALE] = scale
        if self._sharer[1] > 1:
            packed[SHARER] = self._sharer
        return packed

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Take what ``pack`` gave, or torch's ``state_dict()``. Collective.

        Raises:
            WeightsError: naming a parameter whose entry does not fit, or is another one on another rank.
            EngineStateError: other ranks' parts, other options on other ranks, or a time when states cannot be written.
            Either on every rank; nothing has changed.
        """
        self._runtime.collectives.together(lambda: self._check(packed), "load the optimizer's state")
        if self._runtime.collectives.world_size > 1:
            self._compare(packed)
        with self._runtime.states.replacing():
            self._replace_all(packed)

    def _replace_all(self, packed: Mapping[str, Any]) -> None:
        states, masters, whole = packed["state"], packed.get(MASTERS, {}), SHARER not in packed
        histories = self._update.histories
        for number, (_, sharded) in enumerate(self._params()):
            entry = states.get(number)
            if entry:
                histories[sharded.index] = tuple(float(entry[label]) for label in self._rule.numbers)
            elif histories[sharded.index] is not None and (whole or self._runtime.io.own_range(sharded)[1]):
                histories[sharded.index] = None
                entry = self._zeros(sharded, whole=whole) if self._rule.from_zeros else {}
            for label in self._rule.states if entry else ():
                self._replace(sharded, label, entry[label], whole=whole)
            if number in masters:
                self._replace(sharded, None, masters[number], whole=whole)
        if SCALE in packed:
            self._update.scale.load_state_dict(packed[SCALE])

    def _replace(self, sharded: ShardedParam, label: str | None, value: torch.Tensor, *, whole: bool) -> None:
        states, kind = self._runtime.states, self._kind(label)
        states.replace(sharded, kind, states.own_part(sharded, kind, value, whole=whole))

    def _compare(self, packed: Mapping[str, Any]) -> None:
        """Raises unless all ranks have been given the same, of parts as far as that can be seen."""
        collectives, what = self._runtime.collectives, "compare what is given as the optimizer's state"
        options = f"{in_words(packed['param_groups'])} {packed.get(SCALE, '')}".strip()
        given = collectives.first_unlike(options.split("; "), what)
        for rank, theirs in enumerate(given):
            if theirs != given[0]:
                raise EngineStateError(
                    f"load_state_dict() of the optimizer with {given[0]} on rank 0 and with {theirs} on rank {rank}: "
                    "load the same state on every rank"
                )
        words, params = self._in_words(packed), [param for param, _ in self._params()]
        for number in collectives.unlike([words.get(number) for number in range(len(params))], what):
            told = enumerate(collectives.gather_objects(words.get(number), what))
            (first, theirs), *others = ((rank, text) for rank, text in told if text is not None)
            rank, other = next((rank, text) for rank, text in others if text != theirs)
            self._refuse(params[number], f"has {theirs} on rank {first} and {other} on rank {rank}")

    def _in_words(self, packed: Mapping[str, Any]) -> dict[int, str]:
        """What tells each parameter of which this rank has a part: its counts, and of whole values the checksum."""
        masters, is_whole = packed.get(MASTERS, {}), SHARER not in packed
        told = {}
        for number, (_, sharded) in enumerate(self._params()):
            entry, checksum = packed["state"].get(number), 0
            if not self._runtime.io.own_range(sharded)[1]:
                continue
            words = [f"{label} {float(entry[label]):.17g}" for label in self._rule.numbers] if entry else ["no state"]
            if is_whole:
                values = [entry[label] for label in self._rule.states] if entry else []
                for value in [*values, *([masters[number]] if number in masters else [])]:
                    checksum = checksum_of(value, checksum)
                words.append(f"values with checksum {checksum:08x}")
            told[number] = ", ".join(words)
        return told

    def _check(self, packed: Mapping[str, Any]) -> None:
        self._runtime.refuse_over("load_state_dict() of the optimizer")
        self._runtime.states.check_phase("written", StepPhase.IDLE)
        self._runtime.sharded.refuse_away(self._rule.state_mask | self._kind(None).mask)
        if tuple(packed.get(SHARER, self._sharer)) != self._sharer:
            saved, now = packed[SHARER], self._sharer
            raise EngineStateError(
                f"load_state_dict() of the part of rank {saved[0]} of {saved[1]} on rank {now[0]} of {now[1]}: load "
                "each rank's own again; engine.save_checkpoint() and load_checkpoint() take any number of ranks"
            )
        states, masters, whole = packed["state"], packed.get(MASTERS, {}), SHARER not in packed
        params = list(self._params())
        for number in [*states, *masters]:
            if number not in range(len(params)):
                raise EngineStateError(
                    f"load_state_dict() of a state for parameter {number!r}, and the optimizer has {len(params)} of "
                    "them, counted from 0: load the state of an optimizer of the same groups"
                )
        for number, (param, sharded) in enumerate(params):
            entry = states.get(number)
            if entry and entry.keys() != self._labels:
                self._refuse(
                    param, f"holds {', '.join(map(str, entry))}, not {', '.join(sorted(self._labels)) or 'nothing'}"
                )
            values = {label: entry[label] for label in self._rule.states} if entry else {}
            for label, value in values.items():
                self._check_value(param, sharded, label, value, whole=whole)
            if number in masters:
                if not self._has_master(sharded):
                    self._refuse(param, "holds fp32 weights, beside which it has no others")
                self._check_value(param, sharded, None, masters[number], whole=whole)

    def _check_value(
        self, param: nn.Parameter, sharded: ShardedParam, label: str | None, value: Any, *, whole: bool
    ) -> None:
        if not isinstance(value, torch.Tensor):
            self._refuse(param, f"has a {type(value).__name__} as {label or MASTERS}, not a tensor")
        try:
            self._runtime.states.own_part(sharded, self._kind(label), value, whole=whole)
        except ValueError as error:
            raise WeightsError(sharded.name, f"cannot take its {label or MASTERS} ({error})", _OTHER) from error

    def _refuse(self, param: nn.Parameter, problem: str) -> NoReturn:
        self._runtime.refuse(param, f"is given an optimizer's state that {problem}", _OTHER)

    def _params(self) -> Iterator[tuple[nn.Parameter, ShardedParam]]:
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                yield param, self._runtime.sharded_param(param)

    def _kind(self, label: str | None) -> ObjectKind:
        return self._runtime.states.kind(label)

    def _has_master(self, sharded: ShardedParam) -> bool:
        return self._runtime.io.has(sharded, ObjectKind.MASTER)

    def _read(self, param: nn.Parameter, sharded: ShardedParam, label: str | None) -> torch.Tensor:
        values = self._runtime.states.read(sharded, self._kind(label), whole=False)
        if values is None:
            raise AssertionError(f"{sharded.name} was stepped and has no {label}")
        copy = shard_copies.hand_out(self._runtime, param, values, "state_dict() of the optimizer")
        return copy if self._sharer[1] > 1 else sharded.unflattened(copy)

    def _zeros(self, sharded: ShardedParam, *, whole: bool) -> dict[str, torch.Tensor]:
        shape = sharded.shape if whole else torch.Size([self._runtime.io.own_range(sharded)[1]])
        return {label: torch.zeros(shape, device="cpu") for label in self._rule.states}
