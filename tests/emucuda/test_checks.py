"""Every check fires on a kernel that is wrong in its way, at the right line, and is silent on the right one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from .control import Control, Finding


def run(control: Control, source: str, *arrays: np.ndarray, order: int = 0, block: int = 64) -> list[Finding]:
    """What the checks found in one launch of k."""
    from .helpers import Gpu

    control.set_thread_order(order)
    Gpu().run(source, *arrays, block=block)
    return control.take_findings()


class Case(NamedTuple):
    kind: str
    wrong: str
    """The kernel's body; its line that should be named ends with '// here'."""
    right: str


HEAD = """extern "C" __global__ void k(const float* x, float* y) {
__shared__ __align__(16) float s[64]; int t = threadIdx.x;
"""
COPY_IN = """
unsigned d = (unsigned)__cvta_generic_to_shared(&s[t * 4]);
if (t < 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.commit_group;" :: "r"(d), "l"(x + t * 4));
"""
CASES = {
    "a missing __syncthreads": Case(
        "shared-race",
        "s[t] = x[t];\ny[t] = s[63 - t]; // here",
        "s[t] = x[t];\n__syncthreads(); y[t] = s[63 - t];",
    ),
    "a missing __syncthreads before the next write": Case(
        "shared-race",
        "s[t] = x[t]; __syncthreads(); y[t] = s[63 - t];\ns[t] = 1; // here",
        "s[t] = x[t]; __syncthreads(); y[t] = s[63 - t]; __syncthreads();\ns[t] = 1;",
    ),
    "a missing __syncwarp": Case(
        "shared-race",
        "s[t] = x[t];\ny[t] = s[t ^ 1]; // here",
        "s[t] = x[t];\n__syncwarp(); y[t] = s[t ^ 1];",
    ),
    "a shuffle is no barrier": Case(
        "shared-race",
        "s[t] = x[t]; float v = __shfl_xor_sync(~0u, x[t], 1);\ny[t] = v + s[t ^ 1]; // here",
        "s[t] = x[t]; float v = __shfl_xor_sync(~0u, x[t], 1); __syncwarp();\ny[t] = v + s[t ^ 1];",
    ),
    "all threads write one place": Case(
        "shared-race",
        "s[0] = x[t]; // here\n__syncthreads(); y[t] = s[0];",
        "if (t == 0) s[0] = x[t];\n__syncthreads(); y[t] = s[0];",
    ),
    "a plain read beside atomics": Case(
        "shared-race",
        "s[t] = 0; __syncthreads(); atomicAdd(&s[0], 1.f); // here\ny[t] = s[0];",
        "s[t] = 0; __syncthreads(); atomicAdd(&s[0], 1.f); __syncthreads();\ny[t] = s[0];",
    ),
    "a read of shared memory that nobody wrote": Case(
        "uninitialised",
        "if (t) s[t] = x[t]; __syncthreads();\ny[t] = s[t]; // here",
        "s[t] = x[t]; __syncthreads();\ny[t] = s[t];",
    ),
    "a missing wait for cp.async": Case(
        "cp-async-unwaited",
        COPY_IN + "__syncthreads();\ny[t] = s[t]; // here",
        COPY_IN + 'asm volatile("cp.async.wait_group 0;"); __syncthreads();\ny[t] = s[t];',
    ),
    "a wait for too few groups": Case(
        "cp-async-unwaited",
        COPY_IN + 'asm volatile("cp.async.wait_group 1;"); __syncthreads();\ny[t] = s[t]; // here',
        COPY_IN + 'asm volatile("cp.async.commit_group; cp.async.wait_group 1;"); __syncthreads();\ny[t] = s[t];',
    ),
    "a barrier is missing after the wait": Case(
        "shared-race",
        COPY_IN + 'asm volatile("cp.async.wait_group 0;");\ny[t] = s[63 - t]; // here',
        COPY_IN + 'asm volatile("cp.async.wait_group 0;"); __syncthreads();\ny[t] = s[63 - t];',
    ),
    "a shuffle reads a lane that does not take part": Case(
        "shuffle-lane",
        "if ((t & 31) < 8)\ny[t] = __shfl_xor_sync(0xffu, x[t], 8); // here",
        "if ((t & 31) < 8)\ny[t] = __shfl_xor_sync(0xffu, x[t], 4);",
    ),
    "lanes of the mask leave instead": Case(
        "missing-lane",
        "if ((t & 31) < 16)\ny[t] = __shfl_xor_sync(~0u, x[t], 1); // here",
        "if ((t & 31) < 16)\ny[t] = __shfl_xor_sync(0xffffu, x[t], 1);",
    ),
}


