"""Loads, stores, spaces, atomics and cp.async."""

from __future__ import annotations

import numpy as np
import pytest

from .control import Control


def run(source: str, *arrays: np.ndarray, **settings: object) -> list[np.ndarray]:
    from .helpers import Gpu

    return Gpu().run(source, *arrays, **settings)  # type: ignore[arg-type]


def test_vectors_of_every_width(emucuda: Control) -> None:
    source = r"""
    extern "C" __global__ void k(const int4* a, int4* b, const short4* c, short4* d, const uchar4* e, uchar4* f,
                                 const double2* g, double2* h) {
        int i = threadIdx.x; b[i] = a[i]; d[i] = c[i]; f[i] = e[i]; h[i] = g[i]; }"""
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 256, n * 32, np.uint8) for n in (16, 16, 8, 8, 4, 4, 16, 16)]
    got = run(source, *given)
    for k in range(0, 8, 2):
        assert np.array_equal(got[k + 1], given[k])


def test_loads_extend_by_type(emucuda: Control) -> None:
    source = r"""
    extern "C" __global__ void k(const signed char* a, const unsigned char* b, const short* c, int* y) {
        int i = threadIdx.x; y[i * 3] = a[i]; y[i * 3 + 1] = b[i]; y[i * 3 + 2] = c[i]; }"""
    bits = np.random.default_rng(1).integers(0, 256, 32, np.uint8)
    words = np.random.default_rng(2).integers(-32768, 32768, 32).astype(np.int16)
    y = run(source, bits, bits, words, np.zeros((32, 3), np.int32))[-1]
    assert np.array_equal(y, np.stack([bits.view(np.int8), bits, words], 1))


def test_constant_and_module_variables(emucuda: Control) -> None:
    source = r"""
    __constant__ signed char table[8] = {-127, -104, 1, 13, 25, 53, 89, 113};
    __constant__ float scales[2][2] = {{0.5f, 1.5f}, {2.5f, 3.5f}};
    __device__ int counter = 40;
    __device__ unsigned long long wide[2] = {1ull << 40, 7};
    extern "C" __global__ void k(int* x, float* y, unsigned long long* z) {
        int i = threadIdx.x; x[i] = table[i & 7]; y[i] = scales[i >> 1 & 1][i & 1];
        atomicAdd(&counter, 1); __syncthreads(); if (i == 0) { x[31] = counter; z[0] = wide[0]; z[1] = wide[1]; } }"""
    x, y, z = run(source, np.zeros(32, np.int32), np.zeros(32, np.float32), np.zeros(2, np.uint64))
    assert x[:8].tolist() == [-127, -104, 1, 13, 25, 53, 89, 113]
    assert y[:4].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert x[31] == 72
    assert z.tolist() == [1 << 40, 7]


