"""Streams are asynchronous: nothing runs before its turn, events are done when reached, and waits are honoured."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from .control import Control


class Copies:
    """Two streams, a device buffer and a pinned one; values go through in order."""

    def __init__(self) -> None:
        from .helpers import Gpu

        self.gpu = Gpu()
        self.a, self.b = self.gpu.stream, self.gpu.device.create_stream()
        self.buffer = self.gpu.memory.allocate(64, stream=self.a)
        self.pinned, self.view = self.gpu.host(np.zeros(64, np.uint8))
        self.a.sync()

    def fill(self, value: int, stream: object) -> None:
        self.buffer.fill(value, stream=stream)

    def fetch(self, stream: object) -> None:
        self.buffer.copy_to(self.pinned, stream=stream)


def test_an_event_is_not_done_while_its_stream_is_held(emucuda: Control) -> None:
    c = Copies()
    with emucuda.held(c.a):
        c.fill(7, c.a)
        c.fetch(c.a)
        event = c.a.record()
        assert not event.is_done
        assert (c.view == 0).all()
    event.sync()
    assert event.is_done
    assert (c.view == 7).all()


def test_a_held_stream_stops_no_other(emucuda: Control) -> None:
    c = Copies()
    with emucuda.held(c.a):
        c.a.record()
        c.fill(5, c.b)
        c.fetch(c.b)
        c.b.sync()
        assert (c.view == 5).all()


def test_waits_between_streams(emucuda: Control) -> None:
    c = Copies()
    with emucuda.held(c.a):
        c.fill(9, c.a)
        c.b.wait(c.a.record())
        c.fetch(c.b)
        after = c.b.record()
        assert not after.is_done
    after.sync()
    assert (c.view == 9).all()


def test_steps_of_a_held_stream(emucuda: Control) -> None:
    c = Copies()
    emucuda.hold(c.a)
    first, second = (c.fill(1, c.a), c.a.record())[1], (c.fill(2, c.a), c.a.record())[1]
    emucuda.step(c.a, 2)
    first.sync()
    assert not second.is_done
    state = next(s for s in emucuda.streams() if s.id == emucuda.stream_id(c.a))
    assert (state.held, state.queued) == (True, 2)
    emucuda.release(c.a)
    second.sync()


def test_a_later_record_of_an_event_is_not_waited_for(emucuda: Control) -> None:
    c = Copies()
    event = c.a.record()
    c.b.wait(event)
    event.sync()
    emucuda.hold(c.a)
    c.a.record(event)
    c.b.sync()  # waits for the first record only
    assert not event.is_done
    emucuda.release(c.a)


def test_a_blocking_wait_ends_when_the_stream_gets_there(emucuda: Control) -> None:
    c = Copies()
    emucuda.hold(c.a)
    event = c.a.record()
    done: list[str] = []

    def wait() -> None:
        event.sync()
        done.append("waited")

    thread = threading.Thread(target=wait, name="completion")
    emucuda.set_tracing(True)
    thread.start()
    assert not event.is_done
    assert done == []
    emucuda.release(c.a)
    thread.join()
    assert done == ["waited"]
    (call,) = [call for call in emucuda.trace() if call.label == "sync.event"]
    assert call.thread == "completion"


def test_a_wait_for_a_stream_that_stays_held_is_an_error(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    c = Copies()
    emucuda.set_patience(0.05)
    emucuda.hold(c.a)
    c.a.record()
    with pytest.raises(CUDAError, match="LAUNCH_TIMEOUT"):
        c.a.sync()
    assert "is a stream held?" in emucuda.context_error()
    emucuda.reset()


def test_the_trace_names_stream_bytes_thread_and_order(emucuda: Control) -> None:
    c = Copies()
    emucuda.set_tracing(True)
    c.fill(3, c.a)
    c.b.wait(c.a.record())
    c.fetch(c.b)
    c.b.sync()
    a, b = emucuda.stream_id(c.a), emucuda.stream_id(c.b)
    labelled = [(call.label, call.stream, call.bytes) for call in emucuda.trace() if call.label]
    assert labelled == [
        ("memset", a, 64),
        ("event.record", a, 0),
        ("event.wait", b, 0),
        ("copy.d2h", b, 64),
        ("sync.stream", b, 0),
    ]
    assert {call.thread for call in emucuda.trace()} == {threading.current_thread().name}


def test_delays_make_operations_take_time(emucuda: Control) -> None:
    from cuda.core import EventOptions

    c = Copies()
    options = EventOptions(timing_enabled=True)
    start, end = c.gpu.device.create_event(options), c.gpu.device.create_event(options)
    emucuda.delay("memset", 0.02)
    c.a.record(start)
    c.fill(1, c.a)
    c.a.record(end)
    end.sync()
    assert end - start >= 20


def test_the_legacy_stream_waits_for_blocking_streams(emucuda: Control) -> None:
    from cuda.bindings import driver

    c = Copies()
    _, blocking = driver.cuStreamCreate(0)
    _, event = driver.cuEventCreate(0)
    emucuda.hold(int(blocking))
    driver.cuMemsetD8Async(c.buffer.handle, 4, 64, blocking)
    driver.cuMemcpyDtoHAsync(int(c.pinned.handle), c.buffer.handle, 64, 0)
    driver.cuEventRecord(event, 0)
    assert driver.cuEventQuery(event)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
    emucuda.release(int(blocking))
    driver.cuEventSynchronize(event)
    assert (c.view == 4).all()
    driver.cuStreamDestroy(blocking)


def test_a_destroyed_stream_runs_out(emucuda: Control) -> None:
    c = Copies()
    before = emucuda.live().streams
    stream = c.gpu.device.create_stream()
    stream_id = emucuda.stream_id(stream)
    emucuda.hold(stream)
    c.fill(6, stream)
    c.fetch(stream)
    event = stream.record()
    stream.close()
    assert emucuda.live().streams == before
    emucuda.release(stream_id)
    event.sync()
    assert (c.view == 6).all()


def test_host_functions_run_in_order(emucuda: Control) -> None:
    import ctypes

    from cuda.bindings import driver

    c = Copies()
    seen: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(int(c.view[0])))
    function = driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
    for value in (1, 2):
        c.fill(value, c.a)
        c.fetch(c.a)
        driver.cuLaunchHostFunc(c.a.handle, function, 0)
    c.a.sync()
    assert seen == [1, 2]


# ---- memory ---------------------------------------------------------------------------------------------------------
def test_fresh_memory_is_poisoned(emucuda: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    buffer = gpu.memory.allocate(64, stream=gpu.stream)
    like = np.zeros(16, np.float32)
    assert np.isnan(gpu.download(buffer, like)).all()
    assert np.isnan(gpu.download(buffer, np.zeros(32, np.float16))).all()


def test_live_allocations_and_bytes(emucuda: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    before = emucuda.live()
    device, pinned = gpu.memory.allocate(1000, stream=gpu.stream), gpu.pinned.allocate(500)
    event = gpu.stream.record()
    live = emucuda.live()
    assert live.device_allocations == before.device_allocations + 1
    assert live.device_bytes == before.device_bytes + 1000
    assert live.pinned_allocations == before.pinned_allocations + 1
    assert live.events == before.events + 1
    device.close(gpu.stream)
    pinned.close()
    event.close()
    gpu.stream.sync()
    after = emucuda.live()
    assert (after.device_allocations, after.pinned_allocations, after.events) == (
        before.device_allocations,
        before.pinned_allocations,
        before.events,
    )


def test_memory_is_freed_in_stream_order(emucuda: Control) -> None:
    c = Copies()
    count = emucuda.live().device_allocations
    with emucuda.held(c.a):
        c.buffer.close(c.a)
        assert emucuda.live().device_allocations == count
    c.a.sync()
    assert emucuda.live().device_allocations == count - 1


def test_a_copy_that_leaves_its_allocation_is_refused(emucuda: Control) -> None:
    from cuda.bindings import driver

    c = Copies()
    (status,) = driver.cuMemcpyDtoHAsync(int(c.pinned.handle), int(c.buffer.handle) + 8, 64, c.a.handle)
    assert status == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert "copy.d2h of 64 bytes leaves its allocation" in emucuda.last_error()


def test_pageable_copies_are_counted(emucuda: Control) -> None:
    from cuda.bindings import driver

    c = Copies()
    array = np.full(64, 3, np.uint8)
    emucuda.forget_counts()
    driver.cuMemcpyHtoDAsync(c.buffer.handle, array.ctypes.data, 64, c.a.handle)
    driver.cuMemcpyDtoHAsync(array.ctypes.data, c.buffer.handle, 64, c.a.handle)
    counts = emucuda.counts()
    assert (counts["copy.h2d"], counts["copy.d2h"], counts["copy.pageable"], counts["sync.implicit"]) == (1, 1, 2, 1)


@pytest.mark.parametrize(("width", "name"), [(1, "cuMemsetD8Async"), (2, "cuMemsetD16Async"), (4, "cuMemsetD32Async")])
def test_fills_of_every_width(emucuda: Control, width: int, name: str) -> None:
    c = Copies()
    pattern = bytes(range(1, width + 1))
    c.buffer.fill(pattern, stream=c.a)
    c.fetch(c.a)
    c.a.sync()
    assert c.view.tobytes() == pattern * (64 // width)
    assert emucuda.counts()[name] == 1


def test_memory_info_and_pointer_attributes(emucuda: Control) -> None:
    from cuda.bindings import driver

    from .helpers import Gpu

    gpu = Gpu()
    emucuda.set_memory(1 << 30)
    _, before, total = driver.cuMemGetInfo()
    buffer = gpu.memory.allocate(1 << 20, stream=gpu.stream)
    _, after, _ = driver.cuMemGetInfo()
    assert (total, before - after) == (1 << 30, 1 << 20)
    assert buffer.is_device_accessible
    assert not buffer.is_host_accessible
    assert gpu.pinned.allocate(4).is_host_accessible
