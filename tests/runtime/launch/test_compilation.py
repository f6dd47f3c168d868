"""Tests of compiling kernels for GPUs of other machines: Gluon's, and those around attention."""

import queue
import threading

import msgspec
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flashtune.core.config import LaunchOptions
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Argument, Kernel, Specialization
from flashtune.core.record import Resources
from flashtune.core.target import find_target
from flashtune.kv_cache.append_kernel import append
from flashtune.kv_cache.layout import Encoding
from flashtune.launch.compilation import compile_kernel, hash_compiler, interpreting, load_module, parsing
from flashtune.launch.tail_kernel import compile_clear
from flashtune.tuner.binary.resources import occupancy, read_resources

H100 = find_target("h100")

# Two consumers of four warps, and a producer of one that gives its registers away.
SOURCE = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def copy(source, sink, start: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    index = gl.arange(0, 128, layout) + start
    gl.store(sink + index, gl.load(source + index))


@gluon.jit
def first(source, sink):
    copy(source, sink, 0)


@gluon.jit
def second(source, sink):
    copy(source, sink, 128)


@gluon.jit
def producer(source, sink):
    copy(source, sink, 256)


@gluon.jit
def specialized(source, sink):
    both = (source, sink)
    gl.warp_specialize([(first, both), (second, both), (producer, both)], [4, 1], [240, 24])


@gluon.jit
def plain(source, sink):
    copy(source, sink, 0)
"""


def a_kernel(entry: str) -> Kernel:
    return Kernel(
        family="copying",
        entry=entry,
        source=SOURCE,
        arguments=(Argument("source", "*fp32", 16), Argument("sink", "*fp32", 16)),
        options=LaunchOptions(num_warps=4, num_stages=1),
        specialization=Specialization(),
    )


def test_a_gluon_kernel_compiles_without_a_gpu() -> None:
    kernel = a_kernel("plain")
    assert getattr(load_module(kernel), kernel.entry).is_gluon()
    assert ".target sm_90" in compile_kernel(kernel, H100).asm["ptx"]
    # The promise about the pointers reached the compiler: four elements in one access of 16 bytes.
    assert "tt.divisibility = 16" in compile_kernel(kernel, H100).asm["ttgir"]


def test_gluon_compile_error_is_a_kernel_error() -> None:
    broken = msgspec.structs.replace(
        a_kernel("plain"), source=SOURCE.replace("gl.arange(0, 128", "gl.arange(0, 100")
    )
    with pytest.raises(KernelError, match="power of 2"):
        compile_kernel(broken, H100)


def test_occupancy_counts_specialised_and_compiler_added_warps() -> None:
    resources = read_resources(a_kernel("specialized"), H100)
    # Nine warps are rounded up to three groups of four, and share the registers of a multiprocessor.
    # The count is that of the launch, not that of a role after warps have traded registers.
    assert resources.warps == 12
    assert resources.registers == 168
    assert resources.spill_bytes == 0
    assert not resources.serialized_wgmma
    resident = occupancy(resources, a_kernel("specialized").options, H100)
    assert (resident.blocks, resident.warps, resident.limit) == (1, 12, "registers")


def test_number_of_warps_is_stored_only_if_the_compiler_added_warps() -> None:
    plain = read_resources(a_kernel("plain"), H100)
    assert plain.warps is msgspec.UNSET
    assert b"warps" not in msgspec.json.encode(plain)
    specialized = Resources(sram_bytes=1, warps=12)
    assert msgspec.json.decode(msgspec.json.encode(specialized), type=Resources) == specialized


@pytest.mark.skipif(interpreting(), reason="compiles")
@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_compiles_without_scratch_memory(target: str, dtype: torch.dtype) -> None:
    metadata = compile_clear(dtype, find_target(target)).metadata
    assert metadata.shared == 0
    assert metadata.global_scratch_size == 0


SM_80, SM_90, GFX942 = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)


def compiled(target: GPUTarget, encoding: Encoding, growing: bool, value_dim: int = 128) -> CompiledKernel:
    constants = {
        "page_size": 16,
        "encoding": encoding.value,
        "growing": growing,
        "tile_rows": 16,
        "head_dim": 128,
        "block_dim": 128,
        "value_dim": value_dim,
        "block_value_dim": max(1, value_dim),
    }
    pool = {Encoding.PLAIN: "*bf16", Encoding.E4M3: "*u8", Encoding.INT8: "*i8"}[encoding]
    kinds = {"k": "*bf16", "v": "*bf16", "keys": pool, "values": pool, "slots": "*i64", "tokens": "i32"}
    kinds |= {"k_scale": "*fp32", "v_scale": "*fp32"}
    names = append.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i64") for name in names}
    scattered = {"tokens", "stride_k_scale_p", "stride_k_scale_h", "stride_v_scale_p", "stride_v_scale_h"}
    aligned = [name for name in names if name not in constants and name not in scattered]
    source = ASTSource(
        append,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    binary: CompiledKernel = triton.compile(source, target=target, options={"enable_fp_fusion": True})
    return binary


@pytest.mark.slow
@pytest.mark.parametrize("target", [SM_80, SM_90, GFX942], ids=lambda target: str(target.arch))
@pytest.mark.parametrize(
    ("encoding", "growing"),
    [
        (Encoding.PLAIN, False),
        (Encoding.E4M3, False),
        (Encoding.E4M3, True),
        (Encoding.INT8, False),
        (Encoding.INT8, True),
    ],
)
def test_append_kernel_compiles_for_every_gpu(target: GPUTarget, encoding: Encoding, growing: bool) -> None:
    binary = compiled(target, encoding, growing)
    assert binary.metadata.shared <= 1024
    if target.backend == "cuda":
        ptx = binary.asm["ptx"]
        assert "ld.global.v4" in ptx, "a thread reads 16 bytes at once"
        assert ".local" not in ptx


def test_kernel_without_values_loads_only_keys() -> None:
    both, keys = (compiled(SM_90, Encoding.PLAIN, False, width).asm["ptx"] for width in (128, 0))
    assert both.count("ld.global.v4") == 2 * keys.count("ld.global.v4") > 0


def test_files_of_the_compiler_are_hashed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: threads.put(threading.current_thread()))
    hash_compiler.__wrapped__()
    assert threads.get(timeout=60) is not threading.current_thread()


def test_sources_are_parsed_in_one_thread_at_a_time() -> None:
    kernel = Kernel(
        "test", "plain", SOURCE, (Argument("source", "*fp32"), Argument("sink", "*fp32")),
        LaunchOptions(num_warps=4, num_stages=1), Specialization(),
    )  # fmt: skip
    made = threading.Thread(target=compile_kernel, args=(kernel, H100))
    with parsing:
        made.start()
        made.join(0.5)
        assert made.is_alive()
    made.join(60)
    assert not made.is_alive()
