"""Walks an engine and its shadow side by side: every answer is compared, every refusal looked at."""

from __future__ import annotations

import contextlib
import math
import random
import re
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from infinity.engine.lost import Lost
from infinity.errors import CheckpointError, WorldError
from tests.fuzz.judged import PEER_TIMEOUT_S, RANKS_TIMEOUT_S
from tests.support.judge import REMEDIES, Verdict, _difference, _refusal_in
from tests.support.judged_on_ranks import verdict_of_ranks
from tests.support.world import has_peers
from tests.walks.averaging import AveragingShadow
from tests.walks.diverging import UNEVEN, other, usual
from tests.walks.driven import Driven
from tests.walks.model import Interrupted
from tests.walks.remedies import unknown_calls
from tests.walks.settings import Recipe, Setting
from tests.walks.shadow import STATES, Shadow

SETTLING = ("weights", "save", "export")
"""The calls that look at everything: what they pass is kept."""
NEEDS_SAVED = {"load", "load_export"}
DIVERGED: Final = re.compile(r"the ranks diverge: .*\(rank 0: .+; rank 1: .+\)", re.DOTALL)
RANK_BATCHES: Final = 10_000
"""By so much the numbers of the ranks' batches differ."""


class WalkError(Exception):
    """The walk ends here: what is wrong."""


class WalkOver(Exception):  # noqa: N818 (nothing is wrong)
    """The walk ends here: the engine is as its documentation says, and can only be made anew."""


class _Side:
    """Draws random numbers from a stream of its own."""

    def __init__(self) -> None:
        self.random = torch.get_rng_state()

    def run(self, thing: Any, name: str, args: Sequence[Any]) -> tuple[Any, BaseException | None]:
        torch.set_rng_state(self.random)
        try:
            found = getattr(thing, name)(*args)
            return tree_map_only(Tensor, lambda x: x.detach().clone(), found), None
        except (Exception, Interrupted) as error:  # noqa: BLE001 (whatever is raised is what is judged)
            return None, error
        finally:
            self.random = torch.get_rng_state()


class _Pair:
    def __init__(self, recipe: Recipe, setting: Setting, seed: int, directory: Path, files: dict[str, Any]) -> None:
        self.shadow = (AveragingShadow if has_peers() else Shadow)(recipe, setting, seed, files)
        self.driven = Driven(recipe, setting, seed, directory)
        self.unkept: list[Any] = []
        """What was written where weights are sharded but here: it is refused late, and then undone."""
        self.was_stopped_half_way = False
        self.is_unsettled = False
        """Whole weights were written where they are: their masters follow when they are looked at, of several writes
        the last."""

    def undo_writes(self, words: str) -> None:
        if "was changed in place" in words:
            if self.unkept:  # the graphs that saw them are no more
                self.forget_losses()
            while self.unkept:
                self.shadow.put_back(self.unkept.pop())

    @property
    def has_lost_gradients(self) -> bool:
        """Whether a backward that failed has taken them with it; the engine says so until it is repeated."""
        return self.driven.engine._loop._lost is not Lost.NOTHING

    def disarm(self) -> None:
        self.shadow.arm("")
        self.driven.arm("")

    def take_buffers(self) -> None:
        """After a forward that ended nobody says where."""
        self.shadow.model.mean.copy_(self.driven.model.mean)
        if isinstance(self.shadow, AveragingShadow):
            self.shadow.is_due = self.driven.engine._loop._followed_buffers.is_due

    def forget_losses(self) -> None:
        self.shadow.losses.clear()
        self.driven.losses.clear()


