"""Shuffles, votes, matches, reductions and barriers."""

from __future__ import annotations

import numpy as np
import pytest

from .control import Control

LANES = np.arange(32)


def run(source: str, *arrays: np.ndarray, **settings: object) -> list[np.ndarray]:
    from .helpers import Gpu

    return Gpu().run(source, *arrays, **settings)  # type: ignore[arg-type]


SHUFFLES = r"""
extern "C" __global__ void k(int* y) {
    int t = threadIdx.x, v = t * 3;
    y[t] = __shfl_sync(~0u, v, 5); y[32 + t] = __shfl_sync(~0u, v, t + 9, 8); y[64 + t] = __shfl_up_sync(~0u, v, 3);
    y[96 + t] = __shfl_down_sync(~0u, v, 4, 16); y[128 + t] = __shfl_xor_sync(~0u, v, 10);
    y[160 + t] = (int)(__shfl_xor_sync(~0u, (unsigned long long)v << 32, 1) >> 32);
    y[192 + t] = t < 8 ? __shfl_sync(0xffu, v, 7 - t) : __shfl_sync(~0xffu, v, 39 - t);
    int p;
    asm volatile("{ .reg .pred q; shfl.sync.up.b32 %0|q, %1, 2, 0, -1;"
                 " selp.b32 %0, %0, -1, q; }" : "=r"(p) : "r"(v));
    y[224 + t] = p;
}"""


def test_shuffles(emucuda_checked: Control) -> None:
    y = run(SHUFFLES, np.zeros((8, 32), np.int32))[0]
    segment = LANES // 8 * 8
    expected = [
        np.full(32, 5),
        segment + (LANES + 9) % 8,
        np.where(LANES >= 3, LANES - 3, LANES),
        np.where(LANES % 16 + 4 < 16, LANES + 4, LANES),
        LANES ^ 10,
        LANES ^ 1,
        np.where(LANES < 8, 7 - LANES, 39 - LANES),
    ]
    for row, source in enumerate(expected):
        assert np.array_equal(y[row], source * 3), row
    assert np.array_equal(y[7], np.where(LANES >= 2, (LANES - 2) * 3, -1))


VOTES = r"""
extern "C" __global__ void k(unsigned* y) {
    int t = threadIdx.x; unsigned half = t < 16 ? 0xffffu : 0xffff0000u;
    y[t] = __ballot_sync(half, t % 3 == 0); y[32 + t] = __all_sync(~0u, t < 32); y[64 + t] = __all_sync(~0u, t < 31);
    y[96 + t] = __any_sync(half, t == 20); y[128 + t] = __match_any_sync(~0u, t % 5);
    int all; y[160 + t] = __match_all_sync(half, t / 16, &all); y[192 + t] = all;
    y[224 + t] = __match_all_sync(~0u, t / 16, &all); y[256 + t] = all; y[288 + t] = __activemask() >> t & 1;
}"""


def test_votes_and_matches(emucuda_checked: Control) -> None:
    y = run(VOTES, np.zeros((10, 32), np.uint32))[0]
    ballot = sum(1 << i for i in range(0, 32, 3))
    assert np.array_equal(y[0], np.where(LANES < 16, ballot & 0xFFFF, ballot & 0xFFFF0000))
    assert (y[1] == 1).all()
    assert (y[2] == 0).all()
    assert np.array_equal(y[3], LANES >= 16)
    assert y[4].tolist() == [sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)]
    assert np.array_equal(y[5], np.where(LANES < 16, 0xFFFF, 0xFFFF0000))
    assert (y[6] == 1).all()
    assert (y[7] == 0).all()
    assert (y[8] == 0).all()
    assert (y[9] == 1).all()


REDUX = r"""
extern "C" __global__ void k(const int* x, int* y) {
    int t = threadIdx.x, v = x[t]; unsigned u = v;
    y[t] = __reduce_add_sync(~0u, v); y[32 + t] = __reduce_min_sync(~0u, v); y[64 + t] = __reduce_max_sync(~0u, v);
    y[96 + t] = __reduce_min_sync(~0u, u); y[128 + t] = __reduce_max_sync(~0u, u);
    y[160 + t] = __reduce_and_sync(~0u, u);
    y[192 + t] = __reduce_or_sync(~0u, u); y[224 + t] = __reduce_xor_sync(~0u, u);
}"""


def test_reductions(emucuda_checked: Control) -> None:
    x = np.random.default_rng(3).integers(-(1 << 31), 1 << 31, 32).astype(np.int32)
    y = run(REDUX, x, np.zeros((8, 32), np.int32))[1]
    u = x.view(np.uint32)
    reduce = [np.add, np.minimum, np.maximum, np.minimum, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor]
    for row, function in enumerate(reduce):
        source = x if row < 3 else u
        assert (y[row].view(source.dtype) == function.reduce(source, dtype=source.dtype)).all(), row


