"""Tests of launches from bundles: the driver gets what Triton's launcher would give it."""

import ctypes
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from flashtune.bundle.bundle_file import bundle_of, dump_bundle
from flashtune.bundle.driver import Driver
from flashtune.bundle.program import evaluate
from flashtune.bundle.records import Descriptor, Entry, Parameter, Stage
from flashtune.core.errors import KernelError, MachineError
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import compile_binary, descriptors_of, plan_launch
from flashtune.launch.bundle_binding import BundledBinary, bind_entry
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.tensors import ForwardTensors
from flashtune.tuner.execution.inputs import make_tensors
from tests.emulator.cuda_library import CudaLibrary
from tests.emulator.launch_code import SMS, launch_code
from tests.support.golden_kernels import KERNELS, problem_of

H200 = find_target("h200")
CPU = torch.device("cpu")
NAMES = [
    "q_outer_bf16_d128_descriptors", "kv_outer_bf16_d128_causal", "hopper_bf16_d64", "hopper_e4m3_d128",
    "hopper_bf16_d128_bias", "hopper_bf16_d128_packed_sequences_pages", "masked_bf16_d128_softcap_dropout",
    "decode_bf16_d128_early", "decode_bf16_d64_packed_pages", "hopper_fp16_latent_page_parts",
    "backward_split_bf16_d64_packed_dropout", "backward_fused_bf16_d64_bias",
    "backward_hopper_bf16_d128_sinks_ordered", "backward_hopper_bf16_d64_bias", "hopper_bf16_d128_splits",
    "hopper_bf16_d128_invariant",
    "hopper_bf16_d96_pages_invariant_splits", "masked_bf16_d128_splits",
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_device(no_device: None) -> None:
    """Launches run without a GPU."""


def small(name: str) -> Problem:
    problem = msgspec.structs.replace(problem_of(name), seqlen_q=192, seqlen_kv=192)
    return msgspec.structs.replace(problem, packed=300) if problem.packed else problem


Stages = list[tuple[str, tuple[int, ...], list[Any]]]


def expected(kernel: Kernel, made: Any, tensors: Any) -> Stages:
    """Returns each kernel's name, grid and arguments by the launch code. Changing arguments are names."""
    code = launch_code(kernel)
    plan = plan_launch(kernel, code, _described(tensors), made.side)
    scratch = {name: torch.empty(shape, device="meta") for name, shape in plan.workspaces.items()}
    planned: Any = tuple(_on_gpu(tensor) for tensor in plan.tensors)
    descriptors = descriptors_of(kernel, code, tensors, planned, scratch) if kernel.takes_descriptors else {}
    stages = []
    for (entry, arguments, grid, integers), names in zip(plan.kernels, plan.names, strict=True):
        values: list[Any] = []
        if any(argument.type.startswith("tensordesc") for argument in arguments):
            for tensor, of_tensor in descriptors.items():
                for pattern in of_tensor:
                    values += [("map", tensor), *pattern.shape, *pattern.strides]
        stages.append((entry, (*grid, 1, 1)[:3], [*values, *names, *integers]))
    return stages


class _Gpu:
    """A tensor that says it is on a GPU, whose number of multiprocessors the launch code reads."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def _on_gpu(tensor: Any) -> Any:
    return tensor if tensor is None else _Gpu(tensor)


def _described(tensors: Any) -> Any:
    return tensors._make(map(_on_gpu, tensors))


def decoded(entry: Entry, number: int, parameters: tuple[bytes, ...]) -> list[Any]:
    """Returns the values of a launch's parameters; addresses and numbers by the driver's view."""
    formats = {"map": "<Q120x", "pointer": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}
    types = (parameter.type for parameter in entry.stages[number].parameters)
    return [struct.unpack(formats[kind], raw)[0] for kind, raw in zip(types, parameters, strict=True)]


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", NAMES)
def test_driver_gets_the_arguments_of_the_launch_code(name: str) -> None:
    kernel, problem, library = KERNELS[name](), small(name), CudaLibrary()
    driver = Driver(library)
    entry, codes = entry_of(kernel, problem, compile_binary(kernel, H200), "12.8")
    stored = bundle_of(dump_bundle("sm_90", "1", [entry], codes), "a bundle")
    assert stored.entry(kernel.digest) == entry
    made = make_tensors(problem, CPU, lse=kernel.specialization.lse)
    tensors: Any = made.backward or ForwardTensors(made.q, made.k, made.v, made.out, made.lse)
    if made.backward and kernel.specialization.lse:
        tensors = tensors._replace(dlse=torch.zeros_like(tensors.lse))
    side = made.side._replace(softcap=20.0, dropout=0.5)
    inputs = side._asdict() | tensors._asdict()
    functions = tuple(driver.load(stored.code(stage.code), stage, 0) for stage in entry.stages)
    memory: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def allocate(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        memory.setdefault(shape, []).append(torch.empty(shape, device=device))
        return memory[shape][-1]

    binary = BundledBinary(entry, functions, driver)
    launch = bind_entry(binary, tensors, side, multiprocessors=SMS, allocate=allocate)
    launch(tuple(tensors), 0.25, side)
    layouts = [(inputs[name].shape, inputs[name].stride()) for name in entry.plan.tensors]
    values = evaluate(entry.plan, layouts, SMS)
    addresses: dict[str, Any] = {"scale": 0.25, "softcap": 20.0, "dropout": 0.5}
    for field, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor):
            addresses[field] = tensor.data_ptr()
    for workspace in entry.plan.workspaces:
        shape = tuple(values[extent] for extent in workspace.shape)
        addresses[workspace.name] = memory[shape].pop(0).data_ptr()
    stages = expected(kernel, made, tensors)
    early = {part.entry for part in kernel.parts if part.options.early is True}
    assert [launched.function for launched in library.launches] == [function for function, _, _ in stages]
    for number, (launched, (_, grid, arguments)) in enumerate(zip(library.launches, stages, strict=True)):
        wanted = [
            addresses[item[1]] if isinstance(item, tuple) else addresses.get(item, item) for item in arguments
        ]
        scratch = addresses.get(f"scratch_{number}", 0)
        assert launched.grid == grid
        assert decoded(entry, number, launched.parameters) == [*wanted, scratch, 0]
        stage = entry.stages[number]
        assert (launched.threads, launched.shared_bytes) == (stage.threads, stage.shared_bytes)
        assert launched.attributes == (((6, 1),) if launched.function in early else ())


PARAMETERS = (
    Parameter("map", value=0),
    Parameter("i32", value=0),
    Parameter("i64", value=1),
    Parameter("map", value=1),
    Parameter("pointer", "lse"),
    Parameter("f32", "scale"),
    Parameter("i32", value=0),
    Parameter("pointer", value=2),
)
STAGE = Stage("f", "0" * 64, "0" * 32, 100_000, 256, early=True, parameters=PARAMETERS, grid=(0,))
VALUES = [-7, 2**40, 0]
FIRST, SECOND = (bytes([number]) * 128 for number in (1, 2))


class Library(CudaLibrary):
    """A library with one function `f`, whose machine code is not read."""

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.functions.append((name.decode(), [128, 4, 8, 128, 8, 4, 4, 8]))
        function._obj.value = len(self.functions)
        return 0


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def driver(library: Library) -> Driver:
    return Driver(library)


def queue_of(driver: Driver, grid: tuple[int, ...] = (5, 2)) -> Any:
    return driver.queue(driver.load(b"", STAGE, 0), STAGE, grid, VALUES, 2, 0)


def test_parameters_are_in_the_order_of_the_kernel(driver: Driver, library: Library) -> None:
    queue_of(driver)(77, (FIRST, SECOND, 0x5000, 0.5))
    (launched,) = library.launches
    wanted = struct.pack("<128siq", FIRST, -7, 2**40), SECOND + struct.pack("<QfiQ", 0x5000, 0.5, -7, 0)
    assert b"".join(launched.parameters) == b"".join(wanted)
    assert launched[:6] == ("f", (5, 2, 1), 256, 100_000, 77, ((6, 1),))
    # Shared memory of the device without the kernel's static memory.
    assert library.attributes == [(8, 226 * 1024)]


def test_concurrent_launches_have_their_own_memory(driver: Driver, library: Library) -> None:
    queue = queue_of(driver)
    launch, other = (
        library.cuLaunchKernelEx,
        threading.Thread(target=lambda: queue(2, (FIRST, SECOND, 2, 2.0))),
    )

    def interrupted(*arguments: Any) -> int:
        if not library.launches and not other.ident:
            # Another thread launches between the first thread's arguments and its launch.
            other.start()
            other.join()
        return launch(*arguments)

    library.cuLaunchKernelEx = interrupted  # type: ignore[assignment,method-assign]
    queue = queue_of(driver)
    queue(1, (FIRST, SECOND, 1, 1.0))
    read = [(made.stream, struct.unpack("<Q", made.parameters[4])[0]) for made in library.launches]
    assert read == [(2, 2), (1, 1)]


def test_thread_without_a_context_gets_one(driver: Driver, library: Library) -> None:
    queue = queue_of(driver)
    before, library.statuses = library.contexts, [201]
    queue(0, (FIRST, SECOND, 0, 0.0))
    assert (len(library.launches), library.contexts - before) == (1, 1)


def test_failed_launch_is_one_sentence(driver: Driver, library: Library) -> None:
    queue, library.statuses = queue_of(driver), [700]
    with pytest.raises(KernelError, match=r"the launch of f: error 700 \(700\)"):
        queue(0, (FIRST, SECOND, 0, 0.0))


def test_integers_out_of_range_are_refused(driver: Driver) -> None:
    with pytest.raises(KernelError, match="out of range"):
        driver.queue(driver.load(b"", STAGE, 0), STAGE, (1,), [2**31, 0, 0], 2, 0)
    with pytest.raises(KernelError, match="out of range"):
        queue_of(driver)(0, (FIRST, SECOND, -1, 0.0))


def test_empty_grid_launches_nothing(driver: Driver, library: Library) -> None:
    queue_of(driver, (3, 0))(0, (FIRST, SECOND, 0, 0.0))
    assert library.launches == []


def test_kernel_with_too_much_shared_memory_is_refused(driver: Driver) -> None:
    large = msgspec.structs.replace(STAGE, shared_bytes=227 * 1024)
    with pytest.raises(KernelError, match="shared memory"):
        driver.load(b"", large, 0)


def test_missing_driver_is_a_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtune.bundle.driver.LIBRARY", "libflashtune-nothing.so")
    with pytest.raises(MachineError, match="install a driver"):
        Driver()


@pytest.mark.parametrize(
    ("version", "seqlen", "is_cleared"), [(12080, 64, True), (12080, 4096, False), (13020, 64, False)]
)
def test_descriptor_is_that_of_triton(
    driver: Driver, library: Library, version: int, seqlen: int, is_cleared: bool
) -> None:
    driver.version = version
    pattern = Descriptor("q", (0,) * 4, (0,) * 4, (1, 1, 64, 128), element_type=9, swizzle=3, element_bytes=2)
    made = driver.descriptor(pattern, [1, 2, seqlen, 128], [seqlen * 256, seqlen * 128, 128, 1], 0x9000)
    steps = [256, seqlen * 256, seqlen * 512]
    assert library.maps == [(9, 0x9000, [128, seqlen, 2, 1], steps, [128, 64, 1, 1], 3)]
    address, flags = struct.unpack_from("<QQ", made)
    assert (address, flags) == (0x9000, 2**64 - 1 - (1 << 21) * is_cleared)


ABI = """
#include <stdio.h>
#include <stddef.h>
#include "cuda.h"
#define AT(name) (int) offsetof(CUlaunchConfig, name)
int main() {
    printf("%d %d %d %d %d %d %d ", (int) sizeof(CUlaunchConfig), AT(blockDimX), AT(sharedMemBytes),
           AT(hStream), AT(attrs), AT(numAttrs), (int) sizeof(CUlaunchAttribute));
    printf("%d %d %d %d %d %d %d %d\\n", (int) offsetof(CUlaunchAttribute, value),
           CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
           CUDA_ERROR_INVALID_CONTEXT, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
           CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, CU_FUNC_CACHE_PREFER_SHARED,
           CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")
def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    import triton

    from flashtune.bundle import driver

    headers = Path(triton.__file__).with_name("backends") / "nvidia" / "include"
    source, program = tmp_path / "abi.c", tmp_path / "abi"
    source.write_text(ABI)
    subprocess.run(["gcc", "-I", str(headers), "-o", str(program), str(source)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    config, attribute = driver.LaunchConfig, driver.LaunchAttribute
    offsets = (
        getattr(config, name).offset
        for name in ("block", "shared_bytes", "stream", "attributes", "attribute_count")
    )
    values = (
        ctypes.sizeof(config), *offsets, ctypes.sizeof(attribute), attribute.value.offset,
        driver.PROGRAMMATIC_STREAM_SERIALIZATION, driver.L2_128B, driver.INVALID_CONTEXT,
        driver.MAX_DYNAMIC_SHARED_BYTES, driver.STATIC_SHARED_BYTES, driver.PREFER_SHARED,
        driver.SHARED_BYTES_OPTIN,
    )  # fmt: skip
    assert printed.split() == [*map(str, values)]
