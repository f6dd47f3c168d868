"""Tests of dispatch with a native family that cannot address every tensor."""

import math
from collections.abc import Callable

import msgspec
import pytest
import torch

from flashtune.core.errors import KernelError, ProblemError
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Record, Selection, VerificationStatus
from flashtune.core.target import Target, find_target
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import Backend, Decision, choose
from flashtune.dispatch.lookup import default_selection, default_selections, select
from flashtune.dispatch.tables import Tables, tuned_records
from flashtune.request.call import dense_call
from flashtune.runtime.kernel_loader import LoadedKernel
from flashtune.runtime.passes import forward_pass, prepared
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from tests.support.machine import PROBLEM, Machine
from tests.support.records import make_record

H200 = find_target("h200")
ALIGNED, MISALIGNED = Specialization(), Specialization(Alignment.ANY)


def tables(*shipped: Record, database: tuple[Record, ...] = ()) -> Tables:
    return Tables(by_problem(database), by_problem(shipped))


def resized(problem: Problem, length: int, **changes: object) -> Problem:
    return msgspec.structs.replace(problem, seqlen_q=length, seqlen_kv=length, **changes)


def chosen(problem: Problem, tuned: Tables, needed: Specialization) -> Selection:
    return select(problem, H200, tuned, needed, generated=True)


def test_fallback_serves_tensors_that_the_selection_cannot_address(native: Family) -> None:
    selected, portable = make_record(PROBLEM, 0.5, family=native.name), make_record(PROBLEM, ms=1.0)
    for tuned in (tables(selected, portable), tables(portable, selected)):
        assert chosen(PROBLEM, tuned, ALIGNED).record is selected
        selection = chosen(PROBLEM, tuned, MISALIGNED)
        assert (selection.record, selection.source, selection.standing) == (
            portable,
            "shipped",
            VerificationStatus.TIMED,
        )


@pytest.mark.parametrize(("head_dim", "dtype"), [(96, Dtype.BF16), (80, Dtype.FP16)])
@pytest.mark.parametrize("alignment", [Alignment.ANY, Alignment.TWO, Alignment.FOUR])
def test_config_that_is_wrong_for_unaligned_tensors_serves_aligned_ones(
    head_dim: int, dtype: Dtype, alignment: Alignment
) -> None:
    problem = msgspec.structs.replace(PROBLEM, head_dim=head_dim, value_head_dim=head_dim, dtype=dtype)
    family = find_family("forward_q_outer")
    config = msgspec.structs.replace(family.default(problem, H200), split_head_dim=True)
    tuned = tables(make_record(problem, family=family.name, config=config))
    for shape in (problem, resized(problem, 300)):
        assert chosen(shape, tuned, ALIGNED).record.config == config
        other = chosen(shape, tuned, Specialization(alignment)).record.config
        assert other is not None
        assert not dict(other.items())["split_head_dim"]


def test_no_shipped_config_serves_tensors_that_its_family_refuses() -> None:
    tuned = tuned_records("h200")
    for record in tuned.effective():
        if not record.problem.features:
            for alignment in Alignment:
                specialization = Specialization(alignment)
                choice = chosen(record.problem, tuned, specialization).record
                family = find_family(choice.family)
                assert family.can_load(choice.config, choice.problem.dtype, specialization)


def test_shipped_fallback_serves_where_the_user_selection_cannot(native: Family) -> None:
    mine, shipped = make_record(PROBLEM, 0.5, family=native.name), make_record(PROBLEM)
    tuned = tables(shipped, database=(mine,))
    assert chosen(PROBLEM, tuned, ALIGNED).source == "database"
    assert chosen(PROBLEM, tuned, MISALIGNED).source == "shipped"
    assert tuned.effective() == (mine, shipped)
    assert tables(mine, database=(shipped,)).effective() == (shipped,), "what is never reached is not in use"


def test_nearest_record_then_default_serve_without_a_fallback(native: Family) -> None:
    selected, far = make_record(PROBLEM, 0.5, family=native.name), make_record(resized(PROBLEM, 8192))
    selection = chosen(PROBLEM, tables(selected, far), MISALIGNED)
    assert (selection.record, selection.source) == (far, "estimated")
    selection = chosen(PROBLEM, tables(selected), MISALIGNED)
    assert (selection.record.family, selection.source) == ("forward_q_outer", "default")


