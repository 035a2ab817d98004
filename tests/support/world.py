"""What a user's script is given instead of the library: plain torch, or infinity. The script cannot tell them apart.

A script takes a ``World``, builds a model, gets an engine from ``world.initialize`` and trains; whatever it passes to
``world.observe`` is compared bit by bit, and so are the losses of every backward and the final weights of every engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import infinity
import infinity.deepspeed
from tests.support.averaging_engine import AveragingEngine
from tests.support.budgets import ROOM_BYTES, smallest_budget_bytes
from tests.support.device import USED
from tests.support.plain_engine import BETAS, EPS, LEARNING_RATE, PlainEngine, cast_weights

THRESHOLD_KEYS = (
    "stage3_max_live_parameters",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_reuse_distance",
)
THRESHOLDS: dict[str, dict[str, int]] = {
    "each": {
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 4096,
        "stage3_param_persistence_threshold": 0,
    },
    "grouped": {
        "stage3_max_live_parameters": 6000,
        "stage3_prefetch_bucket_size": 6000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
    },
    "default": {},
}
"""Every module of its own and resharded at once; groups of several modules, resharded at once; what users have."""


RANK_SEEDS = 10_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One configuration under which a script is judged."""

    thresholds: str = "each"
    """A name above, or "live,bucket,persistent,reuse" in elements."""
    stage: int = 3
    bf16: bool = False
    nvme: bool = False
    cpu: bool = False
    poison: bool = False
    split: bool = False
    """Whether the store has masters in halves, where there are some."""
    update: str = "on_use"
    """When chunks are stepped: "on_use", "in_step" or "in_backward"."""
    dialect: bool = False
    """Whether the script's names are DeepSpeed's."""
    by_hand: bool = False
    """Whether its backward is the loss's own, which the dialect alone has."""
    budget_times: float = 0.0
    """The host budget on NVMe, times the smallest that works; 0: 64 MiB, in which everything stays."""

    @property
    def reshards(self) -> bool:
        """Whether weights of small models come and go; at the default thresholds they are too few, and stay."""
        return self.stage == 3 and self.thresholds != "default"

    @property
    def zero(self) -> dict[str, int]:
        """The keys of ``zero_optimization``."""
        if self.thresholds in THRESHOLDS:
            return THRESHOLDS[self.thresholds]
        return dict(zip(THRESHOLD_KEYS, map(int, self.thresholds.split(",")), strict=True))

    def __str__(self) -> str:
        words = [self.thresholds if self.stage == 3 else f"stage{self.stage}", "bf16" if self.bf16 else "fp32"]
        words += [name for name in ("nvme", "cpu", "poison", "split", "dialect", "by_hand") if getattr(self, name)]
        words += [self.update] if self.update != "on_use" else []
        return "-".join([*words, *([f"{self.budget_times:g}x"] if self.budget_times else [])])


@dataclass
class Observation:
    name: str
    value: Any
    tolerance: float = 0.0


def has_peers() -> bool:
    """Whether others train with this rank: not in a world of one either, which a script before may have left."""
    return dist.is_initialized() and dist.get_world_size() > 1


