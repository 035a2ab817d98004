"""Activation checkpointing by the dialect's names: ``checkpoint``, ``configure``, ``is_configured``, ``reset``.

The recomputation is torch's own (``torch.utils.checkpoint``, not re-entrant), random numbers included. Settings say
where the inputs of checkpointed calls wait for backward, and what is logged; they are the process's, as in the dialect.
They change no bit.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from infinity.config import parse_config
from infinity.config.load import Source
from infinity.config.sections import ActivationCheckpointing
from infinity.errors import ConfigError
from infinity.tiers.activations import ActivationStore, Waiting
from infinity.weights.param import memory_order
from infinity.weights.saved_tensors import SavedTensor
from io_daemon.shared.protocol import PAGE_BYTES

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
SECTION = "activation_checkpointing"
_log = logging.getLogger(__name__)


class _Slots:
    """Memory in one piece for the inputs, of one kind, of so many checkpointed calls."""

    def __init__(self, like: torch.Tensor, count: int, device: torch.device) -> None:
        pinned = device.type == "cpu" and like.device.type != "cpu"
        self._memory = torch.empty((count, *like.shape), dtype=like.dtype, device=device, pin_memory=pinned)
        self._free = list(range(count))[::-1]
        self._count = count

    def take(self, source: torch.Tensor) -> _Kept:
        if not self._free:
            raise ConfigError(
                f"{SECTION}.number_checkpoints",
                self._count,
                "more inputs of one kind wait for backward: write the number of checkpointed calls of a forward, or "
                "call infinity.checkpointing.reset() after forwards that no backward follows",
            )
        slot = self._free.pop()
        kept = _Kept(self._memory[slot].copy_(source, non_blocking=True), source.device)
        weakref.finalize(kept, self._free.append, slot)
        return kept


class _Kept:
    """An input where it waits, and where it belongs."""

    def __init__(self, values: torch.Tensor, device: torch.device) -> None:
        self._values, self._device = values, device

    def back(self) -> torch.Tensor:
        """The values are a copy: what is computed from them may outlive the slot."""
        return self._values.to(self._device, non_blocking=True, copy=True)


class _OnDisk:
    """An input that waits in the daemon, and how it lies in memory when it is back."""

    def __init__(self, waiting: Waiting, tensor: torch.Tensor) -> None:
        self._waiting, self._device = waiting, tensor.device
        self._like = torch.empty_like(tensor, device="meta")

    @classmethod
    def of(cls, tensor: torch.Tensor, store: ActivationStore) -> _OnDisk | torch.Tensor:
        """The tensor itself where it is smaller than a page, or has holes or elements that share a place."""
        order = memory_order(tensor)
        dense = tensor.permute(order)
        if tensor.nbytes < PAGE_BYTES or not dense.is_contiguous():
            return tensor
        return cls(store.put(dense.reshape(-1).view(torch.uint8)), tensor)

    def back(self) -> torch.Tensor:
        values = torch.empty_like(self._like, device=self._device)
        self._waiting.read_into(values.permute(memory_order(values)).reshape(-1).view(torch.uint8))
        return values


class Checkpointing:
    """Settings, and the memory that they ask for."""

    def __init__(self) -> None:
        self.settings = ActivationCheckpointing()
        self.is_configured = self.by_user = False
        self.stores: list[ActivationStore] = []
        """One for each engine whose configuration asked for it."""
        self._slots: dict[tuple[Any, ...], _Slots] = {}

    def configure(self, settings: ActivationCheckpointing, *, by_user: bool = True) -> None:
        if settings.contiguous_memory_optimization and settings.number_checkpoints is None:
            raise ConfigError(
                f"{SECTION}.number_checkpoints",
                None,
                "contiguous_memory_optimization needs it: how many calls there are",
            )
        self.settings, self.is_configured, self.by_user = settings, True, by_user
        self.reset()

    def reset(self) -> None:
        """Give up the memory and disk space; what still waits for backward keeps its own part."""
        self._slots.clear()
        self.stores = [store for store in self.stores if not store.is_closed]
        for store in self.stores:
            store.give_back()

    def around_inputs(self) -> contextlib.AbstractContextManager[Any]:
        """What is saved for backward inside, which are the inputs of a checkpointed call, goes where it is to wait."""
        settings = self.settings
        if not (settings.cpu_checkpointing or settings.contiguous_memory_optimization or self.store):
            return contextlib.nullcontext()
        return saved_tensors_hooks(self._keep, lambda kept: kept if isinstance(kept, torch.Tensor) else kept.back())

    def _keep(self, tensor: torch.Tensor) -> Any:
        """What waits where it is must be unchanged when it is needed, which torch looks at only where nobody hooks."""
        kept = self._waiting(tensor)
        if not isinstance(kept, torch.Tensor) or isinstance(kept, torch.nn.Parameter):
            return kept
        return SavedTensor(kept, kept._version)

    def _waiting(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_floating_point() or isinstance(tensor, torch.nn.Parameter):
            return tensor
        if (store := self.store) is not None:
            return _OnDisk.of(tensor.detach(), store)
        device = torch.device("cpu") if self.settings.cpu_checkpointing else tensor.device
        if self.settings.contiguous_memory_optimization:
            key = (tensor.shape, tensor.dtype, tensor.device)
            if key not in self._slots:
                self._slots[key] = _Slots(tensor, self.settings.number_checkpoints or 1, device)
            return self._slots[key].take(tensor.detach())
        if device == tensor.device:
            return tensor
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=True)
        return _Kept(values.copy_(tensor.detach(), non_blocking=True), tensor.device)

    @property
    def store(self) -> ActivationStore | None:
        """The last engine's, of those that are alive and asked for one."""
        return next((store for store in reversed(self.stores) if not store.is_closed), None)


