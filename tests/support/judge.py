"""Judge one script under one setting: bits equal to plain torch's, refused in words, or failed.

A refusal is an exception of a class that infinity or io_daemon defines, that is no fault of the world, and whose
message names a parameter or module of the model, or the key that asked for it, and a remedy; what was trained until
then must still be there, to the bit. A refusal that plain torch shares is equal behaviour. All else is a failure.
"""

from __future__ import annotations

import datetime
import math
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infinity.errors import BudgetError, ProtocolError, WorldError
from tests.support.device import CPU, USED, be_deterministic
from tests.support.plain_engine import PlainEngine
from tests.support.reference import differing_bits
from tests.support.world import InfinityWorld, Observation, PlainWorld, Setting, World

Script = Callable[[Any], None]

REMEDIES = re.compile(
    r"\b(call|use|pass|build|remove|add|freeze|change|set|write|make|keep|give|move|cast|take|train|load|tie|mark|"
    r"destroy|wrap|instead|before|after|inside|outside|within|read|copy|clone|replace|do)\b"
)


KEYS = ("io_daemon.update_in_backward",)
"""What somebody has asked for that has restrictions."""

NODES_BEYOND_THREADS = 10_000
REFERENCE_TIMEOUT = datetime.timedelta(seconds=90)
"""Longer than a rank waits for another in a collective of plain torch."""

RELAYED = "an exception occurred :"
"""How torch's load_state_dict passes on the words of what a parameter raised; the exception itself it drops."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    script: str
    setting: str
    outcome: str
    """"equal", "refused" or "failed"."""
    message: str = ""
    """Of the refusal or the failure; for equal, the error that both worlds raised, if any."""
    error_type: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Run:
    world: World
    error: BaseException | None = None


def judge(
    script: Script,
    setting: Setting,
    *,
    name: str = "",
    about: str = "",
    by_torch: str = "",
    writes: bool = False,
    swap_dir: str | None = None,
) -> Verdict:
    """Run ``script`` in both worlds.

    Args:
        about: a pattern that a refusal must match instead of naming a parameter or a module.
        by_torch: torch's own words, where it refuses what ours are before we could.
        writes: the script itself writes to weights, so after a refusal they only must be finite.
        swap_dir: what the ranks that judge together share; None: a directory of its own.
    """
    apart = dist.new_group(timeout=REFERENCE_TIMEOUT) if dist.is_initialized() else None
    plain = _run(script, PlainWorld(setting))
    if apart is not None and (alone := _fails_alone(plain, apart)) is not None:
        return Verdict(script=name, setting=str(setting), outcome="equal", message=alone)
    if (broken := _not_finite(plain)) is not None:
        return Verdict(script=name, setting=str(setting), outcome="failed", message=f"the reference: {broken}")
    with _environment(setting), InfinityWorld.opened(setting, swap_dir) as world:
        run = _run(script, world)
        outcome, message = _compare(plain, run, about, by_torch, writes=writes)
        error_type = "" if run.error is None else type(run.error).__name__
    return Verdict(script=name, setting=str(setting), outcome=outcome, message=message, error_type=error_type)


@contextmanager
def _environment(setting: Setting) -> Iterator[None]:
    before = os.environ.get("INFINITY_DEBUG", "")
    os.environ["INFINITY_DEBUG"] = "poison" if setting.poison else ""
    try:
        yield
    finally:
        os.environ["INFINITY_DEBUG"] = before


@cache
def _number_nodes_beyond_threads() -> None:
    """Backward takes nodes by their numbers, which each thread counts from 0: where modules run in threads, how much
    the main thread has counted before decides what is summed first. So plain torch differs from itself, unless it has
    counted further than any thread of the script's will."""
    tensor = torch.zeros((), requires_grad=True)
    for _ in range(NODES_BEYOND_THREADS):
        tensor.view_as(tensor)


def _run(script: Script, world: World) -> Run:
    _number_nodes_beyond_threads()
    torch.set_num_threads(1)
    if USED != CPU:
        torch.set_default_device(USED)  # scripts name none
        be_deterministic()
    torch.manual_seed(0)
    random.seed(0)
    try:
        script(world)
        world.close()
    except Exception as error:  # noqa: BLE001 (whatever a script raises is what is judged)
        return Run(world, error)
    return Run(world)


def _compare(plain: Run, run: Run, about: str, by_torch: str, *, writes: bool) -> tuple[str, str]:
    if run.error is not None:
        refusal = _refusal_in(run.error)
        if by_torch and by_torch in str(run.error):
            refusal, about = run.error, by_torch
        if plain.error is not None and (refusal is not None or type(run.error) is type(plain.error)):
            return "equal", f"both: {type(plain.error).__name__}: {plain.error}"
        if refusal is None:
            return "failed", f"no typed refusal:\n{_text_of(run.error)}"
        if (missing := _missing_words(str(refusal), run.world.models, about)) is not None:
            return "failed", f"{missing}: {type(refusal).__name__}: {refusal}"
        if (damage := _damage(plain, run, writes=writes)) is not None:
            return "failed", f"refused, but {damage}: {type(refusal).__name__}: {refusal}"
        return "refused", f"{type(refusal).__name__}: {refusal}"
    if plain.error is not None:
        return "failed", f"plain torch refuses ({type(plain.error).__name__}: {plain.error}), infinity went on"
    difference = first_difference(plain.world.observations, run.world.observations)
    return ("equal", "") if difference is None else ("failed", difference)


