"""A seed's walk: a recipe, a setting, and calls in an order that no script has; the same, smaller; the same, judged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.support.judge import Verdict
from tests.walks.diverging import OF_SHARDS, OTHERS
from tests.walks.judge import judge_walk
from tests.walks.settings import Recipe, Setting, drawn_recipe, drawn_setting
from tests.walks.shadow import STATES

Action = tuple[Any, ...]

NAMES = ("embed.weight", "blocks.0.expand.weight", "blocks.1.norm.bias", "branch.weight", "gain", "head.weight")
FROZEN = "base.weight"


@dataclass(frozen=True, kw_only=True)
class Walk:
    seed: int
    recipe: Recipe
    start: Setting
    actions: tuple[Action, ...]
    num_ranks: int = 1

    @property
    def setting(self) -> str:
        return f"{self.recipe} {self.start}"

    @property
    def source(self) -> str:
        """A script that repeats it."""
        lines = "".join(f"    {action!r},\n" for action in self.actions)
        return (
            "from tests.walks.judge import judge_walk\nfrom tests.walks.settings import Recipe, Setting\n\n"
            f"recipe = {self.recipe!r}\nstart = {self.start!r}\nactions = [\n{lines}]\n"
            f"print(judge_walk(recipe, start, actions, num_ranks={self.num_ranks}))\n"
        )

    def judged(self) -> Verdict:
        return judge_walk(self.recipe, self.start, self.actions, name=f"seed {self.seed}", num_ranks=self.num_ranks)

    def smaller(self) -> Iterator[Walk]:
        """Walks with fewer calls, the boldest first, then with a plainer setting."""
        length = len(self.actions) // 2
        while length:
            for first in range(0, len(self.actions), length):
                yield replace(self, actions=self.actions[:first] + self.actions[first + length :])
            length //= 2
        for field, value in (("deepspeed", False), ("under_init", False), ("split", False), ("budget_times", 0.0)):
            yield from self._plainer(**{field: value})
        for field, word in (("params", "none"), ("states", "none"), ("update", "in_step"), ("dtype", "fp32")):
            yield from self._plainer(**{field: word})
        yield from self._plainer(accumulation=1)
        plain: dict[str, Any] = {"optimizer": "AdamW", "schedule": "", "clipping": 0.0, "width": 12, "tied": False}
        for field, value in plain.items():
            if getattr(self.recipe, field) != value:
                yield replace(self, recipe=replace(self.recipe, **{field: value}))

    def _plainer(self, **change: Any) -> Iterator[Walk]:
        setting = replace(self.start, **change)
        if setting.split and setting.dtype != "bf16":
            setting = replace(setting, split=False)
        if setting != self.start:
            yield replace(self, start=setting)


def walk(seed: int, *, num_ranks: int = 1) -> Walk:
    """The walk of a seed, always the same for a number of ranks."""
    draw = random.Random(seed)
    recipe = drawn_recipe(draw)
    deepspeed = draw.random() < 0.25
    start = drawn_setting(draw, recipe, deepspeed=deepspeed)
    actions: list[Action] = []
    drawing = _Drawing(draw, recipe, start, deepspeed, num_ranks)
    for _ in range(draw.randint(5, 25)):
        actions += drawing.next()
    return Walk(seed=seed, recipe=recipe, start=start, actions=tuple(actions), num_ranks=num_ranks)


class _Drawing:
    def __init__(self, draw: random.Random, recipe: Recipe, start: Setting, deepspeed: bool, num_ranks: int) -> None:
        self.draw, self.recipe, self.setting, self.deepspeed = draw, recipe, start, deepspeed
        self.num_ranks = num_ranks
        self.saved = self.exported = 0

    def _number(self) -> int:
        return self.draw.randrange(1000)

    def _name(self) -> str:
        return self.draw.choice((*NAMES, *NAMES, FROZEN))

    def next(self) -> list[Action]:
        kinds = KINDS if self.num_ranks == 1 else {**KINDS, **KINDS_OF_RANKS}
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        found: list[Action] = getattr(self, f"_{kind}")()
        return found

    def _train(self) -> list[Action]:
        steps = self.draw.choice((1, 1, 2))
        done: list[Action] = []
        for _ in range(steps * self.setting.accumulation):
            done += [("call", self._number(), self.draw.random() < 0.1), ("backward", False), ("step",)]
        return done

    def _micro(self) -> list[Action]:
        return [("call", self._number(), False), ("backward", False), ("step",)]

    def _pieces(self) -> list[Action]:
        choices: tuple[Action, ...] = (
            ("call", self._number(), False),
            ("call", self._number(), True),
            ("backward", False),
            ("backward", True),
            ("step",),
            ("zero_grad",),
            ("drop_gradient", self._name()),
        )
        return [self.draw.choice(choices)]

    def _several(self) -> list[Action]:
        """Several backwards a step, in either order, of graphs that may be kept."""
        calls: list[Action] = [("call", self._number(), False) for _ in range(self.draw.randint(1, 2))]
        kept: list[Action] = [("backward", True)] if self.draw.random() < 0.5 else []
        return [*calls, *kept, *[("backward", False) for _ in calls], ("step",)]

    def _evaluate(self) -> list[Action]:
        return [("evaluate", self._number(), self.draw.choice(("no_grad", "inference")))]

    def _mode(self) -> list[Action]:
        return [("mode", self.draw.random() < 0.6)]

    def _branch(self) -> list[Action]:
        return [("use_branch", self.draw.random() < 0.5)]

    def _wrong(self) -> list[Action]:
        where = self.draw.choice(("forward", "backward"))
        return [("arm", where), ("call", self._number(), False), ("backward", False)]

    def _not_finite(self) -> list[Action]:
        times = 1e30 if self.setting.dtype == "fp16" else self.draw.choice((float("nan"), float("inf")))
        rank = self.draw.randrange(self.num_ranks)  # a loss that is not finite on one rank is everybody's
        return [("call", self._number(), False), ("backward", False, times, rank), ("step",)]

    def _clip(self) -> list[Action]:
        if self.recipe.clipping and self.draw.random() < 0.9:
            return self._train()
        calls: list[Action] = [("call", self._number(), False), ("backward", False)]
        ends: list[Action] = [("grad_norm",)] if self.draw.random() < 0.3 else []
        return [*calls, ("clip", self.draw.choice((0.01, 1.0, 100.0))), *ends, ("step",), *ends]

    def _norm(self) -> list[Action]:
        return [("grad_norm",)]

    def _option(self) -> list[Action]:
        return [
            self.draw.choice(
                (
                    ("option", "lr", self.draw.choice((1e-3, 1e-2, 0.0))),
                    ("option", "weight_decay", self.draw.choice((0.0, 0.1))),
                    ("option", "betas", (0.8, 0.9)),
                    ("option", "momentum", 0.5),
                )
            )
        ]

    def _counters(self) -> list[Action]:
        return [("counters",)]

    def _accumulation(self) -> list[Action]:
        self.setting = replace(self.setting, accumulation=self.draw.choice((1, 2, 3)))
        return [("set_accumulation", self.setting.accumulation)]

    def _read(self) -> list[Action]:
        how = self.draw.choice(("outside", "gathered", "together"))
        return [("read", self._name(), how)]

    def _write(self) -> list[Action]:
        how = self.draw.choice(("gathered", "gathered", "part", "data", "outside", "unkept"))
        return [("write", self._name(), self._number(), how)]

    def _get(self) -> list[Action]:
        label = self.draw.choice(list(STATES[self.recipe.optimizer]))
        name = self._name()
        return [self.draw.choice((("master", name), ("gradient", name), ("state", name, label)))]

    def _set(self) -> list[Action]:
        label = self.draw.choice(list(STATES[self.recipe.optimizer]))
        name, number = self.draw.choice(NAMES), self._number()
        choices = (("set_master", name, number), ("set_gradient", name, number), ("set_state", name, label, number))
        return [self.draw.choice(choices)]

    def _inside_step(self) -> list[Action]:
        """What may be asked for between forward, backward and step."""
        between = self.draw.choice((self._read, self._write, self._get, self._set, self._evaluate, self._norm))
        call: Action = ("call", self._number(), False)
        if self.draw.random() < 0.5:
            return [call, *between(), ("backward", False), ("step",)]
        return [call, ("backward", False), *between(), ("step",)]

    def _whole(self) -> list[Action]:
        return [self.draw.choice((("weights",), ("all_masters",)))]

    def _load_weights(self) -> list[Action]:
        return [("load_weights", self._number(), self.draw.choice(("strict", "part")))]

    def _save(self) -> list[Action]:
        self.saved += 1
        return [("save", f"tag{self.saved}", self.draw.random() < 0.4)]

    def _load(self) -> list[Action]:
        if not self.saved:
            return self._save()
        only = self.draw.choice(("", "", "", "module", "no states", "no schedule"))
        found: list[Action] = [("load", f"tag{self.draw.randint(1, self.saved)}", only)]
        if self.draw.random() < 0.4:
            self.setting = drawn_setting(self.draw, self.recipe, deepspeed=self.deepspeed)
            found.insert(0, ("fresh", self.setting, self._number()))
        return found

    def _export(self) -> list[Action]:
        if self.exported and self.draw.random() < 0.5:
            return [("load_export", f"export{self.draw.randint(1, self.exported)}")]
        self.exported += 1
        return [("export", f"export{self.exported}")]

    def _offload(self) -> list[Action]:
        what = self.draw.choice(("all", "optim_states", "hp_params", "lp_params"))
        between = self.draw.choice((self._evaluate, self._read, self._get, self._whole, self._save, self._micro))
        return [("offload", what), *between(), ("reload",)]

    def _small(self) -> list[Action]:
        return [self.draw.choice((("empty_cache",), ("wait",), ("reload",), ("offload", "all")))]

    def _refused(self) -> list[Action]:
        what = self.draw.choice(("copy", "step inside no_sync", "custom load", "no such tag", "state"))
        return [("refused", what)]

    def _other(self) -> list[Action]:
        return [("other",)]

    def _again(self) -> list[Action]:
        return [("again",)]

    def _diverge(self) -> list[Action]:
        may_clip = not self.recipe.clipping and self.setting.accumulation == 1
        left_out = [*([] if may_clip else ["clips"]), *(OF_SHARDS if self.setting.stage == 0 else [])]
        hows = [how for how in OTHERS if how not in left_out]
        return [("diverge", self.draw.choice(hows), self.draw.randrange(self.num_ranks), self._number())]

    def _scheduled(self) -> list[Action]:
        return [*self._micro()[:2], ("step", self.draw.randint(0, 9))]


KINDS = {
    "train": 30,
    "micro": 4,
    "pieces": 8,
    "several": 5,
    "evaluate": 4,
    "mode": 2,
    "branch": 3,
    "wrong": 3,
    "not_finite": 1,
    "clip": 4,
    "norm": 2,
    "option": 5,
    "counters": 2,
    "accumulation": 2,
    "read": 4,
    "write": 5,
    "get": 5,
    "set": 5,
    "inside_step": 5,
    "whole": 3,
    "load_weights": 2,
    "save": 4,
    "load": 5,
    "export": 3,
    "offload": 3,
    "small": 2,
    "refused": 2,
    "other": 3,
    "again": 1,
    "scheduled": 1,
}

KINDS_OF_RANKS = {"diverge": 5}
