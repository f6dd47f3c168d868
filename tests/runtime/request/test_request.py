"""Tests of requests: their problems, canonical forms and precision, and refusals."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
import torch

import flashtune
from flashtune import testing
from flashtune.core.canonical import normal_form
from flashtune.core.errors import ProblemError
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.request.arguments import read_causal
from flashtune.request.call import dense_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.runtime.call_key import call_key
from tests.problems.fuzzed_calls import check_fuzzed_calls
from tests.problems.plain_masks import visible


def tensors(
    q: tuple[int, ...] = (2, 8, 16, 64),
    k: tuple[int, ...] = (2, 2, 24, 64),
    v: tuple[int, ...] = (2, 2, 24, 32),
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(q, dtype=dtype), torch.zeros(k, dtype=dtype), torch.zeros(v, dtype=dtype)


def test_request_describes_the_tensors() -> None:
    q, k, v = tensors()
    request = read_call(dense_call(q, k, v, causal=True, return_lse=True, prefer="generated"))
    problem = request.problem
    assert (problem.dtype, problem.causal) == (Dtype.FP16, Causal.BOTTOM_RIGHT)
    assert (problem.heads, problem.kv_heads, problem.head_dim, problem.value_head_dim) == (8, 2, 64, 32)
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv) == (2, 16, 24)
    assert request.out_shape == (2, 8, 16, 32)
    assert request.lse_shape == (2, 8, 16)
    assert request.default_scale == 0.125


def test_both_layouts_have_the_same_problem() -> None:
    q, k, v = tensors()
    first = read_call(dense_call(q, k, v))
    moved = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    second = read_call(dense_call(*moved, layout="bshd"))
    assert first.problem == second.problem
    assert second.out_shape == (2, 16, 8, 32)
    assert second.views(*moved)[0].shape == q.shape


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (False, Causal.NONE),
        (True, Causal.BOTTOM_RIGHT),
        ("top_left", Causal.TOP_LEFT),
        ("bottom_right", Causal.BOTTOM_RIGHT),
        ("none", Causal.NONE),
    ],
)
def test_causal_options(value: bool | str, meaning: Causal) -> None:
    assert Causal(read_causal(value)) is meaning


@pytest.mark.parametrize("value", ["diagonal", 1, None])
def test_other_causal_options_are_refused(value: object) -> None:
    with pytest.raises(ProblemError, match="'top_left' or 'bottom_right'"):
        read_causal(value)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (8, 16, 64)}, "q has 3 dimensions"),
        ({"q": (3, 8, 16, 64)}, "q has 3 sequences and k has 2"),
        ({"q": (2, 7, 16, 64)}, "7 query heads do not divide among 2 KV heads"),
        ({"q": (2, 0, 16, 64)}, "0 query heads"),
        ({"q": (2, 8, 16, 32)}, "q has head dim 32 and k has 64"),
        ({"v": (2, 2, 23, 64)}, r"k is \[2, 2, 24, 64\] and v \[2, 2, 23, 64\]: make all but widths equal"),
        ({"q": (2, 8, 16, 257), "k": (2, 2, 24, 257)}, "kernels take 1 to 256"),
        ({"v": (2, 2, 24, 0)}, "v has head dim 0"),
    ],
)
def test_mismatched_shapes_are_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        read_call(dense_call(*tensors(**shapes)))  # type: ignore[arg-type]


def test_mixed_and_unsupported_tensors() -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match="give them one dtype"):
        read_call(dense_call(q, k.float(), v))
    with pytest.raises(ProblemError, match="move them to one device"):
        read_call(dense_call(q, k.to("meta"), v))
    with pytest.raises(ProblemError, match="float64: no kernel takes it"):
        read_call(dense_call(q.double(), k.double(), v.double(), prefer="generated"))
    with pytest.raises(ProblemError, match="q is a list"):
        flashtune.attention([[1.0]], k, v)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_keys_require_scales(dtype: torch.dtype) -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match="pass k_scale and v_scale"):
        flashtune.explain(q, k.to(dtype), v.to(dtype))


@pytest.mark.parametrize("missing", [0, 1])
def test_varlen_calls_require_cu_seqlens(missing: int) -> None:
    q, starts = torch.zeros(4, 2, 32), [torch.tensor([0, 4], dtype=torch.int32)] * 2
    starts[missing] = None  # type: ignore[call-overload]
    with pytest.raises(ProblemError, match=r"cu_seqlens_[qk] is None: pass where sequences begin"):
        flashtune.attention_varlen(q, q, q, *starts, 4, 4)  # type: ignore[call-overload]


def test_packed_sequences_without_keys_are_empty() -> None:
    q, starts = torch.zeros(4, 2, 32), torch.tensor([0, 4], dtype=torch.int32)
    call = varlen_call(q, q[:0], q[:0], starts, torch.zeros_like(starts), 4, 0, return_lse=True)
    assert read_call(call).is_empty
    assert not read_call(varlen_call(q, q, q, starts, starts, 4, 4, return_lse=True)).is_empty


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"window": (-1, -1)}, True),
        ({"softcap": 0.0}, True),
        ({"window": (None, -1), "chunk": 0, "sink_tokens": 4}, True),
        ({"window": (8, -1)}, False),
        ({"softcap": 2.0}, False),
        ({"chunk": 8}, False),
        ({"sinks": torch.zeros(8)}, False),
    ],
)
def test_call_without_features_is_a_plain_call(options: dict[str, Any], plain: bool) -> None:
    q, k, v = (tensor.to(torch.float8_e4m3fn) for tensor in tensors())
    scales: dict[str, Any] = {"k_scale": torch.ones(2, 2)}
    assert dense_call(q, k, v, **options, **scales).is_plain is plain
    # A plain call comes as far as asking for a GPU; 8-bit queries take no features.
    message = "is computed on a GPU alone" if plain else "with masks, packed sequences, pages"
    for call in (flashtune.attention, flashtune.plan, flashtune.explain):
        with pytest.raises(ProblemError, match=message):
            call(q, k, v, **options, **scales)


def test_strided_last_dimension_error_suggests_contiguous() -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match=r"k's last dimension has stride 24: pass k\.contiguous\(\)"):
        read_call(dense_call(q, k.mT.contiguous().mT, v))


def test_unknown_options() -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match="layout cannot be 'sbhd'"):
        read_call(dense_call(q, k, v, layout="sbhd"))
    with pytest.raises(ProblemError, match="prefer cannot be 'quick'"):
        read_call(dense_call(q, k, v, prefer="quick"))


def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(ProblemError, match="TRITON_INTERPRET=1"):
        flashtune.attention(*tensors())
    with pytest.raises(ProblemError, match="TRITON_INTERPRET=1"):
        flashtune.plan(*tensors())
    with pytest.raises(ProblemError, match="TRITON_INTERPRET=1"):
        flashtune.explain(*tensors())


PROBLEM = testing.problem("heads=1,kv_heads=1,seqlen=8,head_dim=64,dtype=bf16")


MASKED = st.builds(
    functools.partial(msgspec.structs.replace, PROBLEM),
    seqlen_q=st.integers(0, 9),
    seqlen_kv=st.integers(0, 9),
    causal=st.sampled_from(Causal),
    window_left=st.none() | st.integers(0, 10),
    window_right=st.none() | st.integers(0, 10),
    sink_tokens=st.integers(0, 3),
    chunk=st.integers(0, 10),
    packed=st.sampled_from([0, 8]),
)


@pytest.mark.slow
@hypothesis.settings(max_examples=400)
@hypothesis.given(problem=MASKED, prefix=st.integers(0, 3))
def test_canonical_problem_has_the_same_visible_pairs(problem: Problem, prefix: int) -> None:
    problem = msgspec.structs.replace(problem, prefix=prefix > 0)
    normal = normal_form(problem)
    assert normal_form(normal) == normal
    lengths = [(problem.seqlen_q, problem.seqlen_kv)]
    if problem.packed:
        lengths = [(q, k) for q in range(problem.seqlen_q + 1) for k in range(problem.seqlen_kv + 1)]
    for queries, keys in lengths:
        asked, done = (visible(form, queries, keys, prefix) for form in (problem, normal))
        assert torch.equal(asked, done), (queries, keys)


@pytest.mark.parametrize(
    ("asked", "normal"),
    [
        ({"window_left": 7, "causal": Causal.BOTTOM_RIGHT}, {"causal": Causal.BOTTOM_RIGHT}),
        ({"window_left": 6}, {"window_left": 6}),
        ({"window_right": 0}, {"causal": Causal.BOTTOM_RIGHT}),
        ({"window_left": 7, "window_right": 7}, {}),
        ({"chunk": 8, "causal": Causal.BOTTOM_RIGHT}, {"causal": Causal.BOTTOM_RIGHT}),
        ({"sink_tokens": 4}, {}),
        ({"sink_tokens": 4, "chunk": 2}, {"sink_tokens": 4, "chunk": 2}),
    ],
)
def test_bounds_without_effect_are_removed(asked: dict[str, object], normal: dict[str, object]) -> None:
    replace = msgspec.structs.replace
    assert normal_form(replace(PROBLEM, **asked)) == replace(PROBLEM, **normal)


@pytest.fixture(autouse=True)
def highest_afterwards() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def allow_by_backend() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def allow_by_flag() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


ALLOWED = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "backend": allow_by_backend,
    "flag": allow_by_flag,
}


@pytest.mark.parametrize("allow", ALLOWED.values(), ids=ALLOWED)
def test_tf32_is_a_type_of_the_problem_where_torch_allows_it(allow: Callable[[], object]) -> None:
    q = torch.randn(1, 2, 16, 64, requires_grad=True)
    call = dense_call(q, q, q)
    precise, key = read_call(call), call_key(call)
    allow()
    request = read_call(call)
    assert (precise.problem.dtype, request.problem.dtype) == (Dtype.FP32, Dtype.TF32)
    assert request.backward.dtype is Dtype.TF32
    assert request.out_dtype is torch.float32
    assert call_key(call) != key
    torch.set_float32_matmul_precision("highest")
    assert call_key(call) == key


def test_the_setting_does_not_concern_other_types() -> None:
    q = torch.randn(1, 2, 16, 64, dtype=torch.bfloat16)
    call = dense_call(q, q, q)
    before = read_call(call).problem, call_key(call)
    torch.set_float32_matmul_precision("high")
    assert (read_call(call).problem, call_key(call)) == before


@pytest.mark.filterwarnings("ignore")
def test_random_calls_are_served_or_refused_in_one_sentence(fuzz_count: Callable[[int, int], int]) -> None:
    count = fuzz_count(100, 6000)
    served = check_fuzzed_calls(count, (torch.float64, torch.float32, torch.bfloat16))
    assert count / 50 < served < count / 2
