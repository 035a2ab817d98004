"""``get_accelerator()``: the device that training runs on, under DeepSpeed's calls."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from infinity.config import read_environment
from infinity.deepspeed import op_builders
from infinity.errors import ConfigError
from infinity.tiers.world import used_device
from io_daemon.disk.kernel_text import read_text

nvtx: Any = importlib.import_module("nvtx") if importlib.util.find_spec("nvtx") else None
"""The package whose ranges have domains; none where it is not installed."""


_TENSORS: Final = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class DeepSpeedAccelerator:
    """Functions of torch's for one kind of device, or for the CPU. Made by ``get_accelerator``.

    Streams and events of the CPU are None, as in DeepSpeed: what they would order is in order.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "gloo" if kind == "cpu" else dist.get_default_backend_for_device(kind)
        self._torch: Any = getattr(torch, kind)

    def __getattr__(self, name: str) -> Any:
        """Makers of tensors by dtype, ``LongTensor([1, 2])``, on the current device."""
        if (dtype := _TENSORS.get(name)) is None:
            raise AttributeError(
                f"infinity's accelerator has no {name}: call torch itself, with get_accelerator().current_device_name()"
            )
        if self._name == "cpu":
            return getattr(torch, name)
        return functools.partial(torch.tensor, dtype=dtype, device=self.current_device_name())

    # Devices

    def is_synchronized_device(self) -> bool:
        """Whether a call has done its work when it returns."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_available(self) -> bool:
        """Whether there is such a device."""
        return self._name == "cpu" or bool(self._torch.is_available())

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda:1", or "cuda" without a number; "cpu" always."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Inside, the device is the current one."""
        return nullcontext() if self._name == "cpu" else self._torch.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make the device the current one."""
        if self._name != "cpu":
            self._torch.set_device(device_index)

    def current_device(self) -> int | str:
        """The number of the current device; of CPUs this rank's on its node."""
        return read_environment().local_rank if self._name == "cpu" else int(self._torch.current_device())

    def current_device_name(self) -> str:
        """The device as torch takes it: "cpu", "cuda:0"."""
        return "cpu" if self._name == "cpu" else f"{self._name}:{self.current_device()}"

    def device_count(self) -> int:
        """Devices that this process sees; of CPUs the ranks of this node."""
        if self._name != "cpu":
            return int(self._torch.device_count())
        environment = read_environment()
        return environment.local_size or environment.local_world_size

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for what was started on the device."""
        if self._name != "cpu":
            self._torch.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed for tensors of the device."""
        return str(self._communication_backend_name)

    def visible_devices_envs(self) -> list[str]:
        """Variables by which processes are given devices."""
        return ["CUDA_VISIBLE_DEVICES"] if self._name == "cuda" else []

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on this kind of device."""
        return tensor.device.type == self._name

    # Numbers

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return self._name == "cpu" or bool(self._torch.is_bf16_supported())

    def is_fp64_supported(self) -> bool:
        """Whether the device computes in float64."""
        return self._name != "mps"

    def is_fp16_supported(self) -> bool:
        """Whether the device has kernels for fp16. A CPU without them computes in it, too, as slowly as it is."""
        return self._name != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def supported_dtypes(self) -> list[torch.dtype]:
        """What weights may be."""
        fp16 = [torch.float16] if self.is_fp16_supported() else []
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, *fp16, *bf16]

    def random(self) -> Any:
        """``torch.random``."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seed torch on this device."""
        return torch.manual_seed(seed) if self._name == "cpu" else self._torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seed torch on all devices of this kind."""
        return torch.manual_seed(seed) if self._name == "cpu" else self._torch.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """What torch was seeded with."""
        return torch.initial_seed() if self._name == "cpu" else int(self._torch.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of torch's generator for this device."""
        if self._name == "cpu":
            return torch.get_rng_state()
        state: torch.Tensor = self._torch.get_rng_state(
            self._torch.current_device() if device_index is None else device_index
        )
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of torch's generator for this device."""
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            self._torch.set_rng_state(new_state, self._torch.current_device() if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of torch for this device."""
        if self._name == "cpu":
            return torch.default_generator
        generator: torch.Generator = self._torch.default_generators[device_index]
        return generator

    # Streams

    def Stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """A stream; None on the CPU."""
        return None if self._name == "cpu" else self._torch.Stream(*args, **kwargs)

    def Event(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """An event; None on the CPU."""
        return None if self._name == "cpu" else self._torch.Event(*args, **kwargs)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work goes to the stream."""
        return nullcontext() if self._name == "cpu" else self._torch.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that work goes to; None on the CPU."""
        return None if self._name == "cpu" else self._torch.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The device's own stream; None on the CPU."""
        return None if self._name == "cpu" else self._torch.default_stream(device_index)

    # Memory

    def empty_cache(self) -> None:
        """Give unused memory back."""
        if self._name != "cpu":
            self._torch.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device; of CPUs this process's resident bytes."""
        return _process_bytes("VmRSS") if self._name == "cpu" else int(self._torch.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that there were."""
        return _process_bytes("VmHWM") if self._name == "cpu" else int(self._torch.max_memory_allocated(device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch holds on the device."""
        return self.memory_allocated() if self._name == "cpu" else int(self._torch.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most that it held."""
        return (
            self.max_memory_allocated() if self._name == "cpu" else int(self._torch.max_memory_reserved(device_index))
        )

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin anew to look for the most; of CPUs it is the process's and stays."""
        if self._name != "cpu":
            self._torch.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """What torch counts; nothing of the CPU."""
        return {} if self._name == "cpu" else dict(self._torch.memory_stats(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that the device has; of CPUs the node."""
        if self._name == "cpu":
            return _node_bytes("MemTotal")
        return int(self._torch.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        if self._name == "cpu":
            return _node_bytes("MemAvailable")
        return int(self._torch.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory, where a device can copy from it by itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies there."""
        return False if self._name == "cpu" else tensor.is_pinned()

    # Others

    def amp(self) -> Any:
        """``torch.amp``, or the device's own module of it."""
        return getattr(self._torch, "amp", torch.amp)

    def is_triton_supported(self) -> bool:
        """Whether torch's compiler can use Triton on the device."""
        return self._name == "cuda"

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range of the device's profiler, where it has one."""

    def range_pop(self, domain: str | None = None) -> Any:
        """End it."""

    def lazy_call(self, callback: Any) -> None:
        """Call it, once the device is there: now."""
        callback()

    def get_compile_backend(self) -> str:
        """The compiler's own backend."""
        return "inductor"

    def get_op_builder(self, class_name: str) -> type[op_builders.OpBuilder]:
        """The class that answers for an extension. Raises ConfigError if none of that name is served."""
        served = {type(builder).__name__: type(builder) for builder in op_builders.ALL_OPS.values()}
        if class_name not in served:
            raise ConfigError("op_builder", class_name, f"what may be asked for is {', '.join(served)}")
        return served[class_name]

    def create_op_builder(self, class_name: str) -> op_builders.OpBuilder:
        """An object of it."""
        return self.get_op_builder(class_name)()


class CUDA_Accelerator(DeepSpeedAccelerator):  # noqa: N801
    """NVIDIA's and AMD's devices, with ranges of the former's profiler."""

    supports_nvtx_domain = True

    def __init__(self) -> None:
        super().__init__("cuda")
        self._nvtx_domains: dict[str, Any] = {}

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range; in ``domain`` where the package nvtx is there."""
        if nvtx is not None and domain is not None:
            return self._domain(domain).push_range(message=msg, category=category)
        return torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: str | None = None) -> Any:
        """End it."""
        if nvtx is not None and domain is not None:
            return self._domain(domain).pop_range()
        return torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def _domain(self, name: str) -> Any:
        if name not in self._nvtx_domains:
            self._nvtx_domains[name] = nvtx.get_domain(name)
        return self._nvtx_domains[name]


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator that torch finds on this machine, else the CPU. Raises ConfigError if DS_ACCELERATOR names
    another."""
    used, told = used_device().type, read_environment().accelerator
    if told and told.partition(".")[0] != used:
        raise ConfigError(
            "DS_ACCELERATOR",
            told,
            f"weights are used on what torch finds here, {used}: unset it"
            + (", or hide the devices, as by CUDA_VISIBLE_DEVICES=''" if told == "cpu" else ""),
        )
    return CUDA_Accelerator() if used == "cuda" else DeepSpeedAccelerator(used)


def is_current_accelerator_supported() -> bool:
    """Whether training runs on it: what torch computes on, it does."""
    return get_accelerator().is_available()


def _process_bytes(name: str) -> int:
    return _kib(Path("/proc/self/status"), name)


def _node_bytes(name: str) -> int:
    return _kib(Path("/proc/meminfo"), name)


def _kib(path: Path, name: str) -> int:
    lines = (line.split() for line in (read_text(path) or "").splitlines())
    return next(int(words[1]) * 1024 for words in lines if words and words[0] == f"{name}:")