class World:
    """The part that both worlds share. ``engines`` are in the order made; ``models`` also those built under Init."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.dtype = torch.bfloat16 if setting.bf16 else torch.float32
        self.observations: list[Observation] = []
        self.engines: list[Any] = []
        self.models: list[nn.Module] = []

    def observe(self, name: str, value: Any, *, tolerance: float = 0.0) -> None:
        """Remember ``value``: tensors, in containers or not, are copied now. ``tolerance`` is relative."""
        copied = tree_map_only(Tensor, lambda x: x.detach().clone(), _open_dataclasses(value))
        self.observations.append(Observation(name, copied, tolerance))

    def randn(self, *shape: int, seed: int = 0, requires_grad: bool = False) -> Tensor:
        """Input of the setting's dtype."""
        generator = torch.Generator().manual_seed(self._seed(seed))
        made = torch.randn(*shape, generator=generator, device="cpu")
        return made.to(USED, self.dtype).requires_grad_(requires_grad)

    def tokens(self, *shape: int, below: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed(seed))
        return torch.randint(below, shape, generator=generator, device="cpu").to(USED)

    def _seed(self, seed: int) -> int:
        """Every rank has inputs of its own."""
        return seed + 7 + RANK_SEEDS * self.rank

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """``make()`` under Init where there is one."""
        with self.init():
            model = make()
        self.models.append(model)
        return model

    def init(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[Any]:
        """To bf16, on the caller's side of the engine."""
        return torch.autocast(USED.type, dtype=torch.bfloat16)

    def initialize(
        self,
        model: nn.Module,
        *,
        accumulation: int = 1,
        clipping: float = 0.0,
        parameters: Iterable[Any] | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        **changes: Any,
    ) -> Any:
        """An engine for ``model``; ``optimizer`` makes one of its parameters, instead of the usual AdamW; ``changes``
        are keys of the configuration that plain torch has no use for."""
        raise NotImplementedError

    def backward(self, engine: Any, loss: Tensor, **kwargs: Any) -> None:
        self.observe("loss", loss)
        self._backward(engine, loss, **kwargs)

    def _backward(self, engine: Any, loss: Tensor, **kwargs: Any) -> None:
        engine.backward(loss, **kwargs)

    def zero_grad(self, module: nn.Module) -> None:
        """The module's own: nothing of its parameters' gradients is left."""
        module.zero_grad()

    def train(self, engine: Any, loss_of: Callable[[int], Tensor], *, num_steps: int = 3) -> None:
        """The usual loop: ``loss_of(step)``, backward, step."""
        for step in range(num_steps):
            self.backward(engine, loss_of(step))
            engine.step()

    def retire(self, engine: Any) -> None:
        """Destroy the engine; it has no weights to compare any more."""
        self.engines.remove(engine)
        engine.destroy()

    def forget(self, engine: Any) -> None:
        """Let go of everything but what the script itself holds."""
        self.engines.remove(engine)
        self.models.clear()

    def close(self) -> None:
        """Observe every engine's weights. (Engines stay: their world's process ends.)"""
        for index, engine in enumerate(self.engines):
            self.observe(f"weights of engine {index}", engine.full_state_dict())


def _open_dataclasses(value: Any) -> Any:
    """Tensors inside a dataclass are compared as well."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return value


class PlainWorld(World):
    name = "plain"

    def init(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def initialize(
        self,
        model: nn.Module,
        *,
        accumulation: int = 1,
        clipping: float = 0.0,
        parameters: Iterable[Any] | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        **changes: Any,
    ) -> Any:
        self.models.append(model)
        engine = (AveragingEngine if has_peers() else PlainEngine)(
            model,
            bf16=self.setting.bf16,
            accumulation=accumulation,
            clipping=clipping,
            parameters=parameters,
            optimizer=optimizer,
            offloaded=self.setting.nvme or self.setting.cpu,
            casts_buffers=not self.setting.dialect,  # DeepSpeed's stay in their dtype
            **({"each": self.setting.stage >= 2} if has_peers() else {}),
        )
        self.engines.append(engine)
        return engine

    def zero_grad(self, module: nn.Module) -> None:
        super().zero_grad(module)
        for engine in self.engines:
            engine.drop_gradients(module.parameters())

    def cast(self, model: nn.Module) -> nn.Module:
        if self.setting.bf16:
            cast_weights(model, with_buffers=not self.setting.dialect)
        return model


class InfinityWorld(World):
    name = "infinity"

    def __init__(self, setting: Setting, swap_dir: str) -> None:
        super().__init__(setting)
        self._swap_dir = swap_dir

    @classmethod
    @contextlib.contextmanager
    def opened(cls, setting: Setting, swap_dir: str | None = None) -> Iterator[InfinityWorld]:
        """With a swap directory of its own, the ranks', or the daemon's; engines that the script left are destroyed."""
        if "INFINITY_IO_SOCKET" in os.environ:
            swap_dir = tempfile.gettempdir()  # the daemon's
        own = (
            tempfile.TemporaryDirectory(prefix="infinity-odd-")
            if swap_dir is None
            else contextlib.nullcontext(swap_dir)
        )
        with own as directory:
            world = cls(setting, directory)
            try:
                yield world
            finally:
                for engine in world.engines:
                    engine.destroy(**({"keep_weights": False} if setting.dialect else {}))

    def config(
        self, *, accumulation: int = 1, clipping: float = 0.0, budget_bytes: int = ROOM_BYTES, **changes: Any
    ) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.setting.stage, "sub_group_size": 16384, **self.setting.zero}
        if self.setting.nvme or self.setting.cpu:
            offload = {"device": "nvme", "nvme_path": self._swap_dir} if self.setting.nvme else {"device": "cpu"}
            zero |= {"offload_optimizer": offload} | ({"offload_param": offload} if self.setting.stage == 3 else {})
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clipping,
            "bf16": {"enabled": self.setting.bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS}},
            "zero_optimization": zero,
            "steps_per_print": 0,
        }
        section: dict[str, Any] = {"master_weights": "split"} if self.setting.split else {}
        if self.setting.update != "on_use":
            early = self.setting.update == "in_backward"
            section |= {"update_in_backward": True} if early else {"update": self.setting.update}
        if self.setting.nvme:
            section |= {"host_budget_bytes": budget_bytes}
            section |= {} if "INFINITY_IO_SOCKET" in os.environ else {"engine": "require:posix"}
        return config | {"io_daemon": section} | changes

    def _backward(self, engine: Any, loss: Tensor, **kwargs: Any) -> None:
        if self.setting.by_hand:
            torch.autograd.backward(loss, **kwargs)
        else:
            super()._backward(engine, loss, **kwargs)

    def init(self) -> AbstractContextManager[Any]:
        init: Any = infinity.deepspeed.zero.Init if self.setting.dialect else infinity.Init
        made: AbstractContextManager[Any] = init(config_dict_or_path=self.config())
        return made

    def initialize(
        self,
        model: nn.Module,
        *,
        accumulation: int = 1,
        clipping: float = 0.0,
        parameters: Iterable[Any] | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        **changes: Any,
    ) -> Any:
        self.models.append(model)
        made = None
        if optimizer is not None:
            made, parameters = optimizer(list(parameters if parameters is not None else model.parameters())), None

        initialize: Any = infinity.deepspeed.initialize if self.setting.dialect else infinity.initialize

        def initialized(budget_bytes: int) -> Any:
            config = self.config(accumulation=accumulation, clipping=clipping, budget_bytes=budget_bytes, **changes)
            if made is not None:
                del config["optimizer"]
            return initialize(model=model, model_parameters=parameters, optimizer=made, config=config)[0]

        starves = self.setting.nvme and self.setting.budget_times
        least = smallest_budget_bytes(initialized) if starves else None  # refused, it leaves the model as it was
        engine = initialized(ROOM_BYTES if least is None else int(least * self.setting.budget_times))
        self.engines.append(engine)
        return engine
