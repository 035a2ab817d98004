"""Random programs: a seed gives a ``Program``, a program its source, the source a script for the judge.

A program is data, so that it can be shrunk: parts in the order they are built (each may take earlier ones, also
several times: sharing and reuse), marks on them (tying, freezing), and the statements of one training step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.fuzz import calls, leaves, wrappers
from tests.fuzz.judged import PEER_TIMEOUT_S, RANKS_TIMEOUT_S
from tests.support.judge import Script, Verdict, judge
from tests.support.judged_on_ranks import verdict_of_ranks
from tests.support.world import Setting

LEAVES = (
    "Linear()", "Linear()", "Linear(bias=False)", "Wide()", "Wide(7)", "Wide(dropout=0.2)", "Norm()", "Norm('batch')",
    "Raw()", "Scale()", "Sliced()", "TwoWays()", "Strided()", "LowRank()", "LowRank(merged=True)", "Listed()",
    "Recurrent()", "Recurrent('GRU')", "Attention()", "Normed()", "Normed('old_weight')", "Normed('spectral')",
    "OnContext()", "Hooked()", "Counting()", "Convolved()", "Convolved(transposed=True)", "Grouped()", "Grouped('rms')",
    "Looked()", "Looked('bag')", "Looked(max_norm=1.0)", "Rectified()", "Encoder()", "Celled()", "Celled('GRUCell')",
    "Named()", "Pruned()", "Quantized()", "Detached()", "Doubled()", "Ensemble()", "Damped()",
    "Regular()",
)  # fmt: skip
WRAPPERS = (
    "Residual({})", "Residual({}, in_place=True)", "Twice({})", "Checkpointed({})", "Checkpointed({})",
    "Checkpointed({}, use_reentrant=True)", "Borrowing({})", "Borrowing({}, calls=False)", "Branches({}, {})",
    "Branches({}, {}, detached=True)", "WithoutGradient({})", "Routed({}, {})", "Routed({}, {}, {})",
    "Alternating({}, {})", "OnCpu({})", "InThread({})", "Keeps({})", "Chain({}, {})", "Chain({}, {}, {})",
    "Sequence({}, {})", "Sequence({}, {}, {})", "Narrow({})", "Overwriting({})", "Noisy({})", "Structured({})",
    "Checkpointed(Noisy({}))", "Direct({})", "Watched({}, 'forward')", "Watched({}, 'pre')", "Watched({}, 'backward')",
    "Watched({}, 'backward_pre')", "Dropped({})", "Repeated({})", "Reversible({})", "Sloped({})", "Caught({})",
    "InPieces({})", "Inferred({})", "Scaled({})",
)  # fmt: skip
OUTPUTS = ("tensor", "tensor", "tensor", "dict", "named", "dataclass", "weight", "generator", "closure")

FORWARDS = (
    ["loss = loss_of(engine(x))"],
    ["loss = loss_of(engine(x))"],
    ["loss = loss_of(engine(x)) + loss_of(engine(torch.tanh(x)))"],
    ["loss = loss_of(engine.module(x))"],
    ["x.requires_grad_()", "loss = loss_of(engine(x))"],
    ["with world.autocast():", "    loss = loss_of(engine(x))"],
    ["with save_on_cpu():", "    loss = loss_of(engine(x))"],
)
BACKWARDS = (
    ["world.backward(engine, loss)"],
    ["world.backward(engine, loss)"],
    ["world.backward(engine, loss)"],
    ["world.backward(engine, loss, retain_graph=True)", "world.backward(engine, loss * 0.5)"],
    ["world.backward(engine, loss)", "world.backward(engine, loss_of(engine(x * 0.5)))"],
)
BEFORE = (
    "world.observe('keys', list(model.state_dict()))",
    "loss_of(engine(x))  # a forward whose graph is dropped",
    "world.observe('norm', nth(model, {n}).detach().float().norm())",
    "penalty = nth(model, {n}).float().square().sum()",
    "try: engine(x[:, :5])\nexcept (RuntimeError, ValueError, AssertionError, IndexError): pass",
    "try: part_of(model, {n})(x[:, :5])\nexcept (RuntimeError, ValueError, AssertionError, IndexError): pass",
)
AFTER_FORWARD = (
    "loss = loss + 1e-2 * nth(model, {n}).float().square().sum()",
    "loss = loss + 1e-2 * nth(model, {n}).float().abs().mean()",
    "loss = loss + 1e-3 * sum(p.float().square().sum() for p in model.parameters())",
    "world.observe('norm', [p.detach().float().norm() for p in model.parameters()])",
    "with torch.no_grad(): world.observe('evaluated', loss_of(engine(x)))",
    "loss = loss + 1e-2 * input_gradient(loss, engine, x).square().sum()",
    "with torch.no_grad(): world.observe('module', loss_of(engine.module(x)))",
    "nth(model, {n}).register_hook(lambda gradient: gradient * 0.5)",
    "loss.register_hook(lambda gradient: gradient * 2)",
    "model.train(step % 2 == 0)",
)
AFTER_BACKWARD = (
    "with torch.no_grad(): world.observe('between', loss_of(engine(x)))",
    "world.observe('norm', nth(model, {n}).detach().float().norm())",
    "engine.eval()\nwith torch.no_grad(): world.observe('evaluated', loss_of(engine(x)))\nengine.train()",
    "loss_of(engine(x))  # a forward whose graph is dropped",
)
AFTER_STEP = (
    "follow(average, model)",
    "follow(average, model, data=True)",
    "world.observe('norm', [p.detach().float().norm() for p in model.parameters()])",
    "world.observe('data', nth(model, {n}).data.float().sum())",
    "world.observe('array', torch.from_numpy(nth(model, {n}).detach().float().numpy().copy()))",
    "world.observe('row', nth(model, {n}).detach().reshape(-1)[:3])",
    "engine.eval()\nwith torch.no_grad(): world.observe('evaluated', loss_of(engine(x)))\nengine.train()",
    "with torch.no_grad(): world.observe('part', part_of(model, {n})(x))",
    "with torch.inference_mode(): world.observe('inferred', loss_of(engine(x)).clone())",
    "world.observe('full', engine.full_state_dict())",
    "world.observe('norm', parameters_to_vector(model.parameters()).float().norm())",
    "for group in engine.optimizer.param_groups: group['lr'] *= 0.7",
    "for group in engine.optimizer.param_groups: group['weight_decay'] = 0.01 * step",
)
RARE = (
    "nth(model, {n}).data.mul_(0.9)",
    "with torch.no_grad(): nth(model, {n}).mul_(0.9)",
    "nth(model, {n}).requires_grad_(step % 2 == 0)",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    "part_of(model, {n}).late = torch.nn.Linear(WIDTH, WIDTH)",
    "model.load_state_dict(engine.full_state_dict())",
    "copy.deepcopy(model)",
    "nth(model, {n}).data = nth(model, {n}).data.clone()",
)
"""What may well be refused: one program in ten has one."""

OPTIMIZERS = (
    "torch.optim.AdamW(params, lr=3e-3)", "torch.optim.AdamW(in_two_groups(params))",
    "torch.optim.AdamW(in_two_groups(params), amsgrad=True, foreach=True)",
    "torch.optim.Adam(params, lr=3e-3, weight_decay=0.1, fused=True)", "torch.optim.SGD(params, lr=0.05)",
    "torch.optim.SGD(in_two_groups(params), momentum=0.9, nesterov=True)", "torch.optim.Adagrad(params, lr=0.01)",
    "torch.optim.RMSprop(params, lr=1e-3, momentum=0.5, centered=True)", "torch.optim.NAdam(in_two_groups(params))",
    "torch.optim.RAdam(params, lr=3e-3)", "torch.optim.Adamax(params, lr=3e-3)", "torch.optim.Adadelta(params)",
    "torch.optim.ASGD(params, lr=0.01)", "torch.optim.Rprop(params, lr=1e-3)", "Lamb(params)",
    "Lamb(in_two_groups(params))",
)  # fmt: skip
"""Passed as objects, by one program in four; the others have the configuration's AdamW."""