class Walking:
    def __init__(self, recipe: Recipe, start: Setting, directory: Path) -> None:
        self.recipe, self.start, self.directory = recipe, start, directory
        self.files: dict[str, Any] = {}
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(self.rank)
        random.seed(0)
        self.plain, self.ours = _Side(), _Side()
        self.pairs = [_Pair(recipe, start, 1, directory, self.files)]
        self.current = 0
        self.refusals: list[str] = []
        self.has_diverged = False
        """Ranks have begun other reductions than others, which every engine on them is told."""

    def go(self, action: Sequence[Any]) -> str:
        """Whether the call was "equal", "refused" or "left out"; raises WalkError."""
        name, args = action[0], self._own(action[0], list(action[1:]))
        if name == "other":
            self.current = 1 - self.current
            if self.current == len(self.pairs):
                self.pairs.append(_Pair(self.recipe, self.start, 2, self.directory, self.files))
            return "equal"
        pair = self.pairs[self.current]
        if name == "diverge":
            return self._diverge(pair, *args)
        if name == "backward" and not pair.shadow.losses:
            return "left out"
        if name == "write" and pair.unkept:  # nothing is promised of one on top of one that is not kept
            return "left out"
        if name in ("write", "load_weights") and pair.is_unsettled:
            return "left out"
        if name in NEEDS_SAVED and args[0] not in self.files:
            return "left out"
        losses, had_lost = list(pair.driven.losses), pair.has_lost_gradients
        kwargs_step = name == "step" and args
        found, error = self.ours.run(_WithEpoch(pair.driven) if kwargs_step else pair.driven, name, args)
        self._compare_ranks(error)
        if error is not None and (refusal := refusal_in(error)) is not None:
            return self._refused(pair, name, args, refusal, losses, had_lost=had_lost)
        before = pair.shadow.kept(args[0] if name == "write" else "")
        expected, plain_error = self.plain.run(_WithEpoch(pair.shadow) if kwargs_step else pair.shadow, name, args)
        if error is not None or plain_error is not None:
            if type(error) is not type(plain_error):
                raise WalkError(
                    f"plain torch: {plain_error!r}, the engine: {error!r}\n{_text_of(error or plain_error)}"
                )
            if name == "backward" and pair.has_lost_gradients:
                pair.shadow.drop()
                pair.forget_losses()
            # some weights are a step ahead when the user's error comes, unless it came before any was
            pair.was_stopped_half_way = name == "backward" and pair.shadow.setting.update == "in_backward"
            self.ours.random = self.plain.random
            return "equal"
        if name == "step":
            pair.forget_losses()
        if name in SETTLING:  # what it has looked at is kept
            pair.unkept.clear()
            pair.is_unsettled = False
        if name == "set_master":  # all of it is new, which is kept
            for values in pair.unkept:
                values.pop(pair.shadow.param(args[0]), None)
        written_outside = name == "load_weights" or (name == "write" and args[2] == "outside")
        if written_outside and pair.shadow.setting.stage == 3:
            pair.unkept.append(before)
        elif written_outside:
            pair.is_unsettled = True
        if (difference := differs(expected, found)) is not None:
            raise WalkError(f"differs: {difference}")
        if not torch.equal(self.ours.random, self.plain.random):
            raise WalkError("differs: the state of torch's random numbers")
        return "equal"

    def _own(self, name: str, args: list[Any]) -> list[Any]:
        """Every rank has batches of its own, and a loss goes wrong on one rank alone."""
        if name in ("call", "evaluate"):
            return [args[0] + RANK_BATCHES * self.rank, *args[1:]]
        if name == "backward" and len(args) == 3:
            return [args[0], args[1] if self.rank == args[2] else 1.0]
        return args

    def _compare_ranks(self, error: BaseException | None) -> None:
        """All have ended the call alike."""
        mine = None if error is None else (type(error).__name__, str(error))
        try:
            told = told_by_all(mine)
        except RuntimeError as missing:
            raise WalkError(f"the ranks do not end it together; this one: {mine}: {missing}") from missing
        if len({each and each[0] for each in told}) > 1:
            raise WalkError(f"the ranks end it differently: {told}")

    def _diverge(self, pair: _Pair, how: str, rank: int, batch: int) -> str:
        """One rank does something else: each is told what every one was about to do, and nobody trains on unaware."""
        if pair.driven.engine._loop.phases.states_are_away:  # nobody trains
            return "left out"
        if how == "raises in backward" and pair.shadow.setting.update == "in_backward":
            return "left out"  # that rank's engine ends, and the others hear of it when their time is up
        actions = other(how, batch) if self.rank == rank else usual(batch)
        for number in range(pair.shadow.accumulation + 1):
            actions += usual(batch + number)
        heard: BaseException | None = None
        was_refused = False
        for name, *args in actions:
            if name == "backward" and not pair.driven.losses:
                continue
            _, heard = self.ours.run(pair.driven, name, self._own(name, args))
            if isinstance(heard, WorldError):
                break
            if heard is not None and not isinstance(heard, Interrupted):
                if refusal_in(heard) is None:
                    raise WalkError(f"one rank {how}: {_text_of(heard)}")
                was_refused = True
        told = told_by_all(str(heard) if isinstance(heard, WorldError) else "nothing")
        if any(told_by_all(was_refused)) and set(told) == {"nothing"}:  # that rank alone was told, and did as all
            raise WalkOver
        if not all(DIVERGED.search(words) for words in told):
            raise WalkError(f"one rank {how}, the ranks hear: {told}")
        self.refusals.append(f"diverge: {told[0]}")
        if any(told_by_all(pair.driven.engine._loop.phases.is_over)):
            raise WalkOver
        if how in UNEVEN:
            raise WalkOver
        self.has_diverged = True
        pair.driven.zero_grad()
        pair.shadow.drop()
        pair.disarm()
        pair.forget_losses()
        pair.take_buffers()
        self.ours.random = self.plain.random
        return "refused"

    def _refused(
        self, pair: _Pair, name: str, args: list[Any], refusal: BaseException, losses: list[Tensor], *, had_lost: bool
    ) -> str:
        """``losses``: what the engine had to go backward from before the call. ``had_lost``: whether a backward before
        had lost gradients; what was set since is left alone by the refusal of the next one."""
        words = str(refusal)
        if self.has_diverged and DIVERGED.search(words):  # they are told once more
            raise WalkOver
        self.refusals.append(f"{name}: {type(refusal).__name__}: {words}")
        if re.search(r"\bhas failed\b", words):
            if pair.was_stopped_half_way:
                raise WalkOver
            raise WalkError(f"the engine is FAILED: {words}")
        if not REMEDIES.search(words) and not re.search(r"\bstart with\b|; checkpoints in", words):
            raise WalkError(f"the refusal has no remedy: {words}")
        if unknown := unknown_calls(words, pair.driven.engine):
            raise WalkError(f"the refusal names calls that are nowhere, {unknown}: {words}")
        self.ours.random = self.plain.random
        if name == "load_weights":  # torch loads what it can, and tells the rest
            pair.unkept.append(pair.shadow.kept(""))
            pair.shadow.load_weights(args[0], args[1], without=re.findall(r"parameter named \"([^\"]+)\"", words))
        elif name != "write":  # which is refused before it writes
            pair.undo_writes(words)
        if name in ("call", "evaluate"):  # as far as forward went
            pair.disarm()
            pair.take_buffers()
        if name == "backward" and pair.has_lost_gradients:
            if not had_lost:
                pair.shadow.drop()
            pair.forget_losses()
        else:  # as if it had not been called
            pair.driven.losses[:] = losses
        return "refused"

    def finish(self) -> None:
        """Everything there is must be equal, and nothing of it refused."""
        for number in range(len(self.pairs)):
            self.current = number
            self.pairs[number].forget_losses()  # whose graphs may keep weights that have left since
            if self.go(("zero_grad",)) == "refused":
                self.must("step")
                self.must("zero_grad")
            self.must("reload")
            for name in ("counters", "weights", "all_masters"):
                self.must(name)
            for param in ("embed.weight", "blocks.1.contract.bias", "gain"):
                for label in STATES[self.recipe.optimizer]:
                    self.must("state", param, label)

    def must(self, *action: Any) -> None:
        written = bool(self.pairs[self.current].unkept)  # what is refused late, once
        if self.go(action) != "equal" and (not written or self.go(action) != "equal"):
            raise WalkError(f"{action} is refused at the end of the walk: {self.refusals[-1]}")

    def close(self) -> None:
        for pair in self.pairs:
            pair.driven.close()


