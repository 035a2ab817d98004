"""GPU memory through the CUDA driver's own library, without torch or CuPy: allocate, copy, free."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
SUCCESS: Final = 0
_POINTER = ctypes.c_uint64  # CUdeviceptr


def driver_problem() -> str | None:
    """None if the NVIDIA driver's library is there, with or without a GPU, else why not."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return f"the NVIDIA driver's {LIBRARY} is missing: install the driver, or choose another engine"
    return None


def device_problem() -> str | None:
    """None if there is a GPU to allocate on, else why not."""
    if (problem := driver_problem()) is not None:
        return problem
    driver = ctypes.CDLL(LIBRARY)
    count = ctypes.c_int()
    result = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if result != SUCCESS:
        return f"no GPU: the CUDA driver does not start ({_error_name(driver, result)})"
    return None if count.value > 0 else "no GPU: the CUDA driver finds none"


class CudaMemory:
    """``num_bytes`` of GPU 0, the owner's to close. Any thread may copy; the copies are synchronous."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError without a driver, RuntimeError with the driver's own word for what it refuses."""
        self.num_bytes = num_bytes
        self._driver = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        self._device = ctypes.c_int()
        address = _POINTER()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        # for good: libraries know a context's streams and buffers by its address, and crash in one made anew there
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._enter()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address = address.value

    def close(self) -> None:
        """Idempotent. Nothing may use the memory any more."""
        if self.address:
            self._enter()
            self._call("cuMemFree_v2", _POINTER(self.address))
            self.address = 0

    def view(self, offset: int, num_bytes: int) -> CudaBytes:
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset} do not lie in {self.num_bytes}")
        return CudaBytes(self.address + offset, num_bytes)

    def copy_in(self, view: CudaBytes, host_address: int) -> None:
        self._enter()
        self._call("cuMemcpyHtoD_v2", _POINTER(view.address), ctypes.c_void_p(host_address), _size(view))

    def copy_out(self, view: CudaBytes, host_address: int) -> None:
        self._enter()
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(host_address), _POINTER(view.address), _size(view))

    def _enter(self) -> None:
        """The driver keeps a current context per thread."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: object) -> None:
        function: Callable[..., int] = getattr(self._driver, name)
        result = function(*arguments)
        if result != SUCCESS:
            raise RuntimeError(f"{name}: {_error_name(self._driver, result)}")


class CudaBytes:
    """Bytes of a ``CudaMemory``, as libraries take them that know the CUDA array interface (version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def _size(view: CudaBytes) -> ctypes.c_size_t:
    return ctypes.c_size_t(view.num_bytes)


def _error_name(driver: ctypes.CDLL, result: int) -> str:
    name = ctypes.c_char_p()
    if driver.cuGetErrorName(result, ctypes.byref(name)) == SUCCESS and name.value is not None:
        return name.value.decode()
    return f"error {result}"