def test_kernels_of_a_module_share_its_variables(emucuda: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    module = gpu.compile(r"""
    __device__ int shared_by_both;
    extern "C" __global__ void put(int* y) { shared_by_both = 5; }
    extern "C" __global__ void get(int* y) { y[0] = shared_by_both; }""")
    y = gpu.upload(np.zeros(1, np.int32))
    for name in ("put", "get"):
        gpu.launch(module.get_kernel(name), 1, 1, y)
    assert gpu.download(y, np.zeros(1, np.int32))[0] == 5


def test_local_arrays_and_struct_parameters(emucuda: Control) -> None:
    from cuda.bindings import driver

    from .helpers import Gpu

    gpu = Gpu()
    kernel = gpu.kernel(r"""
    struct Shape { int n; long long stride; float scale[3]; char tag; };
    extern "C" __global__ void k(char before, Shape s, int* y) {
        int local[16]; for (int i = 0; i < 16; ++i) local[i] = i * s.n;
        int at = (int)s.stride + threadIdx.x;
        y[threadIdx.x] = local[at & 15] + (int)s.scale[threadIdx.x % 3] + s.tag + before; }""")
    shape = np.zeros(1, np.dtype([("n", "i4"), ("stride", "i8"), ("scale", "f4", 3), ("tag", "i1")], align=True))
    shape[0] = (3, 5, (100, 200, 300), 7)
    y = gpu.upload(np.zeros(8, np.int32))
    values = [np.array([1], np.int8), shape, np.array([int(y.handle)], np.uint64)]
    pointers = np.array([v.ctypes.data for v in values], np.uint64)
    function = driver.CUfunction(int(kernel.handle))
    (status,) = driver.cuLaunchKernel(function, 1, 1, 1, 8, 1, 1, 0, gpu.stream.handle, pointers.ctypes.data, 0)
    assert status == 0
    got = gpu.download(y, np.zeros(8, np.int32))
    assert got.tolist() == [(5 + i) * 3 + (100, 200, 300)[i % 3] + 8 for i in range(8)]
    assert [(info.offset, info.size) for info in kernel.arguments_info] == [(0, 1), (8, 32), (40, 8)]


ATOMICS = r"""
extern "C" __global__ void k(int* i, unsigned* u, float* f, unsigned long long* l, unsigned short* old) {
    int t = threadIdx.x;
    atomicAdd(&i[0], t); atomicMax(&i[1], t - 20); atomicMin(&i[2], 5 - t); atomicExch(&i[3], 9); atomicSub(&i[4], 2);
    atomicAnd(&u[0], ~(1u << t)); atomicOr(&u[1], 1u << t); atomicXor(&u[2], t); atomicInc(&u[3], 6);
    atomicDec(&u[4], 9);
    atomicMax(&u[5], 0x80000000u + t);
    atomicAdd(&f[0], 0.5f); atomicAdd((double*)&l[0], 0.25); atomicAdd(&l[1], 1ull << 33);
    unsigned was = atomicCAS(&u[6], t, t + 1); old[t] = (unsigned short)was;
    __shared__ int s[2]; if (t < 2) s[t] = 0; __syncthreads();
    atomicAdd(&s[0], 1); atomicMax(&s[1], t); __syncthreads(); if (t == 0) { i[5] = s[0]; i[6] = s[1]; }
}"""


def test_atomics(emucuda: Control) -> None:
    i, u = np.zeros(8, np.int32), np.array([~0, 0, 0, 0, 0, 0, 0], np.int64).astype(np.uint32)
    i, u, f, wide, old = run(ATOMICS, i, u, np.zeros(1, np.float32), np.zeros(2, np.uint64), np.zeros(32, np.uint16))
    assert i[:7].tolist() == [496, 11, -26, 9, -64, 32, 31]
    assert u[:6].tolist() == [0, 0xFFFFFFFF, 0, 32 % 7, 8, 0x8000001F]
    assert (f[0], wide.view(np.float64)[0], wide[1]) == (16.0, 8.0, 32 << 33)
    assert u[6] == 32  # ascending threads: each finds its own number
    assert old.tolist() == list(range(32))


def test_atomics_of_halves(emucuda: Control) -> None:
    source = r"""
    #include <cuda_fp16.h>
    #include <cuda_bf16.h>
    extern "C" __global__ void k(__half2* h, __nv_bfloat162* b, __half* one) {
        atomicAdd(h, __floats2half2_rn(1.f, 0.5f)); atomicAdd(b, __floats2bfloat162_rn(2.f, 0.25f));
        atomicAdd(one, __float2half(0.5f)); }"""
    h, b, one = run(source, np.zeros(2, np.float16), np.zeros(2, np.uint16), np.zeros(1, np.float16))
    assert (h.tolist(), one[0]) == ([32.0, 16.0], 16.0)
    assert (b.astype(np.uint32) << 16).view(np.float32).tolist() == [64.0, 8.0]


def test_atomics_from_all_blocks_at_once(emucuda: Control) -> None:
    emucuda.set_workers(4)
    source = 'extern "C" __global__ void k(int* n, float* f) { atomicAdd(n, 1); atomicAdd(f, 1.0f); }'
    n, f = run(source, np.zeros(1, np.int32), np.zeros(1, np.float32), grid=300, block=64)
    assert (n[0], f[0]) == (19200, 19200.0)


CP_ASYNC = r"""
extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ __align__(16) float s[256];
    int t = threadIdx.x; unsigned d = (unsigned)__cvta_generic_to_shared(&s[t * 4]);
    int given = t * 16 + 16 <= n * 4 ? 16 : t * 16 < n * 4 ? n * 4 - t * 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(d), "l"(x + t * 4), "r"(given) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    unsigned e = (unsigned)__cvta_generic_to_shared(&s[128 + t]);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(e), "l"(x + t) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory"); __syncthreads();
    for (int j = 0; j < 4; ++j) y[t * 4 + j] = s[t * 4 + j];
    asm volatile("cp.async.wait_all;" ::: "memory"); __syncthreads();
    y[128 + t] = s[159 - t];
}"""


@pytest.mark.parametrize("checked", [False, True])
def test_cp_async(emucuda: Control, checked: bool) -> None:
    from .helpers import Gpu

    emucuda.set_checked(checked)
    gpu = Gpu()
    x = np.arange(128, dtype=np.float32) + 1
    y = gpu.upload(np.zeros(160, np.float32))
    gpu.launch(gpu.kernel(CP_ASYNC), 1, 32, gpu.upload(x), y, np.int32(70))
    got = gpu.download(y, np.zeros(160, np.float32))
    emucuda.set_checked(False)
    assert np.array_equal(got[:128], np.where(np.arange(128) < 70, x, 0))
    assert np.array_equal(got[128:], x[31::-1])


def test_generic_addresses_reach_every_space(emucuda: Control) -> None:
    source = r"""
    __device__ __noinline__ int sum(const int* p, int n) { int s = 0; for (int i = 0; i < n; ++i) s += p[i]; return s; }
    __constant__ int table[4] = {1, 2, 3, 4};
    extern "C" __global__ void k(const int* x, int* y) {
        __shared__ int shared[4]; int local[4]; int t = threadIdx.x;
        shared[t & 3] = x[t & 3] * 10; __syncwarp(); for (int i = 0; i < 4; ++i) local[i] = x[i] * (t + 1);
        const int* all[4] = {x, shared, local, table}; y[t] = sum(all[t & 3], 4);
        if (t == 4) y[t] = __isShared(shared) * 2 + __isGlobal(x); }"""
    y = run(source, np.array([1, 2, 3, 4], np.int32), np.zeros(5, np.int32), block=5)[-1]
    assert y.tolist() == [10, 100, 30, 10, 3]
