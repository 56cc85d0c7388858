"""Stream capture and graphs: a replay does what the calls did."""

from __future__ import annotations

import numpy as np
import pytest

from .control import Control

STEPS = """
extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }
extern "C" __global__ void plus(float* x, float v) { x[threadIdx.x] += v; }
"""


class Work:
    def __init__(self) -> None:
        from .helpers import Gpu

        self.gpu = Gpu()
        module = self.gpu.compile(STEPS)
        self.twice, self.plus = module.get_kernel("twice"), module.get_kernel("plus")
        self.x = self.gpu.upload(np.ones(8, np.float32))

    def enqueue(self, stream: object, value: float = 3) -> None:
        self.gpu.launch(self.twice, 1, 8, self.x, stream=stream)
        self.gpu.launch(self.plus, 1, 8, self.x, np.float32(value), stream=stream)

    def values(self) -> float:
        found = self.gpu.download(self.x, np.zeros(8, np.float32))
        assert (found == found[0]).all()
        return float(found[0])

    def capture(self, value: float = 3) -> object:
        builder = self.gpu.stream.create_graph_builder().begin_building()
        self.enqueue(builder, value)
        return builder.end_building()


def test_replay_equals_the_calls(emucuda: Control) -> None:
    work = Work()
    graph = work.capture().complete()
    assert work.values() == 1  # capture runs nothing
    graph.upload(work.gpu.stream)
    emucuda.forget_counts()
    for _ in range(3):
        graph.launch(work.gpu.stream)
    assert work.values() == ((1 * 2 + 3) * 2 + 3) * 2 + 3
    counts = emucuda.counts()
    assert (counts["graph.launch"], counts["graph:kernel:twice"], counts["kernel:twice"]) == (3, 3, 0)


def test_graphs_take_their_arguments_at_capture(emucuda: Control) -> None:
    work = Work()
    value = np.float32(3)
    builder = work.gpu.stream.create_graph_builder().begin_building()
    work.gpu.launch(work.plus, 1, 8, work.x, value, stream=builder)
    value += 100
    builder.end_building().complete().launch(work.gpu.stream)
    assert work.values() == 4


def test_update_replaces_arguments_and_refuses_another_shape(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    work = Work()
    graph = work.capture(3).complete()
    graph.update(work.capture(10))
    graph.launch(work.gpu.stream)
    assert work.values() == 12
    other = work.gpu.stream.create_graph_builder().begin_building()
    work.gpu.launch(work.twice, 1, 8, work.x, stream=other)
    with pytest.raises(CUDAError):
        graph.update(other.end_building())


def test_copies_and_fills_are_nodes(emucuda: Control) -> None:
    work = Work()
    pinned, view = work.gpu.host(np.zeros(8, np.float32))
    builder = work.gpu.stream.create_graph_builder().begin_building()
    work.x.fill(np.float32(5).tobytes(), stream=builder)
    work.enqueue(builder)
    work.x.copy_to(pinned, stream=builder)
    graph = builder.end_building().complete()
    assert (view == 0).all()
    graph.launch(work.gpu.stream)
    work.gpu.stream.sync()
    assert (view == 13).all()


def test_fork_and_join(emucuda: Control) -> None:
    work = Work()
    y = work.gpu.upload(np.zeros(8, np.float32))
    left = work.gpu.stream.create_graph_builder().begin_building()
    work.gpu.launch(work.twice, 1, 8, work.x, stream=left)
    left, right = left.split(2)
    work.gpu.launch(work.plus, 1, 8, work.x, np.float32(1), stream=left)
    work.gpu.launch(work.plus, 1, 8, y, np.float32(4), stream=right)
    builder = type(left).join(left, right)
    builder.end_building().complete().launch(work.gpu.stream)
    assert work.values() == 3
    assert work.gpu.download(y, np.zeros(8, np.float32))[0] == 4


@pytest.mark.parametrize("call", ["sync", "query", "allocate", "pageable"])
def test_what_a_capture_forbids(emucuda: Control, call: str) -> None:
    from cuda.bindings import driver

    work = Work()
    stream = work.gpu.stream.handle
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert driver.cuStreamBeginCapture(stream, mode)[0] == 0
    array = np.zeros(8, np.float32)
    status = {
        "sync": lambda: driver.cuStreamSynchronize(stream)[0],
        "query": lambda: driver.cuStreamQuery(stream)[0],
        "allocate": lambda: driver.cuMemAlloc(64)[0],
        "pageable": lambda: driver.cuMemcpyHtoDAsync(work.x.handle, array.ctypes.data, 32, stream)[0],
    }[call]()
    assert status == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    ended = driver.cuStreamEndCapture(stream)[0]
    invalidated = call in ("sync", "query")
    assert ended == (driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if invalidated else 0)
    assert driver.cuStreamSynchronize(stream)[0] == 0


def test_an_unjoined_fork_is_an_error(emucuda: Control) -> None:
    from cuda.bindings import driver

    work = Work()
    other = work.gpu.device.create_stream()
    stream, mode = work.gpu.stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.cuStreamBeginCapture(stream, mode)
    _, event = driver.cuEventCreate(0)
    driver.cuEventRecord(event, stream)
    driver.cuStreamWaitEvent(other.handle, event, 0)
    work.gpu.launch(work.twice, 1, 8, work.x, stream=other)
    assert driver.cuStreamEndCapture(stream)[0] == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    assert work.values() == 1


def test_graphs_are_freed_with_what_they_hold(emucuda: Control) -> None:
    work = Work()
    before = emucuda.live().graphs
    builder = work.capture()
    graph = builder.complete()
    assert emucuda.live().graphs > before
    graph.close()
    builder.close()
    assert emucuda.live().graphs == before