BESIDE = {
    "teacher": (
        "with torch.no_grad(): lesson = loss_of(beside(x))",
        "loss = loss + 1e-2 * lesson",
        "world.observe('lesson', lesson)",
    ),
    "pupil": (
        "with torch.no_grad(): lesson = loss_of(engine(x))",
        "world.backward(beside, (loss_of(beside(x)) - lesson).square())",
        "beside.step()",
    ),
    "rival": (
        "world.backward(beside, loss_of(beside(x)) * 0.5)",
        "beside.step()",
        "world.observe('rival', loss_of(beside(x * 0.5)).detach())",
    ),
}
"""Another engine in the program, of another model, and what is done with it after the first one's forward or step."""

STORED_SHARE = 0.15
"""Of the programs, those with a frozen weight in fewer bits than what learns."""
STORED_IN_16_BITS = tuple(f"{kind}(torch.{name})" for kind in ("Stored", "Tower") for name in ("bfloat16", "float16"))
STORED_IN_8_BITS = ("Stored(torch.float8_e4m3fn)", "Stored(torch.float8_e5m2)")
STORED_IN_BYTES = ("Stored(torch.int8)", "Stored(torch.bool)")
SPLIT_SHARE = 0.3
"""Of the programs in bf16, those whose masters the store has in halves."""
CLIPPINGS = (0.0, 0.0, 0.01, 1.0)
"""Largest norms of gradients: every one is cut, few are."""
CPU_SHARE = 0.1
"""Of the programs, those whose weights and states are offloaded to host memory."""
STAGES = (3, 3, 3, 3, 3, 3, 3, 2, 1, 0)

