"""Tests of compiling Gluon kernels and reading their resources."""

import msgspec
import pytest

from flashtune.core.config import LaunchOptions
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Argument, Kernel, Specialization
from flashtune.core.record import Resources
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel, load_module
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
