"""Kernels are compiled before they are timed; that needs no GPU."""

import msgspec
import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype
from flashtune.core.record import Outcome
from flashtune.core.target import find_target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.kernel_cache import kernel_of
from flashtune.tuner.bench.driver import compile_ahead
from flashtune.tuner.bench.grids import grid_problems

H200 = find_target("h200")
# A kernel that takes no more than a moment to compile.
SMALL = msgspec.structs.replace(grid_problems("paper")[0], dtype=Dtype.FP16)


@pytest.mark.xdist_group("processes")
def test_each_selected_kernel_is_compiled_once() -> None:
    more = msgspec.structs.replace(SMALL, batch=SMALL.batch + 1)
    tables = tuned_records(H200.name)
    expected = {
        kernel_of(select(problem, H200, tables, Specialization(), generated=True).record, Specialization())
        for problem in (SMALL, more)
    }
    compiled = compile_ahead((SMALL, more, SMALL), H200)
    assert {compilation.kernel for compilation in compiled} == {kernel.digest for kernel in expected}
    assert len(compiled) == len(expected)
    assert all(compilation.outcome is Outcome.OK for compilation in compiled)


def test_unsupported_problems_are_skipped() -> None:
    wide = msgspec.structs.replace(SMALL, head_dim=512, value_head_dim=512)
    assert compile_ahead((wide,), H200) == ()
