"""Decode steps as CUDA graphs: one for each bucket of rows, captured at start, replayed by one call of the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cuda.core import Stream
from cuda.core.graph import Graph

from llamatrio.backends.cuda.compiler import KernelLoader
from llamatrio.backends.cuda.device import Gpu, driver_errors, load_now
from llamatrio.backends.cuda.forward import DeviceModel
from llamatrio.backends.cuda.kernels.launcher import Launcher
from llamatrio.backends.cuda.passes import DecodePass


class DecodeGraphs:
    """The graphs by their number of rows. Made by `decode_graphs`."""

    def __init__(self, graphs: dict[int, Graph]) -> None:
        self._graphs = graphs

    def launch(self, bucket: int, stream: Stream) -> None:
        """Enqueues the decode pass of a bucket."""
        self._graphs[bucket].launch(stream)


@contextmanager
def decode_graphs(gpu: Gpu, loader: KernelLoader, model: DeviceModel) -> Iterator[DecodeGraphs]:
    """Captures every bucket up to the most lanes; this compiles and loads the kernels too. Raises BackendError."""
    graphs: dict[int, Graph] = {}
    try:
        n_rows = 1
        while n_rows <= model.limits.n_decode:
            with driver_errors(f"the graph of {n_rows} decode rows cannot be made"):
                graphs[n_rows] = _captured(gpu, loader, model, n_rows)
                graphs[n_rows].upload(gpu.compute)
            n_rows *= 2
        yield DecodeGraphs(graphs)
    finally:
        for graph in graphs.values():
            graph.close()


def _captured(gpu: Gpu, loader: KernelLoader, model: DeviceModel, n_rows: int) -> Graph:
    DecodePass(model, KernelsOnly(loader), n_rows).enqueue()  # modules cannot be loaded while a stream captures
    builder = gpu.device.create_graph_builder()
    try:
        builder.begin_building()
        DecodePass(model, Launcher(loader, builder), n_rows).enqueue()
        return builder.end_building().complete()
    finally:
        builder.close()


class KernelsOnly(Launcher):
    """Loads the kernels that a pass would launch, and launches nothing."""

    def __init__(self, loader: KernelLoader) -> None:
        self.loader = loader

    def __call__(self, name: str, grid: tuple[int, ...], block: int, *args: object, **defines: int) -> None:
        load_now(self.loader.kernel(name, **defines))
