"""The emulator of PTX, on small kernels written by hand: what they compute, and what it must not let pass."""

import numpy as np
import pytest

from tools.ptx import tensor_core
from tools.ptx.arithmetic import HANDLERS, from_bf16, to_bf16
from tools.ptx.block import Block
from tools.ptx.memory import EmulationError, GlobalMemory, SharedMemory
from tools.ptx.program import SHARED_BASE, Program, parse

assert tensor_core
THREADS = 64


def program(body: str) -> Program:
    """A kernel of 64 threads: %rd1 is its buffer, %r1 the thread, %rd2 and %r2 the thread's place, 4 bytes each."""
    return parse(f"""
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {THREADS}
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<9>;
	ld.param.b64 %rd1, [kernel_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd2, %rd1, %rd2;
	shl.b32 %r2, %r1, 2;
	add.s32 %r2, %r2, global_smem;
{body}
	ret;
}}
""")


def run(body: str, data: np.ndarray, shared: int = 4 * THREADS) -> np.ndarray:
    """Run one block on a buffer, in place."""
    memory = GlobalMemory()
    memory.add("data", data.ctypes.data, data.nbytes)
    parameters = {"kernel_param_0": data.ctypes.data}
    block = Block(program(body), (0, 0, 0), (1, 1, 1), parameters, SharedMemory(shared), memory)
    block.run(HANDLERS)
    return data


def numbers() -> np.ndarray:
    return np.arange(THREADS, dtype=np.uint32)


NEIGHBOUR = """
	ld.global.b32 %r3, [%rd2];
	st.shared.b32 [%r2], %r3;
	bar.sync 0;
	xor.b32 %r4, %r2, 128;
	ld.shared.b32 %r5, [%r4];
	st.global.b32 [%rd2], %r5;
"""
"""Every thread takes the number of the thread 32 further on: of the other warp."""


def test_a_barrier_lets_warps_see_each_other() -> None:
    assert SHARED_BASE % 256 == 0
    assert np.array_equal(run(NEIGHBOUR, numbers()), numbers() ^ 32)


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("bar.sync 0;", "", "race: a read of what another warp wrote"),
        ("bar.sync 0;", "bar.warp.sync -1;", "race: a read of what another warp wrote"),
        ("st.global.b32 [%rd2]", "st.global.b32 [%rd2+4]", r"outside of global memory: data\+256 of 256"),
        ("st.global.b32 [%rd2]", "st.global.b32 [%rd2+2]", "no multiple of 4"),
        ("ld.shared.b32 %r5, [%r4]", "ld.shared.b32 %r5, [%r4+4]", "bytes 4 to 260 of 256 of shared"),
        ("st.shared.b32 [%r2], %r3;", "", "that nobody wrote"),
        ("xor.b32 %r4, %r2, 128;", "st.shared.b32 [%r2], %r1; mov.u32 %r4, %r2;", None),
        ("st.global.b32 [%rd2]", "st.shared.b32 [%r2], %r1; st.global.b32 [%rd2]", "race: a write to what"),
        ("xor.b32", "frobnicate.b32", "frobnicate"),
    ],
)
def test_what_no_gpu_allows_is_seen(was: str, now: str, message: str | None) -> None:
    assert was in NEIGHBOUR
    body = NEIGHBOUR.replace(was, now)
    if message is None:
        assert np.array_equal(run(body, numbers()), numbers())
    else:
        with pytest.raises(EmulationError, match=message):
            run(body, numbers())


COPY = """
	cp.async.ca.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x4, 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	bar.sync 0;
	xor.b32 %r4, %r2, 128;
	ld.shared.b32 %r5, [%r4];
	st.global.b32 [%rd2], %r5;
"""


def test_asynchronous_copies_end_when_they_are_waited_for() -> None:
    assert np.array_equal(run(COPY, numbers()), numbers() ^ 32)
    zeros = run(COPY.replace("0x4, 4;", "0x4, 0;"), numbers())
    assert not zeros.any()
    with pytest.raises(EmulationError, match="still to write"):
        run(COPY.replace("wait_group 0", "wait_group 1"), numbers())
    with pytest.raises(EmulationError, match="race: a read of what another warp wrote"):
        run(COPY.replace("bar.sync 0;", ""), numbers())
    with pytest.raises(EmulationError, match="before its asynchronous copies"):
        run("cp.async.ca.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x4;", numbers())


