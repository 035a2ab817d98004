"""The update inside backward: a group's chunks are stepped as soon as its gradients are final, while backward goes on.

That takes a step whose terms are known before its gradients are: no norm, no clipping, no check for overflow. What has
no final gradient when backward ends is due as after any other, and follows with the use of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.errors import ConfigError, EngineStateError
from infinity.update.gradients import GradientChunks
from infinity.update.update import Update
from infinity.weights.param_group import GradientOf, ParamGroup

KEY = "io_daemon.update_in_backward"
REMEDY = "write false for it"


def refuse_before_step(call: str) -> EngineStateError:
    """The error of what needs the step before to be whole, or not begun."""
    return EngineStateError(
        f"{call}: {KEY} is true, and backward() has updated weights of a step that is not over: call step() first, "
        f"or {REMEDY}"
    )


def refuse_norm(call: str) -> ConfigError:
    """The error of what needs the norm of all gradients."""
    return ConfigError(KEY, True, f"{call} takes a norm of all gradients before the first weight changes: {REMEDY}")


class InBackward:
    """``make_ready`` raises, or gives up what is leased of the group, before its weights change."""

    def __init__(self, update: Update, gradients: GradientChunks, make_ready: Callable[[ParamGroup], None]) -> None:
        if update.steps_whole:
            raise ConfigError(KEY, True, f"the optimizer steps some parameters whole, after backward: {REMEDY}")
        if update.is_foreign:
            raise ConfigError(KEY, True, f"the optimizer's code may look at what is changed after backward: {REMEDY}")
        self._update, self._gradients, self._make_ready = update, gradients, make_ready
        self._stepped: set[int] = set()

    def begin(self) -> None:
        """The last backward of a step begins."""
        self._stepped.clear()
        self._update.begin_early()

    def takes(self, group: ParamGroup, params: Sequence[int]) -> bool:
        """Whether the group is stepped now: it comes and goes, and all its parameters have their gradients."""
        if group.index in self._stepped:
            raise EngineStateError(
                f"{group.name} got a gradient after backward had updated it, as re-entrant checkpoints give several: "
                f"{KEY} is true: {REMEDY}, or checkpoint with use_reentrant=False"
            )
        return not group.persistent and len(params) == len(group.params)

    def claim(self, group: ParamGroup) -> None:
        """No gradient of the group comes any more on this rank, and others' are still to be added. If it is to be
        stepped then, whoever needs its weights again is told so from here on, whether that is done or not."""
        if not group.persistent and all(map(group.has_gradient_of, group.params)):
            self._make_ready(group)
            self._update.bar([chunk for chunk, _ in group.chunks], group.name)

    def step(self, group: ParamGroup, gradient_of: GradientOf) -> None:
        """Step all chunks of the group by its gradients, which reach the store only to be added to earlier ones."""
        self._make_ready(group)
        self._stepped.add(group.index)
        chunks = [chunk for chunk, _ in group.chunks]
        indices = [param.index for param in group.params]
        given: GradientOf | None = gradient_of
        with self._update.beyond_bar(chunks, group.name):
            if self._gradients.holds_any(indices):
                self._gradients.add(chunks, gradient_of, indices, norms=False)
                given = None
            self._update.step_early(chunks, given)
