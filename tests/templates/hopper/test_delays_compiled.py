"""Tests of compiled kernels with random delays."""

import pytest

from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.verification.schedule_fuzzing import delayed
from tests.mutants.catalogue import gpu_mutants
from tests.mutants.core import rendered

FIRST = {mutant.subject.family: mutant.subject for mutant in reversed(gpu_mutants())}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["forward_hopper", "backward_hopper", "decode_latent_hopper"])
def test_every_delay_point_compiles_to_a_sleep(family: str) -> None:
    kernel = delayed(rendered(FIRST[family]))
    assert kernel is not None
    binary = compile_kernel(kernel, find_target("h200"))
    # Each group has its own copy of the code that it runs, and unrolled loops have several.
    assert binary.asm["ptx"].count("nanosleep.u32") >= kernel.source.count("    fall_behind()\n")
    kept = compile_kernel(rendered(FIRST[family]), find_target("h200"))
    assert "nanosleep" not in kept.asm["ptx"]
    assert kept.metadata.shared == binary.metadata.shared