def test_threads_go_their_own_ways_and_meet_again() -> None:
    """A loop that thread t leaves after t rounds, a branch, and an early end."""
    body = """
	mov.b32 %r3, 0;
	mov.b32 %r4, 0;
$L_round:
	setp.ge.u32 %p1, %r4, %r1;
	@%p1 bra $L_end;
	add.s32 %r3, %r3, %r4;
	add.s32 %r4, %r4, 1;
	bra.uni $L_round;
$L_end:
	setp.lt.u32 %p2, %r1, 60;
	@!%p2 ret;
	@%p2 st.global.b32 [%rd2], %r3;
"""
    t = np.arange(THREADS)
    assert np.array_equal(run(body, numbers()), np.where(t < 60, t * (t - 1) // 2, t))
    with pytest.raises(EmulationError, match="went another way"):
        run(body.replace("add.s32 %r3, %r3, %r4;", "bar.sync 0;"), numbers())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("bfe.u32 %r3, %r1, 1, 3;", lambda t: t >> 1 & 7),
        ("bfe.s32 %r3, %r1, 0, 2;", lambda t: (t & 3) - ((t & 2) << 1)),
        ("shl.b32 %r3, %r1, 40;", lambda t: 0 * t),
        ("sub.s32 %r3, 3, %r1; shr.s32 %r3, %r3, 1;", lambda t: (3 - t) >> 1),
        ("mov.b64 %rd3, {%r1, 7}; shf.l.wrap.b32 %r3, %r1, 7, 30;", lambda t: 7 << 30 | t >> 2),
        ("prmt.b32 %r3, %r1, 0x8000, 0xD450;", lambda t: t | 0xFF008000),
        ("sub.s32 %r4, %r1, 9; div.s32 %r3, %r4, 4;", lambda t: np.trunc((t - 9) / 4).astype(int)),
        ("sub.s32 %r4, %r1, 9; rem.s32 %r3, %r4, 4;", lambda t: np.fmod(t - 9, 4)),
        ("popc.b32 %r3, %r1;", lambda t: np.array([bin(v).count("1") for v in t])),
        (
            "mad.wide.u32 %rd3, %r1, 0xFFFFFFFF, %rd1; sub.s64 %rd3, %rd3, %rd1; shr.u64 %rd3, %rd3, 32; "
            "cvt.u32.u64 %r3, %rd3;",
            lambda t: np.maximum(t - 1, 0),
        ),
        ("shfl.sync.bfly.b32 %r3, %r1, 5, 31, -1;", lambda t: t ^ 5),
        ("shfl.sync.idx.b32 %r3, %r1, 3, 31, -1;", lambda t: t // 32 * 32 + 3),
        ("shfl.sync.up.b32 %r3, %r1, 1, 0, -1;", lambda t: np.where(t % 32, t - 1, t)),
        ("redux.sync.add.s32 %r3, %r1, -1;", lambda t: np.repeat(t.reshape(2, 32).sum(1), 32)),
        (
            "cvt.rn.f32.u32 %r4, %r1; mul.f32 %r4, %r4, 0f3F000000; cvt.rzi.s32.f32 %r3, %r4;",
            lambda t: t // 2,
        ),
        ("cvt.u16.u32 %rs1, %r1; cvt.s8.s32 %rs2, 255; mov.b32 %r3, {%rs1, %rs2};", lambda t: t | 0xFFFF0000),
        ("setp.lt.u32 %p1, %r1, 9; selp.b32 %r3, %r1, 5, %p1;", lambda t: np.where(t < 9, t, 5)),
    ],
)
def test_arithmetic(body: str, expected) -> None:  # type: ignore[no-untyped-def]
    found = run(body + "st.global.b32 [%rd2], %r3;", numbers())
    assert np.array_equal(found, expected(np.arange(THREADS)).astype(np.int64).astype(np.uint32))


def test_bf16_rounds_to_the_nearest() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, np.inf, np.nan], np.float32)
    expected = [1.0, 1.0, 1.015625, -3.140625, np.inf, np.nan]
    assert np.array_equal(from_bf16(to_bf16(values)), np.array(expected, np.float32), equal_nan=True)


def test_a_tensor_core_product() -> None:
    """Fragments as the PTX manual lays them out: A is row g = lane / 4 and g + 8, columns 2 q and 2 q + 8."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, shape).astype(np.float16) for shape in ((16, 16), (8, 16)))
    lane = np.arange(32)
    g, q = lane // 4, 2 * (lane % 4)

    def word(m: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        return np.stack([m[row, column], m[row, column + 1]], -1).view(np.uint32)[:, 0]

    words = [
        word(a, g, q),
        word(a, g + 8, q),
        word(a, g, q + 8),
        word(a, g + 8, q + 8),
        word(b, g, q),
        word(b, g, q + 8),
    ]
    data = np.zeros((8, THREADS), np.uint32)
    for i, w in enumerate(words):
        data[i] = np.tile(w, 2)
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd2+{4 * THREADS * i}];" for i in range(6))
    stores = "\n".join(f"st.global.b32 [%rd2+{4 * THREADS * i}], %r{20 + i};" for i in range(4))
    product = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r20, %r21, %r22, %r23 }, "
        "{ %r10, %r11, %r12, %r13 }, { %r14, %r15 }, { 0f00000000, 0f00000000, 0f00000000, 0f3F800000 };"
    )
    run(loads + product + stores, data)
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    for i, (row, column) in enumerate(((g, q), (g, q + 1), (g + 8, q), (g + 8, q + 1))):
        assert np.array_equal(data[i].view(np.float32), np.tile(expected[row, column] + (i == 3), 2))