BARRIERS = r"""
extern "C" __global__ void k(int* y) {
    __shared__ int s[96]; int t = threadIdx.x;
    y[t] = __syncthreads_count(t % 3 == 0); y[96 + t] = __syncthreads_and(t < 96);
    y[192 + t] = __syncthreads_or(t == 95);
    s[t] = t;
    if (t < 64) { asm volatile("bar.sync 1, 64;" ::: "memory"); y[288 + t] = s[63 - t]; }
    else { asm volatile("barrier.sync 2, 32;" ::: "memory"); y[288 + t] = s[159 - t]; }
    __syncthreads(); s[t] = t * 2;
    if (t < 32) asm volatile("bar.arrive 3, 64;" ::: "memory");
    else if (t < 64) { asm volatile("bar.sync 3, 64;" ::: "memory"); y[384 + t] = s[t - 32]; }
}"""


@pytest.mark.parametrize("order", [0, 1, 5])
def test_barriers(emucuda_checked: Control, order: int) -> None:
    emucuda_checked.set_thread_order(order)
    y = run(BARRIERS, np.zeros((5, 96), np.int32), block=96)[0]
    t = np.arange(96)
    assert (y[0] == 32).all()
    assert (y[1] == 1).all()
    assert (y[2] == 1).all()
    assert np.array_equal(y[3], np.where(t < 64, 63 - t, 159 - t))
    assert np.array_equal(y[4, 32:64], np.arange(32) * 2)


def test_exited_threads_count_as_arrived(emucuda_checked: Control) -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
        int t = threadIdx.x; if (t >= 40) return;
        __syncthreads(); y[t] = t < 32 ? __shfl_xor_sync(~0u, t, 1) : __shfl_xor_sync(0xffu, t, 1); }"""
    y = run(source, np.zeros(64, np.int32), block=64)[0]
    assert y[:40].tolist() == [i ^ 1 for i in range(40)]
    assert (y[40:] == 0).all()


@pytest.mark.parametrize("order", [0, 1, 5])
def test_a_thread_may_wait_for_another_through_memory(emucuda: Control, order: int) -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
        __shared__ volatile int flag; int t = threadIdx.x;
        if (t == 63) { flag = 0; y[2] = 7; ((volatile int*)y)[0] = 1; }
        else if (t == 0) { while (((volatile int*)y)[0] == 0) {} y[1] = y[2]; } }"""
    emucuda.set_thread_order(order)
    assert run(source, np.zeros(3, np.int32), block=64)[0].tolist() == [1, 7, 7]


@pytest.mark.parametrize(("waiter", "giver"), [(37, 34), (34, 37)])
def test_a_lane_may_wait_for_a_lane_of_its_warp(emucuda: Control, waiter: int, giver: int) -> None:
    source = f"""
    extern "C" __global__ void k(volatile int* y) {{
        int t = threadIdx.x; if (t == {waiter}) while (y[0] == 0) {{}} else if (t == {giver}) y[0] = 1; }}"""
    assert run(source, np.zeros(1, np.int32), block=64)[0][0] == 1


def test_a_wait_through_memory_that_never_ends(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    kernel = gpu.kernel('extern "C" __global__ void k(volatile int* y) {\nwhile (y[0] == 0) {}\n}')
    emucuda.set_patience(0.2)
    gpu.launch(kernel, 1, 40, gpu.upload(np.zeros(1, np.int32)))
    with pytest.raises(CUDAError, match="LAUNCH_TIMEOUT"):
        gpu.stream.sync()
    emucuda.settle()
    assert "test.cu:2: waits in a loop" in emucuda.last_error() or "nothing happened" in emucuda.last_error()
    emucuda.reset()


def test_dimensions_and_lane_registers(emucuda: Control) -> None:
    source = r"""
    extern "C" __global__ void k(unsigned* y) {
        unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        unsigned i = block * (blockDim.x * blockDim.y * blockDim.z)
                   + (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x, lane, lt, ge, warp;
        asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lt));
        asm("mov.u32 %0, %%lanemask_ge;" : "=r"(ge)); asm("mov.u32 %0, %%warpid;" : "=r"(warp));
        y[i * 4] = lane; y[i * 4 + 1] = lt; y[i * 4 + 2] = ge; y[i * 4 + 3] = warp; }"""
    y = run(source, np.zeros((2 * 3 * 2 * 48, 4), np.uint32), grid=(2, 3, 2), block=(4, 6, 2))[0]
    inside = np.arange(576) % 48
    lane = inside % 32
    assert np.array_equal(y[:, 0], lane)
    assert np.array_equal(y[:, 1], (1 << lane) - 1)
    assert np.array_equal(y[:, 2], 0xFFFFFFFF & ~((1 << lane) - 1))
    assert np.array_equal(y[:, 3], inside // 32)
