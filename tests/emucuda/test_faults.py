"""Faults on demand: the nth call or the nth operation fails, and what fails then."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import driver

from .control import ILLEGAL_ADDRESS, OUT_OF_MEMORY, Control

PLUS = 'extern "C" __global__ void plus(float* x) { x[threadIdx.x] += 1; }'


def test_the_nth_call_of_an_entry_point_fails(emucuda: Control) -> None:
    from .helpers import Gpu

    Gpu()
    emucuda.fail_call("cuMemAlloc", 2)
    results = [driver.cuMemAlloc(64) for _ in range(3)]
    assert [int(status) for status, _ in results] == [0, OUT_OF_MEMORY, 0]
    for status, address in results:
        if status == 0:
            driver.cuMemFree(address)


@pytest.mark.parametrize("pattern", ["alloc", "alloc.device_pool", "cuMemAllocFromPoolAsync"])
def test_an_allocation_fails_by_label_or_name(emucuda: Control, pattern: str) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    live = emucuda.live()
    emucuda.fail_call(pattern, 1)
    with pytest.raises(CUDAError, match="OUT_OF_MEMORY"):
        gpu.memory.allocate(64, stream=gpu.stream)
    assert emucuda.live() == live
    gpu.memory.allocate(64, stream=gpu.stream)


def test_copies_fail_by_direction(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    x = np.ones(8, np.float32)
    emucuda.fail_call("copy.d2h", 1, ILLEGAL_ADDRESS)
    buffer = gpu.upload(x)  # the other way is not touched
    with pytest.raises(CUDAError, match="ILLEGAL_ADDRESS"):
        gpu.download(buffer, x)
    assert (gpu.download(buffer, x) == 1).all()  # a refused call breaks nothing


def test_the_device_runs_out_of_memory(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    emucuda.set_memory(emucuda.live().device_bytes + 1000)
    kept = gpu.memory.allocate(600, stream=gpu.stream)
    with pytest.raises(CUDAError, match="OUT_OF_MEMORY"):
        gpu.memory.allocate(600, stream=gpu.stream)
    assert emucuda.last_error() == "600 bytes asked for, 400 free"
    kept.close(gpu.stream)
    gpu.stream.sync()
    gpu.memory.allocate(600, stream=gpu.stream)


@pytest.mark.parametrize("pattern", ["kernel:plus", "copy.d2h"])
def test_an_operation_that_fails_breaks_the_context(emucuda: Control, pattern: str) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    x = np.ones(8, np.float32)
    kernel, buffer = gpu.kernel(PLUS, "plus"), gpu.upload(x)
    pinned, view = gpu.host(x)
    emucuda.fail_run(pattern, 1)
    with emucuda.held(gpu.stream):
        gpu.launch(kernel, 1, 8, buffer)
        buffer.copy_to(pinned, stream=gpu.stream)
        event = gpu.stream.record()
    with pytest.raises(CUDAError, match="LAUNCH_FAILED"):
        event.sync()
    with pytest.raises(CUDAError, match="LAUNCH_FAILED"):
        gpu.memory.allocate(64, stream=gpu.stream)  # and so does everything after it
    assert (view == 1).all()
    assert emucuda.context_error() == f"{pattern} made to fail by a test"
    allocations = emucuda.live().device_allocations
    buffer.close(gpu.stream)  # releasing works, so that leaks show
    emucuda.settle()
    assert emucuda.live().device_allocations == allocations - 1
    emucuda.reset()
    gpu.stream.sync()


def test_a_launch_that_fails_at_once_runs_nothing(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    x = np.ones(8, np.float32)
    kernel, buffer = gpu.kernel(PLUS, "plus"), gpu.upload(x)
    emucuda.fail_call("kernel", 1, 701)
    with pytest.raises(CUDAError, match="LAUNCH_OUT_OF_RESOURCES"):
        gpu.launch(kernel, 1, 8, buffer)
    gpu.launch(kernel, 1, 8, buffer)
    assert (gpu.download(buffer, x) == 2).all()


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [((1, 65536, 1), 32, 0), (1, 1025, 0), (1, 64, 0), (1, 32, 60000)],
    ids=["grid y", "block", "launch bounds", "shared memory"],
)
def test_launch_limits(emucuda: Control, grid: object, block: int, shared: int) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    kernel = gpu.kernel('extern "C" __global__ void __launch_bounds__(32) k(float* x) { x[threadIdx.x] += 1; }')
    with pytest.raises((CUDAError, ValueError)):
        gpu.launch(kernel, grid, block, gpu.upload(np.ones(8, np.float32)), shared=shared)


def test_dynamic_shared_memory_up_to_the_opt_in(emucuda_checked: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    kernel = gpu.kernel(
        'extern "C" __global__ void k(int* y) { extern __shared__ int s[]; __shared__ int t[4]; int i = threadIdx.x;'
        " t[i] = 1; s[i * 4000] = i; __syncwarp(); y[i] = s[i * 4000] + t[3]; }"
    )
    y = gpu.upload(np.zeros(4, np.int32))
    (status,) = driver.cuKernelSetAttribute(
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 150000, kernel.handle, 0
    )
    assert status == 0
    gpu.launch(kernel, 1, 4, y, shared=150000)
    assert gpu.download(y, np.zeros(4, np.int32)).tolist() == [1, 2, 3, 4]


def test_a_stub_names_itself(emucuda: Control, capfd: pytest.CaptureFixture[str]) -> None:
    from .helpers import Gpu

    Gpu()
    (status, *_) = driver.cuMemAllocManaged(64, 1)
    assert status == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    assert "cuMemAllocManaged is not implemented" in capfd.readouterr().err
    assert emucuda.counts()["unimplemented:cuMemAllocManaged"] == 1


def test_a_cubin_that_nobody_registered(emucuda: Control) -> None:
    from cuda.core import ObjectCode, Program, ProgramOptions
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    Gpu()
    foreign = Program(PLUS, "c++", ProgramOptions(name="p.cu", arch="sm_90")).compile("cubin").code
    with pytest.raises(CUDAError, match="NO_BINARY_FOR_GPU"):
        ObjectCode.from_cubin(foreign).get_kernel("plus")
    assert "no PTX is registered" in emucuda.last_error()


def test_ptx_runs_without_registration(emucuda: Control) -> None:
    from cuda.core import Program, ProgramOptions

    from .helpers import Gpu

    gpu = Gpu()
    ptx = Program(PLUS, "c++", ProgramOptions(name="p.cu", arch="sm_80")).compile("ptx")
    x = gpu.upload(np.ones(8, np.float32))
    gpu.launch(ptx.get_kernel("plus"), 1, 8, x)
    assert (gpu.download(x, np.ones(8, np.float32)) == 2).all()


def test_a_missing_kernel(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    with pytest.raises(CUDAError, match="NOT_FOUND"):
        Gpu().kernel(PLUS, "minus")
    assert emucuda.last_error() == "no entry minus in this module; it has plus"
