"""Small conveniences for tests that run kernels on the emulated driver."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.core import (
    Buffer,
    Device,
    DeviceMemoryResource,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Program,
    ProgramOptions,
    launch,
)
from numpy.typing import NDArray


class Gpu:
    """A device with one stream, and arrays that go there and back."""

    def __init__(self) -> None:
        self.device = Device()
        self.device.set_current()
        self.stream = self.device.create_stream()
        self.memory = DeviceMemoryResource(self.device)
        self.pinned = LegacyPinnedMemoryResource()

    def compile(self, source: str, name: str = "test.cu", **options: Any) -> Any:
        """An ObjectCode of CUDA C++ text."""
        settings = ProgramOptions(
            name=name, arch=f"sm_{self.device.arch}", std="c++17", use_bundled_headers=True, lineinfo=True, **options
        )
        return Program(source, "c++", settings).compile("cubin")

    def kernel(self, source: str, name: str = "k") -> Any:
        return self.compile(source).get_kernel(name)

    def host(self, like: NDArray[Any]) -> tuple[Buffer, NDArray[Any]]:
        """A pinned buffer with the array's contents, and its view."""
        buffer = self.pinned.allocate(max(like.nbytes, 1))
        view = np.from_dlpack(buffer).view(like.dtype)[: like.size].reshape(like.shape)
        view[...] = like
        return buffer, view

    def upload(self, array: NDArray[Any]) -> Buffer:
        """A device buffer of exactly the array's size."""
        source, _ = self.host(array)
        target = self.memory.allocate(array.nbytes, stream=self.stream)
        target.copy_from(Buffer.from_handle(int(source.handle), array.nbytes, owner=source), stream=self.stream)
        self.stream.sync()
        return target

    def download(self, buffer: Buffer, like: NDArray[Any]) -> NDArray[Any]:
        target, view = self.host(np.zeros_like(like))
        buffer.copy_to(Buffer.from_handle(int(target.handle), like.nbytes, owner=target), stream=self.stream)
        self.stream.sync()
        return view.copy()

    def launch(self, kernel: Any, grid: Any, block: Any, *arguments: Any, shared: int = 0, stream: Any = None) -> None:
        launch(stream or self.stream, LaunchConfig(grid=grid, block=block, shmem_size=shared), kernel, *arguments)

    def run(
        self, source: str, *arrays: NDArray[Any], grid: Any = 1, block: Any = 32, name: str = "k", shared: int = 0
    ) -> list[NDArray[Any]]:
        """Compiles `name`, runs it on the arrays (all pointers), and gives back what they hold then."""
        kernel = self.kernel(source, name)
        buffers = [self.upload(np.ascontiguousarray(a)) for a in arrays]
        self.launch(kernel, grid, block, *buffers, shared=shared)
        return [self.download(b, a) for b, a in zip(buffers, arrays, strict=True)]
