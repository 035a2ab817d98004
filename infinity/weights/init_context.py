"""``Init``: build a model larger than memory. Parameters are staged out as the model grows.

A bounded set of parameters, the ones touched last, keeps its memory; the others wait in the staging area as shards. Any
torch operation that takes a staged parameter (``nn.init.normal_(self.weight)``, ``self.apply(...)``, an adapter that
reads its base) brings it back first, and what is brought back is written out again when its turn comes. So constructors
run unchanged, draw the same random numbers in the same order, and give the same model; and so does what changes the
model between ``Init`` and ``initialize``.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from infinity.config import Config, parse_config
from infinity.config.load import Source
from infinity.errors import ConfigError
from infinity.plan.registered import modules, named_modules, named_parameters
from infinity.tiers.collectives import Collectives
from infinity.weights.admission import admit_kind
from infinity.weights.init_arguments import placed, refuse_foreign
from infinity.weights.staging import StagingArea, staged_param

_open: Final[list[Init]] = []
"""The contexts that are open, the innermost last, which has what is registered."""
WITHOUT_CONFIG: Final = {"zero_optimization": {"stage": 3}}


class Init:
    """Context manager: every parameter created inside is sharded, and offloaded as the config says, as it is built.

    Args:
        config_dict_or_path: the same configuration that ``initialize`` gets; a trainer may fill in "auto" later.
            Without one, shards stay in memory.
        module: a module that is built already: its parameters are staged at once, and there is no need for ``with``.
        dtype: what floating-point parameters are made in, or cast to, those of 8 bits aside; by default what their
            constructors say.
        enabled: false makes this nothing.
        config: the dialect's old name of ``config_dict_or_path``.
        process_group: the ranks that share the model; by default all, whom this starts torch.distributed for where
            RANK and WORLD_SIZE are set and nobody has.
        data_parallel_group: the dialect's name of ``process_group``.
        remote_device: "cpu" or "nvme", as ``offload_param.device`` of the configuration says it.
        pin_memory: as ``offload_param.pin_memory``.
        mem_efficient_linear: taken for the dialect's sake: autograd never holds a gathered copy of a weight.
        foreign: the dialect's arguments for what is not built (``mpu``, quantised communication): refused by name.

    Lazy, sparse and expanded parameters are refused when they are registered. Collective: every rank runs the same
    constructors.
    """

    def __init__(
        self,
        config_dict_or_path: Source | None = None,
        *,
        module: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        config: Source | None = None,
        process_group: dist.ProcessGroup | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        remote_device: str | None = None,
        pin_memory: bool = False,
        mem_efficient_linear: bool = True,
        **foreign: object,
    ) -> None:
        refuse_foreign(foreign)
        if config is not None and config_dict_or_path is not None:
            raise ConfigError(
                "config", "given", "is an old name of config_dict_or_path, which is given too: remove one"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError("dtype", dtype, "must be a floating-point dtype of torch's: weights are trained")
        if process_group is not None and data_parallel_group not in (None, process_group):
            raise ConfigError("data_parallel_group", "given", "is another group than process_group: remove one")
        process_group = process_group or data_parallel_group
        source = config if config_dict_or_path is None else config_dict_or_path
        self._has_config = source is not None
        source = WITHOUT_CONFIG if source is None else source
        self._config_source: Source = placed(source, remote_device, pin_memory=pin_memory) if enabled else source
        self._process_group, self._dtype, self._enabled = process_group, dtype, enabled
        self._hooks: list[Any] = []
        self._on_meta: dict[int, weakref.ref[nn.Module]] = {}
        """Modules that registered parameters without memory: ``to_empty`` gives them some and tells nobody."""
        self._area: StagingArea | None = None
        if module is not None:
            with self:
                for prefix, child in named_modules(module):
                    for name, param in named_parameters(child, recurse=False):
                        self._registered(child, f"{prefix}.{name}" if prefix else name, param)

    @property
    def config(self) -> Config:
        """The configuration as it is staged by; known inside the context and after it."""
        if self._area is None:
            raise AssertionError("asked before it was entered")
        return self._area.config

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        collectives = Collectives.join(self._process_group)
        try:
            config = parse_config(self._config_source, world_size=collectives.world_size, before_trainer=True)
            self._area = StagingArea(config, collectives)
        except BaseException:
            collectives.close()
            raise
        self._hooks = [
            register_module_parameter_registration_hook(self._registered),
            register_module_module_registration_hook(self._attached),
        ]
        _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if not self._enabled:
            return
        if self._area is None:
            raise AssertionError("left before it was entered")
        is_built = False
        try:
            if error is None:
                self._take_in(list(self._on_meta))
                is_built = True
        finally:
            for hook in self._hooks:
                hook.remove()
            _open.remove(self)
            self._area.is_building = False
            if not is_built:
                self._area.close()
        if is_built:
            self._area.stage_everything()

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        innermost = _open[-1] if _open else None
        if param is None or innermost is not self or staged_param(param) is not None:
            return
        if param.device.type == "meta":
            self._on_meta[id(module)] = weakref.ref(module)
            return
        key = f"{type(module).__name__}.{name}"
        admit_kind(key, param)
        if self._area is None:
            raise AssertionError("registered outside the context")
        dtype = self._dtype_of(param)
        if dtype is not None and dtype is not param.dtype and param.is_floating_point() and param.itemsize > 1:
            self._area.casts_weights |= param.dtype is torch.float32
            param.data = param.data.to(dtype)
        self._area.adopt(param, key)

    def _dtype_of(self, param: nn.Parameter) -> torch.dtype | None:
        """What the parameter is cast to; None: it stays what it is."""
        return self._dtype

    def _attached(self, _parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None and self._on_meta and _open and _open[-1] is self:
            self._take_in([key for key in map(id, modules(child)) if key in self._on_meta])

    def _take_in(self, modules: list[int]) -> None:
        """Parameters of modules made on the meta device (``skip_init``) that have memory by now."""
        for key in modules:
            module = self._on_meta.pop(key)()
            if module is not None:
                for name, param in named_parameters(module, recurse=False):
                    self._registered(module, name, param)  # what is still on meta is noted again