def test_nearest_record_prefers_the_selection_over_the_fallback(native: Family) -> None:
    selected, portable = make_record(PROBLEM, 0.5, family=native.name), make_record(PROBLEM)
    for tuned in (tables(selected, portable), tables(portable, selected)):
        assert chosen(resized(PROBLEM, 700), tuned, ALIGNED).record is selected
        assert chosen(resized(PROBLEM, 700), tuned, MISALIGNED).record is portable


def test_records_of_unsupported_families_are_not_neighbours(native: Family) -> None:
    near, far = make_record(PROBLEM, 0.5, family=native.name), make_record(resized(PROBLEM, 8192))
    many_heads = msgspec.structs.replace(PROBLEM, heads=128)
    assert native.supports(many_heads, H200)
    assert chosen(many_heads, tables(near, far), ALIGNED).record is far
    assert chosen(many_heads, tables(near), ALIGNED).record.family == "forward_q_outer"


def test_native_default_precedes_portable_defaults(native: Family) -> None:
    def family_of(problem: Problem, target: Target, needed: Specialization) -> str:
        return default_selection(problem, target, needed).record.family

    assert family_of(PROBLEM, H200, ALIGNED) == native.name
    assert family_of(PROBLEM, H200, MISALIGNED) == "forward_q_outer"
    assert family_of(PROBLEM, find_target("a100"), ALIGNED) == "forward_q_outer"
    wide = msgspec.structs.replace(PROBLEM, dtype=Dtype.FP32)
    assert family_of(wide, H200, ALIGNED) == "forward_q_outer"
    names = [selection.record.family for selection in default_selections(PROBLEM, H200, ALIGNED)]
    assert names == [native.name, "forward_q_outer", "decode_split_kv", "forward_kv_outer"]


def test_error_contains_the_reason_of_each_family(native: Family) -> None:
    huge = msgspec.structs.replace(PROBLEM, head_dim=512, value_head_dim=512)
    with pytest.raises(
        ProblemError, match=r"forward_native takes head dims.*forward_q_outer takes head dims"
    ):
        default_selection(huge, H200, ALIGNED)


def test_gluon_kernels_are_not_selected_under_the_interpreter(
    native: Family, interpret: Callable[[], None]
) -> None:
    interpret()
    assert default_selection(PROBLEM, H200, ALIGNED).record.family == "forward_q_outer"


def tensors(length: int, misaligned: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values; misaligned ones have rows of one element more."""
    width = 65 if misaligned else 64
    q, k, v = (torch.empty(2, heads, length, width, dtype=torch.bfloat16) for heads in (8, 2, 2))
    return q[..., :64], k[..., :64], v[..., :64]


def decided(tuned: Tables, misaligned: bool) -> tuple[BoundRequest, Decision]:
    machine = Machine()
    machine.tables = tuned
    call = dense_call(*tensors(512, misaligned), causal=True, prefer="generated")
    bound = BoundRequest.of(call, platform=machine)
    return bound, choose(bound)[0]


def test_explain_names_the_rejected_family(native: Family, copy_ms: Callable[[float], None]) -> None:
    tuned = tables(make_record(PROBLEM, 0.5, family=native.name), make_record(PROBLEM))
    _, aligned = decided(tuned, misaligned=False)
    assert aligned.reason == "it is selected in the table that ships for this GPU"
    _, copied = decided(tuned, misaligned=True)
    assert copied.reason.startswith("q, k, v are copied first")
    copy_ms(math.inf)
    _, misaligned = decided(tuned, misaligned=True)
    assert misaligned.selection is not None
    assert misaligned.selection.record.family == "forward_q_outer"
    assert misaligned.reason.startswith("forward_native would serve but cannot address tensors")


def test_failed_kernel_is_replaced_by_another_family(native: Family) -> None:
    tried: list[str] = []

    class RefusesNative(Machine):
        def load(self, selection: Selection, *_: object) -> LoadedKernel:
            tried.append(f"{selection.record.family} {selection.source}")
            if selection.record.family == native.name:
                raise KernelError("AttributeError: this Triton calls it otherwise")
            return LoadedKernel(None, H200, None)  # type: ignore[arg-type]

        def bind(self, *_: object, **__: object) -> None:  # type: ignore[override]
            pass

    tuned = tables(make_record(PROBLEM, 0.5, family=native.name), make_record(PROBLEM))
    bound, decided_for = decided(tuned, misaligned=False)
    assert decided_for.backend is Backend.GENERATED
    with pytest.warns(FlashtuneWarning, match="calls it otherwise, so a default config serves"):
        served = prepared(decided_for, forward_pass(bound, RefusesNative()))
    assert callable(served)
    assert tried == ["forward_native shipped", "forward_native default", "forward_q_outer default"]