def line_of(source: str) -> str:
    at = next(i for i, text in enumerate(source.splitlines(), 1) if text.endswith("// here"))
    return f"test.cu:{at}"


@pytest.mark.parametrize("order", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_wrong_and_right(emucuda_checked: Control, name: str, order: int) -> None:
    case = CASES[name]
    x = np.arange(64, dtype=np.float32)
    wrong = HEAD + case.wrong + "\n}"
    found = run(emucuda_checked, wrong, x, x, order=order)
    assert (case.kind, line_of(wrong)) in {(f.kind, f.where) for f in found}
    assert run(emucuda_checked, HEAD + case.right + "\n}", x, x, order=order) == []


# ---- what ends the kernel -------------------------------------------------------------------------------------------
FATAL = {
    "a read past the end": ("y[t] = x[t + 1]; // here", "out of bounds: 4-byte read"),
    "a write before the start": ("y[t - 1] = x[t]; // here", "out of bounds: 4-byte write"),
    "a vector that runs over the end": (
        "((float4*)y)[t / 4 + (t == 63)] = make_float4(1, 2, 3, 4); // here",
        "out of bounds",
    ),
    "a misaligned vector": ("((float2*)(y + 1))[t / 4] = make_float2(1, 2); // here", "misaligned"),
    "shared memory past its end": (
        "s[t + 1] = x[t]; // here\n__syncthreads(); y[t] = s[t];",
        "out of bounds: shared memory",
    ),
    "a null pointer": ("y = (float*)(size_t)x[0];\ny[t] = x[t]; // here", "out of bounds: 4-byte write"),
    "an atomic past the end": ("atomicAdd(&y[t + 1], 1.f); // here", "out of bounds: 4-byte atomic update"),
}


def expect_failure(control: Control, source: str, error: str) -> str:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    x = np.arange(64, dtype=np.float32)
    a, b = gpu.upload(x), gpu.upload(x)
    gpu.launch(gpu.kernel(source), 1, 64, a, b)
    with pytest.raises(CUDAError, match=error):
        gpu.stream.sync()
    text = control.context_error()
    control.reset()
    return text


@pytest.mark.parametrize("name", FATAL)
def test_fatal(emucuda_checked: Control, name: str) -> None:
    body, message = FATAL[name]
    source = HEAD + body + "\n}"
    text = expect_failure(emucuda_checked, source, "ILLEGAL_ADDRESS|MISALIGNED_ADDRESS")
    assert text.startswith(line_of(source))
    assert message in text
    assert "kernel:k, block (0,0,0) thread (" in text


def test_misaligned_vectors_fail_without_checks(emucuda: Control) -> None:
    source = HEAD + FATAL["a misaligned vector"][0] + "\n}"
    assert expect_failure(emucuda, source, "MISALIGNED_ADDRESS").startswith(line_of(source))


def test_a_wild_access_without_checks_is_caught_by_its_page(emucuda: Control) -> None:
    text = expect_failure(emucuda, HEAD + "y[t + 100000] = x[t];\n}", "ILLEGAL_ADDRESS")
    assert "unmapped address" in text


def test_deadlock_says_who_waits_where(emucuda: Control) -> None:
    source = HEAD + 'if (t < 32)\n__syncthreads();\nelse\nasm volatile("bar.sync 1, 64;"); y[t] = x[t];\n}'
    text = expect_failure(emucuda, source, "LAUNCH_FAILED")
    assert "deadlock" in text
    assert "thread (0,0,0) waits at test.cu:4 for a barrier" in text
    assert "thread (32,0,0) waits at test.cu:6 for a barrier" in text


def test_lanes_that_meet_in_different_operations(emucuda: Control) -> None:
    source = HEAD + "if (t & 1)\ny[t] = __shfl_sync(~0u, x[t], 0);\nelse\ny[t] = __any_sync(~0u, t);\n}"
    text = expect_failure(emucuda, source, "LAUNCH_FAILED")
    assert "different operations" in text


# ---- global memory --------------------------------------------------------------------------------------------------
def test_reads_of_memory_that_nobody_wrote(emucuda_checked: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    kernel = gpu.kernel(HEAD + "y[t] = x[t];\n}")
    x, y = (gpu.memory.allocate(256, stream=gpu.stream) for _ in range(2))
    gpu.launch(kernel, 1, 64, x, y)
    assert np.isnan(gpu.download(y, np.zeros(64, np.float32))).all()  # poisoned
    (found,) = emucuda_checked.take_findings()
    assert (found.kind, found.where, found.count) == ("uninitialised", "test.cu:3", 64)
    x.fill(0, stream=gpu.stream)
    gpu.launch(kernel, 1, 64, x, y)
    gpu.stream.sync()
    assert emucuda_checked.take_findings() == []


def test_copies_carry_along_what_was_written(emucuda_checked: Control) -> None:
    from cuda.core import Buffer

    from .helpers import Gpu

    gpu = Gpu()
    x, z, y = (gpu.memory.allocate(256, stream=gpu.stream) for _ in range(3))
    Buffer.from_handle(int(x.handle), 128).fill(0, stream=gpu.stream)
    z.copy_from(x, stream=gpu.stream)
    gpu.launch(gpu.kernel(HEAD + "y[t] = x[t];\n}"), 1, 64, z, y)
    gpu.stream.sync()
    (found,) = emucuda_checked.take_findings()
    assert (found.kind, found.count) == ("uninitialised", 32)


def test_use_after_free(emucuda_checked: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    x = np.zeros(64, np.float32)
    a, b = gpu.upload(x), gpu.upload(x)
    address = np.uint64(int(a.handle))
    a.close(gpu.stream)
    gpu.launch(gpu.kernel(HEAD + "y[t] = x[t]; // here\n}"), 1, 64, int(address), b)
    with pytest.raises(CUDAError, match="ILLEGAL_ADDRESS"):
        gpu.stream.sync()
    assert "test.cu:3: out of bounds" in emucuda_checked.context_error()
    emucuda_checked.reset()


# ---- races between streams ------------------------------------------------------------------------------------------
TOUCH = """
extern "C" __global__ void put(float* p, int from) { p[from + threadIdx.x] = 1; }
extern "C" __global__ void get(const float* p, int from, float* out) { out[threadIdx.x] = p[from + threadIdx.x]; }
extern "C" __global__ void add(float* p, int from) { atomicAdd(&p[from + threadIdx.x], 1.f); }
"""


class TwoStreams:
    def __init__(self) -> None:
        from .helpers import Gpu

        self.gpu = gpu = Gpu()
        self.other = gpu.device.create_stream()
        self.kernels = gpu.compile(TOUCH)
        self.pool = gpu.memory.allocate(4096, stream=gpu.stream)
        self.pool.fill(0, stream=gpu.stream)
        self.out = gpu.memory.allocate(256, stream=gpu.stream)
        self.other.wait(gpu.stream)

    def put(self, stream: object, start: int) -> None:
        self.gpu.launch(self.kernels.get_kernel("put"), 1, 64, self.pool, np.int32(start), stream=stream)

    def add(self, stream: object, start: int) -> None:
        self.gpu.launch(self.kernels.get_kernel("add"), 1, 64, self.pool, np.int32(start), stream=stream)

    def get(self, stream: object, start: int) -> None:
        self.gpu.launch(self.kernels.get_kernel("get"), 1, 64, self.pool, np.int32(start), self.out, stream=stream)

    def findings(self, control: Control) -> list[Finding]:
        control.settle()
        found = control.take_findings()
        self.gpu.stream.wait(self.other)  # memory is freed there
        return found


def test_overlapping_writes_and_reads_race(emucuda_checked: Control) -> None:
    two = TwoStreams()
    two.put(two.gpu.stream, 0)
    two.get(two.other, 32)
    (found,) = two.findings(emucuda_checked)
    assert found.kind == "stream-race"
    assert {"kernel:get", "kernel:put"} <= set(found.message.replace("(", " ").split())


def test_disjoint_ranges_of_one_pool_do_not(emucuda_checked: Control) -> None:
    two = TwoStreams()
    two.put(two.gpu.stream, 0)
    two.get(two.other, 64)
    assert two.findings(emucuda_checked) == []


def test_reads_do_not_race_with_reads_nor_atomics_with_atomics(emucuda_checked: Control) -> None:
    two = TwoStreams()
    two.get(two.gpu.stream, 0)
    two.gpu.stream.sync()  # both write `out`
    two.get(two.other, 0)
    two.gpu.stream.wait(two.other)
    two.add(two.gpu.stream, 0)
    two.other.wait(two.gpu.stream)
    two.add(two.gpu.stream, 64)
    two.add(two.other, 64)
    assert two.findings(emucuda_checked) == []


@pytest.mark.parametrize("edge", ["event", "host"])
def test_an_event_or_the_host_puts_them_in_order(emucuda_checked: Control, edge: str) -> None:
    two = TwoStreams()
    two.put(two.gpu.stream, 0)
    if edge == "event":
        two.other.wait(two.gpu.stream.record())
    else:
        two.gpu.stream.sync()
    two.get(two.other, 0)
    assert two.findings(emucuda_checked) == []


def test_an_event_recorded_too_early_does_not(emucuda_checked: Control) -> None:
    two = TwoStreams()
    early = two.gpu.stream.record()
    two.put(two.gpu.stream, 0)
    two.other.wait(early)
    two.get(two.other, 0)
    assert [f.kind for f in two.findings(emucuda_checked)] == ["stream-race"]


def test_a_write_must_follow_every_reader(emucuda_checked: Control) -> None:
    two = TwoStreams()
    third = two.gpu.device.create_stream()
    two.get(two.other, 0)
    third.wait(two.other)  # both write `out`
    two.pool.copy_to(two.gpu.host(np.zeros(1024, np.float32))[0], stream=third)
    two.gpu.stream.wait(third)
    two.put(two.gpu.stream, 0)  # after both
    assert two.findings(emucuda_checked) == []
    two.get(two.other, 0)
    emucuda_checked.settle()
    two.gpu.stream.wait(third)
    two.put(two.gpu.stream, 0)  # after the one, not after the other
    assert {f.kind for f in two.findings(emucuda_checked)} == {"stream-race"}


def test_memory_is_not_there_for_another_stream_before_its_allocation(emucuda_checked: Control) -> None:
    two = TwoStreams()
    fresh = two.gpu.memory.allocate(256, stream=two.gpu.stream)
    fresh.fill(0, stream=two.other)
    assert [f.kind for f in two.findings(emucuda_checked)] == ["stream-race"]


def test_copies_take_part_in_races(emucuda_checked: Control) -> None:
    two = TwoStreams()
    pinned, _ = two.gpu.host(np.zeros(1024, np.float32))
    two.put(two.gpu.stream, 0)
    two.pool.copy_to(pinned, stream=two.other)
    (found,) = two.findings(emucuda_checked)
    assert found.kind == "stream-race"


def test_the_host_races_with_a_copy_that_it_did_not_wait_for(emucuda_checked: Control) -> None:
    two = TwoStreams()
    pinned, _ = two.gpu.host(np.zeros(1024, np.float32))
    with emucuda_checked.held(two.other):
        two.pool.copy_to(pinned, stream=two.other)
    emucuda_checked.settle()
    emucuda_checked.host_reads(int(pinned.handle), 4096)
    assert [f.operation for f in emucuda_checked.take_findings()] == ["the host"]
    two.pool.copy_to(pinned, stream=two.other)
    two.other.sync()
    emucuda_checked.host_reads(int(pinned.handle), 4096)
    assert two.findings(emucuda_checked) == []