def told_by_all(what: Any) -> list[Any]:
    """What each rank says."""
    if not dist.is_initialized():
        return [what]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, what)
    return told


def refusal_in(error: BaseException) -> BaseException | None:
    return error if isinstance(error, CheckpointError) else _refusal_in(error)


class _WithEpoch:
    """``step`` with what the schedule's own step is called with."""

    def __init__(self, side: Any) -> None:
        self._side = side

    def step(self, epoch: int) -> None:
        self._side.step(epoch=epoch)


def judge_walk(
    recipe: Recipe, start: Setting, actions: Sequence[Sequence[Any]], *, name: str = "", num_ranks: int = 1
) -> Verdict:
    """The verdict of this process, or of ranks that it starts."""
    if num_ranks > 1:
        return verdict_of_ranks(
            lambda directory: _judge(recipe, start, actions, name, directory),
            name,
            f"{recipe} {start}",
            num_ranks=num_ranks,
            timeout_s=RANKS_TIMEOUT_S,
            peer_timeout_s=PEER_TIMEOUT_S,
        )
    with tempfile.TemporaryDirectory(prefix="walk-") as directory:
        return _judge(recipe, start, actions, name, Path(directory))


def _judge(recipe: Recipe, start: Setting, actions: Sequence[Sequence[Any]], name: str, directory: Path) -> Verdict:
    torch.set_num_threads(1)
    done: list[str] = []
    walking: Walking | None = None
    try:
        walking = Walking(recipe, start, directory)
        with contextlib.suppress(WalkOver):
            for number, action in enumerate(actions):
                done.append(f"{number}: {action}")
                done[-1] += f" -> {walking.go(action)}"
            done.append("the end")
            walking.finish()
        walking.close()
        outcome, message, kind = ("refused" if walking.refusals else "equal"), "\n".join(walking.refusals), ""
    except WalkError as error:
        outcome, message, kind = "failed", f"{error}\n  after {done[-3:]}", ""
    except Exception as error:  # noqa: BLE001 (a broken engine is what is looked for)
        refusal = _refusal_in(error) if walking is None else None
        outcome = "failed" if refusal is None else "refused"
        told = f"{_text_of(error)}\n  after {done[-3:]}"
        message, kind = (told if refusal is None else f"initialize: {refusal}"), type(error).__name__
    finally:
        with contextlib.suppress(Exception):
            for pair in walking.pairs if walking is not None and outcome == "failed" else ():
                pair.driven.engine._end()
    return Verdict(script=name, setting=f"{recipe} {start}", outcome=outcome, message=message, error_type=kind)


def differs(expected: Any, found: Any) -> str | None:
    """In words, None where all bits are the same; a NaN is a NaN, whatever its payload."""
    expected, found = (tree_map_only(Tensor, _without_nans, each) for each in (expected, found))
    if isinstance(expected, float) and isinstance(found, float) and math.isnan(expected) and math.isnan(found):
        return None
    return _difference("the answer", expected, found, 0.0)


def _without_nans(tensor: Tensor) -> Any:
    return (tensor.isnan(), tensor.nan_to_num(0.0, math.inf, -math.inf)) if tensor.is_floating_point() else tensor


def _text_of(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error, limit=-5)).strip()
