"""Runs single kernels on the emulated driver: arrays in, one launch or a few, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np


class Rig:
    """A device with one stream. `put` and `empty` give addresses; memory that nobody wrote is poisoned."""

    def __init__(self, device: Any, loader: Any) -> None:
        from cuda.core import DeviceMemoryResource, LegacyPinnedMemoryResource

        from llamatrio.backends.cuda.kernels.launcher import Launcher

        self.stream = device.create_stream()
        self.run = Launcher(loader, self.stream)
        self._device_memory = DeviceMemoryResource(device)
        self._host_memory = LegacyPinnedMemoryResource()
        self._buffers: dict[int, Any] = {}

    def put(self, array: np.ndarray) -> int:
        """Copies an array to the device; its address."""
        array = np.ascontiguousarray(array)
        host = self._host_memory.allocate(max(array.nbytes, 1))
        np.from_dlpack(host).view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
        address = self.empty(array.nbytes)
        self._buffers[address].copy_from(host, stream=self.stream)
        self.stream.sync()
        return address

    def empty(self, nbytes: int) -> int:
        """Allocates bytes that hold no value yet; their address."""
        buffer = self._device_memory.allocate(max(nbytes, 1), stream=self.stream)
        self._buffers[int(buffer.handle)] = buffer
        return int(buffer.handle)

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Waits, and copies a whole buffer back as an array."""
        buffer = self._buffers[address]
        host = self._host_memory.allocate(buffer.size)
        buffer.copy_to(host, stream=self.stream)
        self.stream.sync()
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.from_dlpack(host).view(np.uint8)[:n].view(dtype).reshape(shape).copy()

    def free(self) -> None:
        """Drops every buffer."""
        self.stream.sync()
        for buffer in self._buffers.values():
            buffer.close(self.stream)
        self._buffers.clear()
