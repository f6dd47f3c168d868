"""Records of backward passes on their way through verification and export."""

import msgspec
import pytest

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.db.table import TunedTable, dump_table, parse_table
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.tables.table_files import kernel_files
from flashtune.tuner.verify import record_checks, verify_jobs
from flashtune.tuner.verify.record_checks import CheckMethod
from tests.support.records import make_record

FAMILY = find_family("backward_split")
TARGET = find_target("h200")
PROBLEM = testing.problem("heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal,backward")


def a_record(config: str = "") -> Record:
    return make_record(PROBLEM, family=FAMILY.name, config=config)


def test_table_contains_both_passes_of_a_shape() -> None:
    record = a_record()
    data = dump_table(TunedTable(target=TARGET.name, records=(record,)))
    (parsed,) = parse_table(data, "a table").records
    assert parsed == record
    assert parsed.problem.key.startswith("backward_bf16_d64")


@pytest.mark.slow
def test_kernels_equal_under_the_interpreter_are_interpreted_once() -> None:
    subjects = [
        record_checks._subject(a_record(f"dq_warps={warps},dq_stages={stages}"))
        for warps, stages in ((4, 2), (8, 3))
    ]
    sources = set()
    for subject in subjects:
        assert isinstance(subject, verify_jobs.Subject)
        assert record_checks._task(subject).problem.is_backward
        sources.add(record_checks._source(subject))
    assert len(sources) == 1
    assert subjects[0] != subjects[1]


def test_every_kernel_of_a_launch_must_compile_and_fit() -> None:
    kernel = render(FAMILY, PROBLEM, a_record().config, Specialization())  # type: ignore[arg-type]
    assert verify_jobs.why_not_compiled(kernel, TARGET) == ""
    tight = msgspec.structs.replace(TARGET, sram_per_block=1024)
    assert "of SRAM" in verify_jobs.why_not_compiled(kernel, tight)
    assert kernel.epilogue is not None
    lost = msgspec.structs.replace(kernel.epilogue, arguments=())
    broken = msgspec.structs.replace(kernel, epilogue=lost)
    assert "does not compile" in verify_jobs.why_not_compiled(broken, TARGET)


def test_exported_file_documents_the_gradient_call() -> None:
    (file,) = kernel_files([a_record()])
    assert file.name.startswith("backward_split_bf16_d64_causal_bottom_right_m")
    assert "# `attention_backward(q, k, v, out, lse, dout, scale)` runs it." in file.text
    assert "def attention_backward(" in file.text


@pytest.mark.slow
def test_a_record_is_compiled_and_interpreted() -> None:
    report = record_checks.verify_records([a_record()], gpu=None)
    (result,) = report.results
    assert result.failed == ""
    assert result.method is CheckMethod.INTERPRETER
    assert result.receipt is not None