_process = Checkpointing()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` without keeping what it computes: backward calls it again.

    Args:
        function: what is called, now and in backward, with the same random numbers.
        args, kwargs: its arguments; tensors among them get gradients.

    Returns:
        What it returned: a lone output as it is, several as a tuple.
    """
    names, num_positional = tuple(kwargs), len(args)

    def call(*given: Any) -> Any:
        return function(*given[:num_positional], **dict(zip(names, given[num_positional:], strict=True)))

    given = (*args, *kwargs.values())
    watched = _Watched(call, given, _process.settings) if _watches(_process.settings) else call
    with _process.around_inputs():
        outputs = torch_checkpoint(watched, *given, use_reentrant=False)
    if not isinstance(outputs, list | tuple):
        return outputs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def configure(
    mpu_: Any,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set where inputs of checkpointed calls wait, and what is logged; what is given here goes before the file.

    Args:
        mpu_: None, or an object whose ``get_model_parallel_world_size()`` is 1.
        deepspeed_config: a configuration whose section ``activation_checkpointing`` is read.
        partition_activations: taken for the dialect's sake: only ranks of one tensor-parallel group hold the same
            activations, and there are none.
        contiguous_checkpointing: inputs wait in one piece of memory; needs ``num_checkpoints``.
        num_checkpoints: checkpointed calls of one forward.
        checkpoint_in_cpu: inputs wait in host memory.
        synchronize: wait for the device at the beginning and the end of each call.
        profile: log how long each call took, in forward and in backward.

    Raises:
        ConfigError: model parallelism, a contradiction, or a configuration that ``initialize`` would refuse.
    """
    size = int(mpu_.get_model_parallel_world_size()) if mpu_ is not None else 1
    if size != 1:
        raise ConfigError("mpu_", size, "there is no model parallelism: pass None")
    if partition_activations:
        _log.info("partition_activations needs no setting: nobody else holds this rank's activations")
    settings = ActivationCheckpointing()
    if deepspeed_config is not None:
        config = parse_config(deepspeed_config, check_paths=False, before_trainer=True)
        settings = config.activation_checkpointing
    given: Mapping[str, Any] = {
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    _process.configure(settings.model_copy(update={name: value for name, value in given.items() if value is not None}))


def apply_section(settings: ActivationCheckpointing, store: ActivationStore | None = None) -> None:
    """An engine's configuration says so; what ``configure`` was called with goes before it. ``store``: where inputs
    wait that the engine's daemon keeps."""
    if store is not None:
        _process.stores = [*(each for each in _process.stores if not each.is_closed), store]
    if settings.contiguous_memory_optimization and settings.number_checkpoints is None:
        # files say so whose scripts never call ``configure``, which asks for the number
        _log.info("contiguous_memory_optimization without number_checkpoints: inputs wait each in memory of its own")
        settings = settings.model_copy(update={"contiguous_memory_optimization": False})
    if settings == _process.settings:
        return
    if _process.by_user:
        _log.info("the section activation_checkpointing is not used: configure() was called before")
    else:
        _process.configure(settings, by_user=False)


def is_configured() -> bool:
    """Whether ``configure`` was called, or a configuration said something about checkpointing."""
    return _process.is_configured


def reset() -> None:
    """Give up the memory of ``contiguous_checkpointing``, as after forwards without a backward, and places on disk."""
    _process.reset()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """The call is taken for the dialect's sake, see ``configure``."""


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpointed calls of one forward."""
    _process.configure(_process.settings.model_copy(update={"number_checkpoints": nlayers}))


def _watches(settings: ActivationCheckpointing) -> bool:
    return settings.synchronize_checkpoint_boundary or settings.profile


def _gets_gradient(given: object) -> bool:
    """Whether it is an activation that backward computes a gradient of."""
    return isinstance(given, torch.Tensor) and not isinstance(given, torch.nn.Parameter) and given.requires_grad


class _Watched:
    """A call whose beginnings and ends are waited for or timed: the first time in forward, then in backward."""

    def __init__(self, call: Callable[..., Any], inputs: tuple[Any, ...], settings: ActivationCheckpointing) -> None:
        self._call, self._settings = call, settings
        self._is_forward, self._start_s = True, 0.0
        differentiable = [each for each in inputs if _gets_gradient(each)]
        self._ends_with_gradients = bool(differentiable) and torch.is_grad_enabled()
        if self._ends_with_gradients:
            register_multi_grad_hook(differentiable, lambda _gradients: self._end("backward"))

    def __call__(self, *given: Any) -> Any:
        pass_name, self._is_forward = "forward" if self._is_forward else "backward", False
        with self._timed(pass_name):
            return self._call(*given)

    @contextlib.contextmanager
    def _timed(self, pass_name: str) -> Iterator[None]:
        self._synchronize()
        self._start_s = time.perf_counter()
        try:
            yield
        finally:  # torch ends a recomputation that has seen enough by an exception
            if pass_name == "forward" or not self._ends_with_gradients:
                self._end(pass_name)

    def _end(self, pass_name: str) -> None:
        self._synchronize()
        if self._settings.profile:
            _log.info("checkpoint %s: %.2f ms", pass_name, 1e3 * (time.perf_counter() - self._start_s))

    def _synchronize(self) -> None:
        if self._settings.synchronize_checkpoint_boundary and torch.accelerator.is_available():
            torch.accelerator.synchronize()
