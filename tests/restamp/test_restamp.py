"""Receipts are carried over where two kernels are the same machine code, and nowhere else."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from flashtune import testing
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Direction
from flashtune.core.record import Measurement, Record, Verdict, Versions
from flashtune.core.target import find_target
from flashtune.db.codec import Check
from flashtune.db.table import Timing, TunedTable, dump_table, load_table
from flashtune.dispatch.versions import current_versions
from flashtune.launch.compilation import kernel_folder
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_receipts import sibling
from scripts.restamp.equivalence import difference
from scripts.restamp.restamp import Fate, restamp
from scripts.restamp.table import restamp_table
from tests.support.records import make_record

FAMILY = find_family("forward_q_outer")
TARGET = find_target("nvidia-h200")
PROBLEM = testing.problem("heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal")
CONFIG = FAMILY.default(PROBLEM, TARGET)
TODAY = render(FAMILY, PROBLEM, CONFIG, Specialization())
VERDICT = Verdict(True, 0.4, 12, "", "NVIDIA H200", probes=("random",))
VERSIONS = msgspec.structs.replace(current_versions(FAMILY.name), template="0" * 32)

Change = Callable[[str], str]


def changed(*pairs: tuple[str, str], kernel: Kernel = TODAY) -> Kernel:
    source = kernel.source
    for old, new in pairs:
        assert old in source
        source = source.replace(old, new)
    return msgspec.structs.replace(kernel, source=source)


def renamed(kernel: Kernel = TODAY) -> Kernel:
    """Other names of variables and of an argument: the same machine code."""
    arguments = [*kernel.arguments]
    index = [argument.name for argument in arguments].index("group_size")
    arguments[index] = msgspec.structs.replace(arguments[index], name="heads_per_kv")
    kernel = msgspec.structs.replace(kernel, arguments=tuple(arguments))
    return changed(("running_max", "row_max"), ("group_size", "heads_per_kv"), kernel=kernel)


def record_of(kernel: Kernel) -> Record:
    return make_record(PROBLEM, config=CONFIG, kernel=kernel.digest, versions=VERSIONS, verdict=VERDICT)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    return kernel_folder()


def keep(kernel: Kernel, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kernel.family}_{kernel.digest[:8]}.py"
    path.touch(0o644)
    path.write_text(kernel.source, encoding="utf-8")
    return path


def test_renamed_variables_and_arguments_make_no_difference() -> None:
    assert renamed().digest != TODAY.digest
    assert difference(renamed(), TODAY, PROBLEM, CONFIG, TARGET) == ""


def test_a_changed_instruction_is_a_difference() -> None:
    other = changed(("running_sum * rescale + tl.sum(p, 1)", "running_sum * rescale - tl.sum(p, 1)"))
    assert difference(other, TODAY, PROBLEM, CONFIG, TARGET).startswith("machine code: .text")


def test_other_launch_options_are_a_difference() -> None:
    options = msgspec.structs.replace(TODAY.options, num_warps=2 * TODAY.options.num_warps)
    other = msgspec.structs.replace(TODAY, options=options)
    assert "num_warps" in difference(other, TODAY, PROBLEM, CONFIG, TARGET)


def test_another_grid_is_a_difference() -> None:
    other = changed(("* heads * batch,)", "* heads * batch + 1,)"))
    assert difference(other, TODAY, PROBLEM, CONFIG, TARGET).startswith("launch of ")


def test_other_descriptors_are_a_difference() -> None:
    family = find_family("forward_hopper")
    config = family.default(PROBLEM, TARGET)
    kernel = render(family, PROBLEM, config, Specialization())
    other = changed(("of_head * group_size", "of_head * 1"), kernel=kernel)
    assert difference(other, kernel, PROBLEM, config, TARGET).startswith("descriptors of ")


def test_source_with_another_digest_is_not_used(cache: Path) -> None:
    path = keep(renamed(), cache)
    path.write_text(path.read_text() + "\nraise SystemExit\n", encoding="utf-8")
    (done,) = restamp([record_of(renamed())])
    assert done.fate is Fate.NO_SOURCE


def test_record_with_other_machine_code_is_not_changed(cache: Path) -> None:
    other = changed(("1.4426950408889634", "1.5"))
    keep(other, cache)
    (done,) = restamp([record_of(other)])
    assert (done.fate, done.record.kernel) == (Fate.CHANGED, other.digest)
    assert done.reason.startswith("machine code")


def test_equal_digest_under_another_template_version_is_restamped() -> None:
    (done,) = restamp([record_of(TODAY)])
    assert done.fate is Fate.CARRIED
    assert done.record.versions.template != VERSIONS.template
    (again,) = restamp([done.record])
    assert again.fate is Fate.CURRENT


def test_swapped_gradients_are_a_difference() -> None:
    family = find_family("backward_split")
    problem = msgspec.structs.replace(PROBLEM, direction=Direction.BACKWARD)
    config = family.default(problem, TARGET)
    kernel = render(family, problem, config, Specialization())
    arguments = list(kernel.arguments)
    places = [[argument.name for argument in arguments].index(name) for name in ("dk", "dv")]
    arguments[places[0]], arguments[places[1]] = arguments[places[1]], arguments[places[0]]
    other = msgspec.structs.replace(kernel, arguments=tuple(arguments))
    assert "bound to" in difference(other, kernel, problem, config, TARGET)


@pytest.mark.parametrize("turned", [False, True])
def test_each_problem_of_a_kernel_is_compared(turned: bool, cache: Path) -> None:
    other = changed(("* heads * batch,)", "* heads * batch + (seqlen_q > 4096),)"))
    keep(other, cache)
    large = msgspec.structs.replace(PROBLEM, seqlen_q=8192, seqlen_kv=8192)
    records = [record_of(other), msgspec.structs.replace(record_of(other), problem=large)]
    fates = [outcome.fate for outcome in restamp(records[::-1] if turned else records)]
    assert fates == ([Fate.CHANGED, Fate.CARRIED] if turned else [Fate.CARRIED, Fate.CHANGED])


def test_record_of_another_triton_is_not_changed(cache: Path) -> None:
    keep(renamed(), cache)
    versions = msgspec.structs.replace(VERSIONS, triton="99.0")
    (done,) = restamp([msgspec.structs.replace(record_of(renamed()), versions=versions)])
    assert done.fate is Fate.OTHER_TRITON


def test_launch_code_that_fails_is_a_difference(cache: Path) -> None:
    other = changed(("def launch_plan(", "def launch_plans("))
    keep(other, cache)
    (done,) = restamp([record_of(other)])
    assert done.fate is Fate.CHANGED
    assert done.reason.startswith("the earlier launch code fails here")


OTHER_TRITON = msgspec.structs.replace(VERSIONS, triton="99.0")


def check_of(digest: str, versions: Versions) -> Check:
    return Check(digest=digest, target=TARGET.name, versions=versions, verdict=VERDICT)


def time_of(record: Record, versions: Versions) -> Timing:
    measured = Measurement(0.3, 0.3, 0.3, 9)
    return Timing(
        problem=record.problem.key, kernel=str(record.kernel), versions=versions, measurement=measured
    )


def restamped(path: Path, table: TunedTable) -> TunedTable:
    path.write_bytes(dump_table(table))
    restamp_table(path)
    return load_table(path)


def test_only_evidence_of_the_compared_compilers_is_moved(tmp_path: Path, cache: Path) -> None:
    old = renamed()
    keep(old, cache)
    record = record_of(old)
    driver = msgspec.structs.replace(VERSIONS, driver="999.1")
    receipts = check_of(old.digest, driver), check_of(old.digest, OTHER_TRITON)
    times = time_of(record, driver), time_of(record, OTHER_TRITON)
    table = TunedTable(target=TARGET.name, records=(record,), receipts=receipts, times=times)
    done = restamped(tmp_path / "table.json", table)
    here = current_versions(FAMILY.name).template
    moved = check_of(TODAY.digest, msgspec.structs.replace(driver, template=here))
    assert set(done.receipts) == {moved, receipts[1]}
    (timing,) = done.times
    assert (timing.kernel, timing.versions) == (TODAY.digest, moved.versions)


def test_all_evidence_is_moved_if_the_kernel_is_equal(tmp_path: Path) -> None:
    record = record_of(TODAY)
    digest = digest_of(msgspec.structs.replace(record, specialization=sibling(record)))
    receipts = check_of(TODAY.digest, OTHER_TRITON), check_of(digest, OTHER_TRITON)
    table = TunedTable(
        target=TARGET.name, records=(record,), receipts=receipts, times=(time_of(record, OTHER_TRITON),)
    )
    done = restamped(tmp_path / "table.json", table)
    assert {receipt.digest for receipt in done.receipts} == {TODAY.digest, digest}
    versions = [receipt.versions for receipt in done.receipts] + [time.versions for time in done.times]
    assert {version.template for version in versions} == {current_versions(FAMILY.name).template}
    assert {version.triton for version in versions} == {"99.0"}


def test_receipt_is_not_moved_while_a_record_needs_it(tmp_path: Path, cache: Path) -> None:
    other = changed(("* heads * batch,)", "* heads * batch + (seqlen_q > 4096),)"))
    keep(other, cache)
    large = msgspec.structs.replace(PROBLEM, seqlen_q=8192, seqlen_kv=8192)
    slow = msgspec.structs.replace(record_of(other), problem=large, measurement=Measurement(9.0, 9.0, 9.0, 9))
    receipt = check_of(other.digest, msgspec.structs.replace(VERSIONS, driver="999.1"))
    table = TunedTable(target=TARGET.name, records=(record_of(other), slow), receipts=(receipt,))
    done = restamped(tmp_path / "table.json", table)
    assert {record.kernel for record in done.records} == {TODAY.digest, other.digest}
    assert {moved.digest for moved in done.receipts} == {TODAY.digest, other.digest}


@pytest.mark.parametrize("kind", ["fifo", "large", "writable by others"])
def test_file_that_is_not_a_source_is_not_read(kind: str, cache: Path) -> None:
    path = keep(renamed(), cache)
    if kind == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif kind == "writable by others":
        path.chmod(0o666)
    else:
        os.truncate(path, 2**34)
    (done,) = restamp([record_of(renamed())])
    assert done.fate is Fate.NO_SOURCE