WRITES = re.compile(r"mul_\(0\.9\)|load_state_dict|\.data = ")
PART = re.compile(r"\bp(\d+)\b")


@dataclass(frozen=True, kw_only=True)
class Program:
    seed: int
    parts: tuple[str, ...]
    """``p0 = parts[0]`` and so on; the last one is the root's."""
    marks: tuple[str, ...]
    output: str
    under_init: bool
    accumulation: int
    num_steps: int
    before: tuple[str, ...]
    forward: tuple[str, ...]
    after_forward: tuple[str, ...]
    backward: tuple[str, ...]
    after_backward: tuple[str, ...]
    after_step: tuple[str, ...]
    setting: Setting
    beside: str = ""
    """One of ``BESIDE``, or no second engine."""
    beside_within: bool = False
    """Whether the second engine is used between the first one's forward and backward, else after its step."""
    clipping: float = 0.0
    optimizer: str = ""
    """One of ``OPTIMIZERS``, or the configuration's."""
    num_ranks: int = 1

    @property
    def writes(self) -> bool:
        """Whether the script itself writes to weights."""
        return any(WRITES.search(line) for line in (*self.after_backward, *self.after_step))

    @property
    def source(self) -> str:
        """The program as a file; unused parts left out."""
        used = self._used()
        build = [f"torch.manual_seed({self.seed})"]
        build += [f"p{number} = {text}" for number, text in enumerate(self.parts) if number in used]
        build += [mark for mark in self.marks if {int(n) for n in PART.findall(mark)} <= used]
        build += [f"return Root(p{len(self.parts) - 1}, {self.output!r})"]
        others = BESIDE[self.beside] if self.beside else ()
        step = [
            "x = world.randn(ROWS, WIDTH, seed=step)",
            *self.before,
            *self.forward,
            *(["loss = loss + 1e-2 * penalty"] if any("penalty =" in line for line in self.before) else []),
            *self.after_forward,
            *(others if self.beside_within else ()),
            *self.backward,
            *self.after_backward,
            "engine.step()",
            *(() if self.beside_within else others),
            *self.after_step,
        ]
        make = "world.build(build)" if self.under_init else "build()"
        options = [f"accumulation={self.accumulation}", f"clipping={self.clipping}"]
        options += [f"optimizer=lambda params: {self.optimizer}"] if self.optimizer else []
        script = [
            f"model = {make}",
            f"engine = world.initialize(model, {', '.join(options)})",
            *(
                [f"beside = world.initialize(another({self.seed}, trains={self.beside != 'teacher'}))"]
                if others
                else []
            ),
            "average = {}",
            f"for step in range({self.num_steps * self.accumulation}):",
            *_indented(step),
            "world.observe('average', average)",
        ]
        where = f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        lines = [f"# seed {self.seed}, {self.setting}{where}", "def build():", *_indented(build), ""]
        return "\n".join([*lines, "def script(world):", *_indented(script), ""])

    def judged(self) -> Verdict:
        name, script = f"seed {self.seed}", self.script()

        def judge_one(directory: Path | None = None) -> Verdict:
            swap_dir = None if directory is None else str(directory)
            return judge(script, self.setting, name=name, writes=self.writes, swap_dir=swap_dir)

        if self.num_ranks == 1:
            return judge_one()
        return verdict_of_ranks(
            judge_one,
            name,
            str(self.setting),
            num_ranks=self.num_ranks,
            timeout_s=RANKS_TIMEOUT_S,
            peer_timeout_s=PEER_TIMEOUT_S,
        )

    def script(self) -> Script:
        import copy

        import torch
        from torch.autograd.graph import save_on_cpu
        from torch.nn.utils import parameters_to_vector

        library = {**vars(leaves), **vars(wrappers), **vars(calls)}
        names: dict[str, Any] = {**library, "torch": torch, "copy": copy, "save_on_cpu": save_on_cpu}
        names["parameters_to_vector"] = parameters_to_vector
        exec(compile(self.source, f"<program {self.seed}>", "exec"), names)
        script: Script = names["script"]
        return script

    def smaller(self) -> Iterator[Program]:
        """Programs with one thing less, the boldest first."""
        last = len(self.parts) - 1
        for operand in dict.fromkeys(PART.findall(self.parts[last])):
            yield replace(self, parts=self.parts[: int(operand) + 1], marks=self._marks_below(int(operand)))
        for field in ("marks", "before", "after_forward", "after_backward", "after_step"):
            lines = getattr(self, field)
            for index in range(len(lines)):
                yield replace(self, **{field: lines[:index] + lines[index + 1 :]})
        for number in sorted(self._used() - {last}, reverse=True):
            for text in (*(f"p{operand}" for operand in PART.findall(self.parts[number])), "Linear()"):
                if self.parts[number] != text:
                    yield self._with_part(number, text)
        plain: dict[str, Any] = {
            "forward": tuple(FORWARDS[0]),
            "backward": tuple(BACKWARDS[0]),
            "output": "tensor",
            "under_init": False,
            "accumulation": 1,
            "num_steps": 1,
            "beside": "",
            "clipping": 0.0,
            "optimizer": "",
            "num_ranks": 1,
        }
        for field, value in plain.items():
            if getattr(self, field) != value:
                yield replace(self, **{field: value})
        for change in (
            {"split": False},
            {"update": "on_use"},
            {"budget_times": 0.0},
            {"by_hand": False},
            {"dialect": False, "by_hand": False},
            {"poison": False},
            {"nvme": False},
            {"bf16": False, "split": False},
            {"stage": 3},
            {"thresholds": "each"},
        ):
            setting = replace(self.setting, **change)
            if setting != self.setting:
                yield replace(self, setting=setting)

    def _allowed(self, *, split: bool, clipping: float) -> Program:
        """With as much of its setting as the configuration allows together, and with clipping."""
        is_adam = not self.optimizer or self.optimizer.startswith(("torch.optim.AdamW(", "torch.optim.Adam("))
        has_masters = self.setting.bf16 and self.setting.stage == 3 and is_adam
        early = self.setting.update == "in_backward" and self.setting.stage == 3 and not self.optimizer
        is_alone = not (self.under_init or self.beside)  # these share a host budget
        setting = replace(
            self.setting,
            split=split and has_masters,
            update="on_use" if self.setting.update == "in_backward" and not early else self.setting.update,
            budget_times=self.setting.budget_times if self.setting.nvme and is_alone else 0.0,
        )
        return replace(self, setting=setting, clipping=0.0 if early else clipping)

    def _with_stored(self, draw: random.Random) -> Program:
        """With a frozen weight for one of its leaves, in fewer bits than the setting's weights have."""
        leaf = draw.choice([number for number in sorted(self._used()) if not PART.search(self.parts[number])])
        made_in_it = self.setting.dialect and self.under_init  # 16 bits, too, are made in the configuration's dtype
        kinds = STORED_IN_8_BITS if self.setting.bf16 or made_in_it else (*STORED_IN_8_BITS, *STORED_IN_16_BITS)
        takes_bytes = "fused=True" not in self.optimizer
        return self._with_part(leaf, draw.choice((*kinds, *STORED_IN_BYTES) if takes_bytes else kinds))

    def _with_part(self, number: int, text: str) -> Program:
        return replace(self, parts=(*self.parts[:number], text, *self.parts[number + 1 :]))

    def _marks_below(self, last: int) -> tuple[str, ...]:
        return tuple(mark for mark in self.marks if all(int(n) <= last for n in PART.findall(mark)))

    def _used(self) -> set[int]:
        used, pending = set(), [len(self.parts) - 1]
        while pending:
            number = pending.pop()
            if number not in used:
                used.add(number)
                pending += [int(operand) for operand in PART.findall(self.parts[number])]
        return used


