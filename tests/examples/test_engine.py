"""Tests of the C++ program that launches a kernel of a bundle, with a stub of the driver."""

import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from flashtune import testing
from flashtune.bundle.bundle_file import dump_bundle
from flashtune.bundle.program import evaluate
from flashtune.core.target import find_target
from flashtune.launch.binding import compile_binary
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.kernel_cache import kernel_of
from tests.support.engine import SOURCE, build
from tests.support.records import CONTIGUOUS, make_record

PROCESSORS = 132
PROBLEM = testing.problem("heads=4,seqlen=512,head_dim=64,dtype=bf16,causal")
# Memory is that of the host. A launch prints its grid, threads, shared bytes and the words of its parameters.
STUB = r"""
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cuDevicePrimaryCtxRetain
CUresult cuInit(unsigned flags) { return 0; }
CUresult cuGetErrorString(CUresult status, const char** text) { return 0; }
CUresult cuDeviceGet(CUdevice* device, int index) { return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice d) { return *value = 132, 0; }
CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t size) { *at = (CUdeviceptr)malloc(size); return 0; }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t n) { return !memcpy((void*)to, from, n); }
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) { return !memcpy(to, (void*)from, size); }
CUresult cuModuleLoadData(CUmodule* module, const void* code) { return memcmp(code, "\177ELF", 4); }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) { return 0; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value) { return 0; }
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* sizes, const cuuint64_t* steps, const cuuint32_t* box, const cuuint32_t* ones,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) {
    printf("map %d %d", type, swizzle);
    for (unsigned i = 0; i < rank; ++i) printf(" %lu %u", sizes[i], box[i]);
    for (unsigned i = 0; i + 1 < rank; ++i) printf(" %lu", steps[i]);
    printf("\n");
    return 0;
}
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads,
    unsigned ty, unsigned tz, unsigned shared, CUstream stream, void** parameters, void** extra) {
    printf("launch %u %u %u %u %u", x, y, z, threads, shared);
    for (int i = 0; i < atoi(getenv("PARAMETERS")); ++i) printf(" %lu", *(unsigned long*)parameters[i]);
    printf("\n");
    return 0;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["forward_q_outer", "forward_hopper"])
def test_program_launches_the_entry(tmp_path: Path, family: str) -> None:
    record = make_record(PROBLEM, family=family)
    kernel = kernel_of(record, CONTIGUOUS)
    entry, codes = entry_of(kernel, PROBLEM, compile_binary(kernel, find_target("h200")), "12.8")
    (tmp_path / "kernels.bundle").write_bytes(dump_bundle("sm_90", "1", [entry], codes))
    _stub(tmp_path)
    program = build(tmp_path, tmp_path)
    (stage,) = entry.stages
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PARAMETERS": str(len(stage.parameters))}
    words: list[str | Path] = [program, tmp_path / "kernels.bundle", entry.kernel[:8], "4", "512", "64", "1"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    # The stub computes nothing.
    assert ran.returncode == 1, ran.stderr
    *maps, launch, verdict = ran.stdout.splitlines()
    assert verdict.startswith(f"{entry.kernel}: largest difference")
    q = torch.empty(1, 4, 512, 64)
    values = evaluate(entry.plan, [(q.shape, q.stride())] * len(entry.plan.tensors), PROCESSORS)
    grid = [*(values[extent] for extent in stage.grid), 1, 1][:3]
    numbers = [*map(int, launch.split()[1:])]
    assert numbers[:5] == [*grid, stage.threads, stage.shared_bytes]
    for parameter, word in zip(stage.parameters, numbers[5:], strict=True):
        if parameter.name == "scale":
            assert struct.pack("<f", 0.125) == struct.pack("<Q", word)[:4]
        elif parameter.type != "map" and not parameter.name:
            assert word == values[parameter.value]
    expected = []
    for descriptor in entry.plan.descriptors:
        pairs = zip(descriptor.shape[::-1], descriptor.box[::-1], strict=True)
        sizes = [number for extent, box in pairs for number in (values[extent], box)]
        steps = [values[stride] * descriptor.element_bytes for stride in descriptor.strides[-2::-1]]
        expected.append(
            " ".join(map(str, ["map", descriptor.element_type, descriptor.swizzle, *sizes, *steps]))
        )
    assert maps == expected
    for wrong in ([program, tmp_path / "libcuda.so.1", *words[2:]], words[:2]):
        refused = subprocess.run(wrong, env=environment, capture_output=True, text=True, check=False)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


def _stub(folder: Path) -> None:
    import triton

    include = Path(triton.__file__).parent / "backends/nvidia/include"
    (folder / "stub.c").write_text(STUB)
    command = ["gcc", "-shared", "-fPIC", f"-I{include}", "stub.c", "-o", "libcuda.so.1", "-w"]
    if subprocess.run(command, cwd=folder, check=False).returncode:
        pytest.skip("needs gcc and cuda.h")


def test_program_has_at_most_200_lines() -> None:
    assert len(SOURCE.read_text(encoding="utf-8").splitlines()) <= 200
