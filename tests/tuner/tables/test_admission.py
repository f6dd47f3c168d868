"""Import, export, merge and verification refuse records that disagree with their family, GPU or kernel."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune import testing
from flashtune.core.errors import TableError
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Bias, Dtype
from flashtune.core.record import PeerTime, Provenance, Record, SharedTime
from flashtune.core.target import TARGETS, find_target
from flashtune.db.codec import Check, decode_record, encode_record
from flashtune.db.errors import UnreadableRecord
from flashtune.db.store import open_store
from flashtune.db.table import TunedTable, dump_table, shipped_table
from flashtune.templates.registry import find_family, template_hash
from flashtune.tuner.tables import admission
from flashtune.tuner.tables.admission import (
    facts_of,
    least_ms,
    require_sound_evidence,
    why_refused,
)
from flashtune.tuner.tables.table_files import import_tables, json_table, kernel_files, triton_configs
from flashtune.tuner.tables.table_receipts import part_of
from flashtune.tuner.verify.record_checks import verify_records
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.probes import EVERY_LEVEL, INVARIANCE
from flashtune.verification.shapes import Tile, shapes_of
from tests.support.records import shipped_table_of

H200 = find_target("h200")


def shipped(family: str) -> Record:
    """Returns the first shipped record of a family."""
    table = shipped_table_of("nvidia-h200")
    return next(record for record in table.records if record.family == family)


def of_gpu(name: str) -> Record:
    return msgspec.structs.replace(shipped("forward_q_outer"), target=name)


def changed(record: Record, part: str, **changes: Any) -> Record:
    value = msgspec.structs.replace(getattr(record, part), **changes)
    return msgspec.structs.replace(record, **{part: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", [target.name for target in TARGETS if shipped_table(target.name)])
def test_every_shipped_record_is_admitted(name: str) -> None:
    table = shipped_table_of(name)
    assert [reason for record in table.records if (reason := why_refused(record))] == []


@pytest.mark.parametrize("name", [target.name for target in TARGETS if shipped_table(target.name)])
def test_no_shipped_time_is_below_the_roofline(name: str) -> None:
    table = shipped_table_of(name)
    target = find_target(name)
    below = [
        record.problem.key
        for record in table.records
        if record.ms is not None and record.ms < least_ms(record.problem, target)
    ]
    assert below == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("problem", {"window_left": 5}, "forward_q_outer has no window"),
    ("problem", {"head_dim": 1000, "value_head_dim": 1000}, "does not compute its problem"),
    ("problem", {"dtype": Dtype.E4M3}, "does not compute its problem"),
    ("config", {"num_warps": 32}, "is not in the space"),
    ("config", {"block_n": 1024}, "its kernel asks for"),
    ("config", {"num_stages": 8}, "is not in the space"),
    ("specialization", {"lse": True}, "stale receipt"),
    ("specialization", {"alignment": Alignment.EIGHT}, "stale receipt"),
    ("resources", {"sram_bytes": 300_000}, "asks for 300000 B of SRAM"),
    ("resources", {"warps": 64}, "has 2048 threads"),
    ("resources", {"tensor_memory_columns": 8}, "columns of tensor memory"),
    ("verdict", {"device": "NVIDIA A100-SXM4-80GB"}, "receipt of another GPU"),
    ("verdict", {"device": "interpreter"}, "no receipt"),
    ("verdict", {"probes": msgspec.UNSET}, "a receipt without the probes far_below, last, needle"),
    ("verdict", {"probes": ("random",)}, "a receipt without the probes far_below, last, needle"),
    ("measurement", {"peers": (PeerTime("sdpa-cudnn", 1e-6),)}, "time of sdpa-cudnn of 1e-06 ms is below"),
    ("measurement", {"ms": 1e-6, "p20": 1e-6}, "is below"),
]


@pytest.mark.parametrize(
    ("family", "sharing", "ms", "reason"),
    [
        ("forward_masked", MaskSharing.HEADS, 1e-6, "with a shared mask is below"),
        ("forward_hopper", MaskSharing.HEADS, 1.0, "that its problem does not share"),
        ("forward_masked", MaskSharing.HEADS, 1.0, ""),
    ],
)
def test_impossible_times_with_shared_masks_are_refused(
    family: str, sharing: MaskSharing, ms: float, reason: str
) -> None:
    table = shipped_table_of("nvidia-h200")
    biased = family == "forward_masked"
    record = next(
        row
        for row in table.records
        if row.family == family and (row.problem.bias is not Bias.NONE) is biased and row.problem.heads > 1
    )
    shared = SharedTime(sharing, ms, (PeerTime("sdpa-cudnn", 1.0),))
    refusal = why_refused(changed(record, "measurement", shared=(shared,)))
    assert (reason in refusal) if reason else (refusal == "")


@pytest.mark.parametrize(("part", "changes", "reason"), REFUSED)
def test_import_export_and_verify_apply_the_same_checks(
    part: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    record = changed(shipped("forward_q_outer"), part, **changes)
    assert reason in why_refused(record)
    for export in (lambda: json_table(record.target, [record]), lambda: kernel_files([record])):
        with pytest.raises(TableError, match=r"record 1 cannot be used: "):
            export()
    with pytest.raises(TableError, match="cannot be used"):
        triton_configs([record])
    path = tmp_path / "table.json"
    path.write_bytes(dump_table(TunedTable(target=record.target, records=(record,))))
    with pytest.raises(TableError, match=r"table\.json, record 1 cannot be used: ") as caught:
        import_tables([path], str(tmp_path / "db.sqlite"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "db.sqlite").exists()
    (result,) = verify_records([record], gpu=None).results
    assert reason in result.failed


def test_other_digest_is_refused_only_under_the_current_template(tmp_path: Path) -> None:
    record = msgspec.structs.replace(shipped("forward_q_outer"), kernel="0" * 32)
    assert record.versions.template == template_hash(record.family)
    assert "stale receipt" in why_refused(record)
    older = changed(record, "versions", template="0" * 32)
    assert why_refused(older) == ""
    path = tmp_path / "table.json"
    path.write_bytes(json_table(record.target, [older]))
    assert import_tables([path], str(tmp_path / "db.sqlite")).selections_added == 1


def test_merge_skips_refused_selections(tmp_path: Path) -> None:
    good = shipped("forward_q_outer")
    bad = changed(good, "problem", window_left=5)
    with open_store(str(tmp_path / "theirs.sqlite")) as store:
        for record in (good, bad):
            store.pin(store.add(record))
    with open_store(str(tmp_path / "ours.sqlite")) as store:
        with pytest.warns(UnreadableRecord, match="1 selections of .* were left out: .* no window"):
            counts = store.merge_from(str(tmp_path / "theirs.sqlite"), why_refused)
        assert counts.selections_added == 1
        assert [selection.record for selection in store.selections()] == [good]


def test_baseline_requires_a_supported_problem() -> None:
    good = shipped("forward_q_outer")
    baseline = msgspec.structs.replace(good, family="sdpa", config=None, kernel=None)
    assert why_refused(baseline) == ""
    wide = changed(baseline, "problem", head_dim=1000, value_head_dim=1000)
    assert "no kernel family computes its problem" in why_refused(wide)


@pytest.mark.parametrize("packed", [1, 10**6])
def test_packed_tokens_must_fit_their_sequences(packed: int) -> None:
    record = changed(shipped("forward_q_outer"), "problem", packed=packed)
    assert "packed tokens" in why_refused(record)


def test_a_predicted_record_needs_no_receipt() -> None:
    record = msgspec.structs.replace(
        shipped("forward_q_outer"), provenance=Provenance.PREDICTED, verdict=None
    )
    assert why_refused(record) == ""


def test_unknown_gpu_is_refused_and_siblings_have_listed_properties() -> None:
    record = shipped("forward_q_outer")
    unknown = msgspec.structs.replace(record, target="nvidia-x9000")
    assert "there is no target 'nvidia-x9000' here" in why_refused(unknown)
    assert facts_of(of_gpu("nvidia-h200-mig-1g.18gb")) == H200
    # An alias is no name of a target: dispatch would never find the record.
    assert facts_of(of_gpu("h200")) is None


def test_gpu_of_this_machine_is_accepted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = msgspec.structs.replace(H200, name="nvidia-of-mine")
    monkeypatch.setattr(admission, "device_target", lambda index: mine)
    assert facts_of(of_gpu("nvidia-of-mine")) is mine


def test_record_of_an_unlisted_gpu_is_checked_by_its_properties() -> None:
    gpu = msgspec.structs.replace(H200, name="nvidia-x9000")
    record = changed(msgspec.structs.replace(of_gpu(gpu.name), gpu=gpu), "verdict", device="NVIDIA X9000")
    assert facts_of(record) == gpu
    assert why_refused(record) == ""
    assert decode_record(encode_record(record)) == record
    small = msgspec.structs.replace(gpu, sram_per_block=1024)
    assert "its kernel asks for" in why_refused(msgspec.structs.replace(record, gpu=small))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "nvidia-x8000"}, "its facts are those of nvidia-x8000"),
        ({"sram_per_block": -1}, "sram_per_block"),
        ({"arch": "sm_ninety"}, "arch"),
        ({"peak": {"half": 0.0, "fp32": 1.0}}, "half"),
    ],
)
def test_impossible_gpu_properties_are_refused(changes: dict[str, Any], reason: str) -> None:
    gpu = msgspec.to_builtins(msgspec.structs.replace(H200, name="nvidia-x9000")) | changes
    raw = json.loads(encode_record(of_gpu("nvidia-x9000"))) | {"gpu": gpu}
    with pytest.raises(TableError, match=reason):
        decode_record(json.dumps(raw).encode())


def test_ragged_sequences_are_bounded_by_measured_lengths() -> None:
    problem = shipped("decode_split_kv").problem
    equal = msgspec.structs.replace(problem, batch=64, seqlen_kv=8192, page_size=0, window_left=None)
    ragged = msgspec.structs.replace(equal, page_size=16)
    assert 0.7 < least_ms(ragged, H200) / least_ms(equal, H200) < 0.8
    many = msgspec.structs.replace(ragged, batch=2**31 - 1)
    assert "too many" in why_refused(msgspec.structs.replace(shipped("decode_split_kv"), problem=many))


def test_output_that_fits_the_cache_is_not_counted() -> None:
    problem = testing.problem("heads=10,seqlen_q=4096,seqlen_kv=77,head_dim=64,dtype=bf16,batch=8")
    assert problem.written_bytes() < H200.l2_bytes
    read = problem.minimal_bytes() - problem.written_bytes()
    assert least_ms(problem, H200) == pytest.approx(read / (H200.hbm_bandwidth * 1e6))


def test_receipts_without_probes_are_refused(tmp_path: Path) -> None:
    table = shipped_table_of("nvidia-h200")
    whole = part_of(table, [shipped("forward_q_outer").problem])
    receipt = whole.receipts[0]
    bare = msgspec.structs.replace(receipt.verdict, probes=msgspec.UNSET)
    path = tmp_path / "table.json"
    bare_receipt = msgspec.structs.replace(receipt, verdict=bare)
    path.write_bytes(dump_table(msgspec.structs.replace(whole, receipts=(bare_receipt,))))
    with pytest.raises(TableError, match="receipt 1 cannot be used"):
        import_tables([path], str(tmp_path / "db.sqlite"))


def test_receipts_of_batch_invariant_kernels_name_their_probe(tmp_path: Path) -> None:
    (problem,) = parse_shape("heads=8,seqlen=512,head_dim=64,dtype=bf16,batch_invariant")
    config = find_family("forward_hopper").default(problem, H200)
    other = shipped("forward_hopper")
    plain = msgspec.structs.replace(
        other, problem=problem, config=config, specialization=Specialization(), measurement=None
    )
    record = msgspec.structs.replace(plain, kernel=admission.digest_of(plain), resources=None)
    assert "without the probes invariance" in why_refused(record)
    proven = changed(record, "verdict", probes=(*EVERY_LEVEL, INVARIANCE))
    assert why_refused(proven) == ""
    with_lse = msgspec.structs.replace(proven, specialization=Specialization(lse=True))
    digest, verdict = admission.digest_of(with_lse), record.verdict
    assert verdict is not None
    receipt = Check(digest=digest, target=H200.name, versions=record.versions, verdict=verdict)
    table = TunedTable(target=H200.name, records=(proven,), receipts=(receipt,))
    with pytest.raises(TableError, match=r"receipt 1 cannot be used: .* without the probes invariance"):
        require_sound_evidence(table, "table")


def test_every_check_has_the_probes_that_receipts_must_have() -> None:
    for text in ("heads=1,seqlen=1,head_dim=64", "heads=2,seqlen=64,head_dim=64,causal,window=3"):
        (problem,) = parse_shape(text)
        shapes = shapes_of(Tile(64, 64, 2), problem, quick=True)
        assert {shape.probe for shape in shapes} >= EVERY_LEVEL
