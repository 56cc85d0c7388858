"""The driver and one device: found, or refused in one line; its two streams; its errors as ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from cuda.bindings import driver
from cuda.core import Device, DeviceMemoryResource, Event, EventOptions, Kernel, Stream
from cuda.core._utils.cuda_utils import CUDAError as CUDAError  # cuda.core raises it but does not export it

from llamatrio.backends.cuda.compiler import nvrtc_version
from llamatrio.backends.cuda.driver import require_driver
from llamatrio.errors import BackendError, BackendUnavailableError

_LEAST_CAPABILITY = (7, 5)
_EVENT = EventOptions(timing_enabled=True, blocking_sync=True)
"""Blocking: whoever waits sleeps instead of spinning. Timed: a step reports how long the device worked."""


class Memory(NamedTuple):
    """Bytes of the device's memory."""

    free: int
    total: int


@contextmanager
def driver_errors(what: str) -> Iterator[None]:
    """Turns the driver's errors within the block into a BackendError that begins with `what`."""
    try:
        yield
    except CUDAError as error:
        raise backend_error(what, error) from error


def backend_error(what: str, error: BaseException) -> BackendError:
    """An error of the driver as ours, in one line."""
    return BackendError(f"{what}: {' '.join(str(error).split())}")


class Gpu:
    """A device with the two streams that the backend works on. Made by `open_gpu`."""

    def __init__(self, device: Device, compute: Stream, copy: Stream) -> None:
        self.device = device
        self.compute = compute
        self.copy = copy
        self._entered = threading.local()

    @property
    def arch(self) -> str:
        """As the compiler wants it: "sm_90"."""
        return f"sm_{self.device.arch}"

    @property
    def name(self) -> str:
        """The product's name."""
        return str(self.device.name)

    def enter(self) -> None:
        """Makes the device current in the calling thread; every thread that calls the driver needs it once."""
        if not getattr(self._entered, "done", False):
            self.device.set_current()
            self._entered.done = True

    def new_event(self, owner: ExitStack) -> Event:
        """An event to be recorded again and again, for as long as `owner` lives. Raises BackendError."""
        try:
            event = self.device.create_event(_EVENT)
        except (CUDAError, RuntimeError) as error:  # cuda.core reports a refusal as a plain RuntimeError
            raise backend_error("the driver gives no event", error) from error
        owner.callback(event.close)
        return event

    def memory(self) -> Memory:
        """What is free and what there is. Raises BackendError.

        Free is also what the driver's pool keeps of an earlier backend of this process.
        """
        status, free, total = driver.cuMemGetInfo()
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"the device does not tell its memory: {status.name}")
        with driver_errors("the device does not tell its memory"):
            pool = self.device.memory_resource
            kept = 0
            if isinstance(pool, DeviceMemoryResource):  # a device without pools gives something simpler
                kept = int(pool.attributes.reserved_mem_current) - int(pool.attributes.used_mem_current)
        return Memory(int(free) + kept, int(total))


def load_now(kernel: Kernel) -> None:
    """Brings a kernel's code onto the device: the driver would otherwise do it at the first launch."""
    status, _ = driver.cuKernelGetFunction(kernel.handle)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"a kernel cannot be loaded: {status.name}")


def find_device() -> Device:
    """The first device that the kernels run on.

    Raises:
        BackendUnavailableError: no driver, no device, one that is too old, or no NVRTC; the message is one line.
    """
    require_driver()
    try:
        devices = Device.get_all_devices()
    except CUDAError as error:
        raise BackendUnavailableError(f"the CUDA driver has no device for us: {_first_word(error)}") from error
    if not devices:
        raise BackendUnavailableError("the CUDA driver finds no device")
    device = devices[0]
    major, minor = device.compute_capability
    if (major, minor) < _LEAST_CAPABILITY:
        raise BackendUnavailableError(f"{device.name} has compute capability {major}.{minor}; the kernels need 7.5")
    _require_compiler()
    return device


def _require_compiler() -> None:
    try:
        nvrtc_version()
    except Exception as error:  # cuda.bindings reports a missing library as a plain RuntimeError
        raise BackendUnavailableError("NVRTC is missing: install llamatrio[cuda]") from error


def _first_word(error: BaseException) -> str:
    return str(error).split(":")[0]


@contextmanager
def open_gpu() -> Iterator[Gpu]:
    """The device with its streams, for the length of the block. Raises BackendUnavailableError, BackendError."""
    device = find_device()
    with driver_errors(f"{device.name} cannot be opened"):
        device.set_current()
        compute = device.create_stream()
        try:
            copy = device.create_stream()
        except CUDAError:
            compute.close()
            raise
    try:
        yield Gpu(device, compute, copy)
    finally:
        copy.close()
        compute.close()
