"""Every architecture that Transformers has, tiny: three steps and an evaluation, of a model built plainly, built under
Init, and loaded by from_pretrained as Transformers does it under ZeRO-3."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import infinity.deepspeed
from tests.support.cases import EACH, Cases
from tests.support.world import RANK_SEEDS, InfinityWorld
from tests.zoo.architectures import architectures, build, inputs, loss_of, variant_of

infinity.deepspeed.install()  # before anything of Transformers
cases = Cases(__name__)


def train(world: Any, engine: Any, *, with_pictures: bool) -> None:
    def outputs(step: int) -> Any:
        seed = step + RANK_SEEDS * world.rank
        return engine(**inputs(engine.module, seed, world.dtype, with_pictures=with_pictures))

    torch.manual_seed(2)  # a model that is built on meta first draws nothing where others do
    np.random.seed(2)  # some mask parts of a sound by numpy's
    world.train(engine, lambda step: loss_of(engine.module, outputs(step)))
    engine.eval()
    with torch.no_grad():
        seen = outputs(9)
    world.observe("evaluation", [x for x in tree_leaves(tuple(seen.values())) if isinstance(x, Tensor)])


def plainly(world: Any, make: Callable[[], nn.Module]) -> nn.Module:
    return make()


def under_init(world: Any, make: Callable[[], nn.Module]) -> nn.Module:
    built: nn.Module = world.build(make)
    return built


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def rank_0s_directory() -> Iterator[str]:
    """One that all ranks share; gone when all are done with it."""
    with tempfile.TemporaryDirectory(prefix="infinity-zoo-") as own:
        shared = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        yield shared[0]
        wait_for_all()


def from_pretrained(world: Any, make: Callable[[], nn.Module]) -> nn.Module:
    """Of a directory of safetensors; Transformers asks a live ``HfDeepSpeedConfig`` whether weights are sharded."""
    model: Any = make()
    integration: Any = importlib.import_module("transformers.integrations")
    with rank_0s_directory() as directory:
        model.save_pretrained(directory)  # which rank 0 alone writes
        wait_for_all()
        alive = integration.HfDeepSpeedConfig(world.config()) if isinstance(world, InfinityWorld) else None
        loaded: nn.Module = type(model).from_pretrained(directory).train()
        del alive
    if not isinstance(world, InfinityWorld):
        for tensor in (*loaded.parameters(), *loaded.buffers()):  # mapped from a file they lie as some kernels' last
            tensor.data = tensor.data.clone()  # bits hang on
        for name, param in model.named_parameters():  # what the constructor froze is not, unless weights are sharded
            loaded.get_parameter(name).requires_grad_(param.requires_grad)
    return loaded


WAYS = {"plainly": plainly, "init": under_init, "pretrained": from_pretrained}


def add(name: str, way: str) -> None:
    """The case of an architecture's model that comes by a way."""
    come = WAYS[way]

    def script(world: Any) -> None:
        variant = variant_of(name)
        model = come(world, lambda: build(name, variant.config))
        train(world, world.initialize(model), with_pictures=variant.with_pictures)

    script.__name__ = f"{name}/{way}"
    cases(settings=(EACH,))(script)


for architecture in architectures():
    for word in WAYS:
        add(architecture, word)