def _indented(lines: list[str]) -> list[str]:
    return ["    " + inner for line in lines for inner in line.split("\n")]


def program(seed: int, *, num_ranks: int = 1, nvme_share: float = 0.1) -> Program:
    """The program of a seed, always the same."""
    draw = random.Random(seed)
    parts = [draw.choice(LEAVES) for _ in range(draw.randint(1, 4))]
    for _ in range(draw.randint(0, 5)):
        wrapper = draw.choice(WRAPPERS)
        # recent parts are likelier, so that programs nest; older ones are taken again, so that they share
        operands = [f"p{max(0, len(parts) - 1 - int(draw.expovariate(0.7)))}" for _ in range(wrapper.count("{}"))]
        parts.append(wrapper.format(*operands))
    if not PART.search(parts[-1]) and len(parts) > 1:
        parts.append(f"Chain({', '.join(f'p{number}' for number in range(len(parts)))})")
    marks = []
    if draw.random() < 0.25 and len(parts) > 1:
        left, right = draw.sample(range(len(parts)), 2)
        marks.append(f"tie(p{left}, p{right})")
    if draw.random() < 0.3:
        marks.append(f"freeze(p{draw.randrange(len(parts))}, {draw.randint(1, 3)})")

    def some(choices: tuple[str, ...], likely: float) -> tuple[str, ...]:
        number = 0
        while number < 3 and draw.random() < likely:
            number += 1
        return tuple(draw.choice(choices).replace("{n}", str(draw.randrange(99))) for _ in range(number))

    before, after_forward, after_step = some(BEFORE, 0.15), some(AFTER_FORWARD, 0.25), some(AFTER_STEP, 0.35)
    after_backward = some(AFTER_BACKWARD, 0.1)
    if draw.random() < 0.1:
        rare = draw.choice(RARE).replace("{n}", str(draw.randrange(99)))
        if draw.random() < 0.5:
            after_backward = (*after_backward, rare)
        else:
            after_step = (*after_step, rare)
    made = Program(
        seed=seed,
        parts=tuple(parts),
        marks=tuple(marks),
        output=draw.choice(OUTPUTS),
        under_init=draw.random() < 0.15,
        accumulation=draw.choice((1, 1, 1, 2)),
        num_steps=draw.choice((2, 3)),
        before=before,
        forward=tuple(draw.choice(FORWARDS)),
        after_forward=after_forward,
        backward=tuple(draw.choice(BACKWARDS)),
        after_backward=after_backward,
        after_step=after_step,
        setting=_setting(draw, nvme_share),
        beside=draw.choice(tuple(BESIDE)) if draw.random() < 0.1 else "",
        beside_within=draw.random() < 0.5,
        optimizer=draw.choice(OPTIMIZERS) if draw.random() < 0.25 else "",
        num_ranks=num_ranks,
    )._allowed(split=draw.random() < SPLIT_SHARE, clipping=draw.choice(CLIPPINGS))
    return made._with_stored(draw) if draw.random() < STORED_SHARE else made


def _setting(draw: random.Random, nvme_share: float) -> Setting:
    live = draw.choice((0, 0, 200, 500, 1500, 4000, 1_000_000))
    bucket = draw.choice((100, 500, 1500, 4096, 50_000))
    persistent = draw.choice((0, 0, 0, 13, 200, 100_000))
    reuse = draw.choice((0, 400, 1_000_000))
    return Setting(
        thresholds=f"{live},{bucket},{persistent},{reuse}",
        bf16=draw.random() < 0.3,
        nvme=(tier := draw.random()) < nvme_share,
        cpu=1 - tier < CPU_SHARE,
        poison=draw.random() < 0.2,
        stage=draw.choice(STAGES),
        update=draw.choice(("on_use", "on_use", "on_use", "in_step", "in_backward")),
        budget_times=draw.choice((0.0, 1.0, 1.05, 1.3, 2.0)),
        dialect=(dialect := draw.random() < 0.15),
        by_hand=dialect and draw.random() < 0.5,
    )