def _refusal_in(error: BaseException) -> BaseException | None:
    """The typed refusal that was raised, or that another exception was raised from."""
    seen: BaseException | None = error
    known: set[int] = set()  # errors may come from each other
    while seen is not None and id(seen) not in known:
        known.add(id(seen))
        home = type(seen).__module__.partition(".")[0]
        if home in ("infinity", "io_daemon"):
            fault = isinstance(seen, (WorldError, ProtocolError)) and not isinstance(seen, BudgetError)
            fault = fault and "the ranks diverge" not in str(seen)
            return None if fault else seen
        if RELAYED in str(seen):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _missing_words(message: str, models: Sequence[nn.Module], about: str) -> str | None:
    if about:
        return None if re.search(about, message) else f"the refusal does not say {about!r}"
    names = {name for model in models for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for model in models for name, _ in model.named_buffers(remove_duplicate=False)}
    names |= {name for model in models for name, _ in model.named_modules()}
    names |= {type(module).__name__ for model in models for module in model.modules()} | set(KEYS)
    if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names if name):
        return "the refusal names no parameter and no module"
    return None if REMEDIES.search(message) else "the refusal has no remedy"


def _damage(plain: Run, run: Run, *, writes: bool) -> str | None:
    """What a refusal did to the weights: each engine that is open must hold those of plain torch at that step."""
    for index, engine in enumerate(run.world.engines):
        reference = plain.world.engines[index] if index < len(plain.world.engines) else None
        if not isinstance(reference, PlainEngine) or engine.global_steps >= len(reference.snapshots):
            continue
        try:
            weights = engine.full_state_dict()
        except Exception as error:  # noqa: BLE001 (a second refusal is allowed, anything else is the finding)
            if _refusal_in(error) is None:
                return f"engine {index} is broken after it ({type(error).__name__}: {error})"
            continue
        expected = reference.snapshots[engine.global_steps]
        parameters = {name for name, _ in reference.module.named_parameters(remove_duplicate=False)}
        for name in parameters & expected.keys() & weights.keys():
            if writes:
                if not bool(torch.isfinite(weights[name].double()).all()):
                    return f"{name} is not finite"
            elif (difference := _difference(f"{name}", expected[name], weights[name], 0.0)) is not None:
                return f"weights have changed, {difference}"
    return None


def first_difference(expected: Sequence[Observation], found: Sequence[Observation]) -> str | None:
    """Where two worlds' observations differ first, in words."""
    names, others = [o.name for o in expected], [o.name for o in found]
    if names != others:
        return f"observed {others}, plain torch {names}"
    for position, (left, right) in enumerate(zip(expected, found, strict=True)):
        if (difference := _difference(left.name, left.value, right.value, left.tolerance)) is not None:
            return f"observation {position}: {difference}"
    return None


def _difference(name: str, expected: Any, found: Any, tolerance: float) -> str | None:
    if isinstance(expected, Tensor) or isinstance(found, Tensor):
        return _tensor_difference(name, expected, found, tolerance)
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if expected.keys() != found.keys():
            missing, more = expected.keys() - found.keys(), found.keys() - expected.keys()
            return f"{name}: keys are missing {sorted(missing)}, too many {sorted(more)}"
        pairs: Iterator[tuple[str, Any, Any]] = ((f"{name}[{key!r}]", expected[key], found[key]) for key in expected)
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(expected) != len(found):
            return f"{name}: {len(found)} entries instead of {len(expected)}"
        pairs = ((f"{name}[{i}]", *pair) for i, pair in enumerate(zip(expected, found, strict=True)))
    elif isinstance(expected, float) and isinstance(found, float) and tolerance:
        same = math.isclose(expected, found, rel_tol=tolerance)
        return None if same else f"{name}: {found!r} instead of {expected!r}"
    else:
        return None if expected == found else f"{name}: {found!r} instead of {expected!r}"
    return next(
        (text for key, left, right in pairs if (text := _difference(key, left, right, tolerance)) is not None), None
    )


def _tensor_difference(name: str, expected: Any, found: Any, tolerance: float) -> str | None:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return f"{name}: {type(found).__name__} instead of {type(expected).__name__}"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{name}: {found.dtype}{tuple(found.shape)} instead of {expected.dtype}{tuple(expected.shape)}"
    if not (expected.is_meta or found.is_meta):  # weights of an engine come on the CPU
        expected, found = expected.cpu(), found.cpu()
    if tolerance:
        return None if torch.allclose(expected, found, rtol=tolerance, atol=0) else f"{name}: beyond {tolerance}"
    left, right = (x.to_dense() if x.layout is not torch.strided else x for x in (expected, found))
    if left.is_meta or right.is_meta:
        return None if left.is_meta and right.is_meta else f"{name}: on meta"
    left, right = left.resolve_conj().resolve_neg(), right.resolve_conj().resolve_neg()
    bits = differing_bits(left.reshape(-1), right.reshape(-1)) if left.numel() else 0
    nans = " (NaN)" if found.dtype.is_floating_point and bool(torch.isnan(right.double()).any()) else ""
    return f"{name}: {bits} differing bits{nans}" if bits else None


def _fails_alone(run: Run, group: dist.ProcessGroup) -> str | None:
    """A script that plain torch refuses on some ranks, whose others then wait for nothing, judges nothing."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, run.error and f"{type(run.error).__name__}: {run.error}", group=group)
    if not any(errors) or (all(errors) and not any("gloo" in error for error in errors)):
        return None
    return f"plain torch fails on one rank alone: {' / '.join(str(error) for error in errors)}"


def _not_finite(run: Run) -> str | None:
    """A script whose own arithmetic ends in NaN judges nothing."""
    for observation in run.world.observations:
        for value in torch.utils._pytree.tree_leaves(observation.value):
            if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta and value.numel():
                dense = value.to_dense() if value.layout is not torch.strided else value
                if not bool(torch.isfinite(dense.double()).all()):
                    return f"{observation.name} is not finite"
    return None


def _text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-6)).strip()
