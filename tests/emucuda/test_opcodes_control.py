"""Branches, calls, ends; and what the translator says of an instruction that it does not know."""

from __future__ import annotations

import numpy as np
import pytest

from .control import Control
from .ptx.emitter import NoRule
from .ptx.parser import PtxError, parse
from .ptx.translate import translate


def run(source: str, *arrays: np.ndarray, **settings: object) -> list[np.ndarray]:
    from .helpers import Gpu

    return Gpu().run(source, *arrays, **settings)  # type: ignore[arg-type]


def test_loops_and_divergence(emucuda: Control) -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
        int t = threadIdx.x, n = t + 1, steps = 0;
        while (n != 1) { n = n % 2 ? 3 * n + 1 : n / 2; ++steps; } y[t] = steps; }"""

    def collatz(n: int) -> int:
        return 0 if n == 1 else 1 + collatz(3 * n + 1 if n % 2 else n // 2)

    assert run(source, np.zeros(64, np.int32), block=64)[0].tolist() == [collatz(i + 1) for i in range(64)]


def test_branch_table(emucuda: Control) -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
        int t = threadIdx.x, r;
        asm volatile("{ .reg .u32 i; min.u32 i, %1, 2; T%=: .branchtargets A%=, B%=, C%=; brx.idx i, T%=;"
                     "A%=: mov.u32 %0, 10; bra D%=; B%=: mov.u32 %0, 20; bra D%=;"
                     "C%=: mov.u32 %0, 30; D%=: }" : "=r"(r) : "r"(t));
        y[t] = r; }"""
    assert run(source, np.zeros(32, np.int32))[0].tolist() == [10, 20] + [30] * 30


def test_device_functions_and_recursion(emucuda: Control) -> None:
    source = r"""
    struct Pair { long long a; float b; };
    __device__ __noinline__ Pair make(int x, float y) { Pair p; p.a = x * 10ll; p.b = y + x; return p; }
    __device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
    __device__ __noinline__ void leave_if(bool c) { if (c) asm volatile("exit;"); }
    extern "C" __global__ void k(int* y) {
        int t = threadIdx.x; leave_if(t == 5);
        Pair p = make(t, 0.5f); y[t] = fib(t % 12) + (int)p.a + (int)(p.b * 2); }"""
    fib = [0, 1]
    while len(fib) < 12:
        fib.append(fib[-1] + fib[-2])
    expected = [fib[t % 12] + t * 10 + 2 * t + 1 for t in range(32)]
    expected[5] = 0
    assert run(source, np.zeros(32, np.int32))[0].tolist() == expected


def test_templates_are_found_by_their_mangled_names(emucuda: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    from cuda.core import Program, ProgramOptions

    source = "template <int N> __global__ void k(int* y) { y[threadIdx.x] = N; }"
    program = Program(source, "c++", ProgramOptions(name="t.cu", arch="sm_80"))
    module = program.compile("cubin", name_expressions=("k<7>",))
    y = gpu.upload(np.zeros(4, np.int32))
    emucuda.forget_counts()
    gpu.launch(module.get_kernel("k<7>"), 1, 4, y)
    assert gpu.download(y, np.zeros(4, np.int32)).tolist() == [7] * 4
    assert emucuda.counts()["kernel:k<7>"] == 1


@pytest.mark.parametrize(("body", "message"), [("__trap();", "trap"), ("assert(y[0] == 1);", "assertion failed")])
def test_traps_break_the_context(emucuda: Control, body: str, message: str) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    gpu = Gpu()
    source = ASSERT + f'extern "C" __global__ void k(int* y) {{ if (threadIdx.x == 3) {body} }}'
    y = gpu.upload(np.zeros(4, np.int32))
    gpu.launch(gpu.kernel(source), 1, 8, y)
    with pytest.raises(CUDAError):
        gpu.stream.sync()
    assert message in emucuda.context_error()
    assert "thread (3,0,0)" in emucuda.context_error()
    emucuda.reset()


ASSERT = r"""
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
#define assert(c) ((c) ? (void)0 : __assertfail(#c, "test.cu", 3, "k", 1))
"""


def test_printf(emucuda: Control, capfd: pytest.CaptureFixture[str]) -> None:
    source = r"""
    extern "C" __device__ int printf(const char*, ...);
    extern "C" __global__ void k(int* y) {
        if (threadIdx.x == 2) printf("x %d %5.2f %s 100%%\n", y[0], 1.5, "done"); }"""
    run(source, np.array([42], np.int32))
    assert capfd.readouterr().out == "x 42  1.50 done 100%\n"


# ---- what is not known ------------------------------------------------------------------------------------------
MODULE = """
.version 8.0
.target sm_80
.address_size 64
.file 1 "folder/some.cu"
.visible .entry k(.param .u64 k_param_0)
{{
    .reg .b32 %r<4>;
    .loc 1 17 3
    {instruction}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("instruction", "opcode"),
    [
        ("frobnicate.u32 %r1, %r2;", "frobnicate.u32"),
        ("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%r1}, {%r1}, {%r1}, {%r1};", "mma.sync"),
        ("tex.2d.v4.s32.s32 {%r1, %r1, %r1, %r1}, [%r2];", "tex.2d"),
        ("add.u32 %r1, %r9, 1;", "add.u32"),
    ],
)
def test_unknown_instructions_are_named(instruction: str, opcode: str) -> None:
    with pytest.raises(PtxError) as error:
        translate(parse(MODULE.format(instruction=instruction)), "k")
    assert opcode in str(error.value)


def test_the_error_names_kernel_and_line() -> None:
    with pytest.raises(NoRule, match=r"kernel k, some\.cu:17: cannot translate opcode frobnicate %r1"):
        translate(parse(MODULE.format(instruction="frobnicate %r1;")), "k")


def test_a_missing_entry_lists_those_there_are() -> None:
    with pytest.raises(PtxError, match="no entry other in this module; it has k"):
        translate(parse(MODULE.format(instruction="")), "other")


def test_an_unknown_instruction_reaches_whoever_asks_for_the_kernel(emucuda: Control) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    from .helpers import Gpu

    source = (
        'extern "C" __global__ void k(unsigned* y) { asm volatile("bar.sync 0;\\n mov.u32 %0, %%pm0;" : "=r"(y[0])); }'
    )
    with pytest.raises(CUDAError):
        Gpu().kernel(source)
    assert "unknown operand %pm0" in emucuda.last_error()
