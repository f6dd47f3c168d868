"""Tests of requests: their problems, features, canonical forms and precision, and refusals."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.core.canonical import normal_form
from flashtune.core.errors import ProblemError
from flashtune.core.layouts import Layout
from flashtune.core.problem import Bias, Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.request.arguments import read_causal
from flashtune.request.call import dense_call, paged_call, varlen_call
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


INT = torch.int32


def dense(**options: Any) -> Any:
    q = torch.zeros(2, 4, 10, 32, dtype=torch.bfloat16)
    k, v = q.new_zeros(2, 2, 20, 32), q.new_zeros(2, 2, 20, 16)
    return read_call(dense_call(q, k, v, return_lse=False, **options))


def varlen(tokens: int = 300, longest: int = 100, **options: Any) -> Any:
    q = torch.zeros(tokens, 4, 32)
    k = torch.zeros(500, 2, 32)
    ends = torch.zeros(4, dtype=INT)
    return read_call(varlen_call(q, k, k, ends, ends, longest, 200, return_lse=False, **options))


def cache(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pages = torch.zeros(shape or (9, 16, 2, 32), dtype=dtype)
    return pages, pages, torch.zeros(3, 5, dtype=INT), torch.zeros(3, dtype=INT)


def pages(q: Tensor, *operands: Any, **options: Any) -> Any:
    return read_call(paged_call(q, *(operands or cache()), return_lse=True, **options))


def test_masks() -> None:
    problem = dense(causal=True, window=(5, -1), sink_tokens=2, softcap=3.0, chunk=8).problem
    assert (problem.window_left, problem.window_right, problem.causal) == (5, None, Causal.BOTTOM_RIGHT)
    assert (problem.sink_tokens, problem.softcap, problem.chunk) == (2, True, 8)
    assert dense(window=(None, 4)).problem.window_right == 4
    assert not dense(window=(-1, -1), softcap=0.0).problem.features
    assert not dense(causal=True, window=(4096, 0)).problem.features
    assert dense(attn_bias=torch.zeros(20, dtype=torch.bfloat16).expand(10, 20)).problem.bias is Bias.ADDITIVE
    assert dense(attn_mask=torch.ones(10, 20, dtype=torch.bool)).problem.bias is Bias.BOOLEAN
    assert dense(kv_lengths=torch.zeros(2, dtype=INT)).problem.kv_lengths


def test_bias_is_constant_unless_it_requires_grad() -> None:
    q = torch.zeros(2, 4, 10, 32, requires_grad=True)
    bias = torch.zeros(10, 20)
    call = functools.partial(dense_call, q, *torch.zeros(2, 2, 4, 20, 32), return_lse=False)
    assert read_call(call(attn_bias=bias)).constant_bias
    assert not read_call(call(attn_bias=bias.clone().requires_grad_())).constant_bias
    assert not read_call(call(attn_bias=bias), needs_grad=False).constant_bias
    assert not read_call(call(attn_mask=bias == 0)).constant_bias


def test_varlen_extents_are_rounded_to_powers_of_two() -> None:
    request = varlen()
    assert (request.problem.packed, request.problem.seqlen_q, request.problem.seqlen_kv) == (512, 128, 256)
    assert (request.problem.batch, request.tokens) == (3, 300)
    assert request.out_shape == (300, 4, 32)
    assert request.lse_shape == (4, 300)
    assert varlen(299, 65).problem == request.problem
    assert varlen(window=(255, 0), causal=True).problem.window_left is None
    assert varlen(window=(254, 0), causal=True).problem.window_left == 254


def test_pages() -> None:
    token = pages(torch.zeros(3, 4, 32))
    assert token.layout is Layout.BHD
    assert (token.problem.page_size, token.problem.seqlen_q, token.problem.seqlen_kv) == (16, 1, 128)
    assert (token.out_shape, token.lse_shape) == ((3, 4, 32), (3, 4))
    few = pages(torch.zeros(3, 2, 4, 32))
    assert (few.problem.seqlen_q, few.out_shape, few.lse_shape) == (2, (3, 2, 4, 32), (3, 4, 2))
    packed = pages(torch.zeros(7, 4, 32), cu_seqlens_q=torch.zeros(4, dtype=INT), max_seqlen_q=5)
    assert (packed.problem.packed, packed.problem.seqlen_q, packed.lse_shape) == (8, 8, (4, 7))
    other = pages(torch.zeros(3, 4, 32), *cache(9, 2, 64, 32), layout="hnd")
    assert (other.problem.page_size, other.problem.kv_heads) == (64, 2)
    keys, _, *lengths = cache(9, 16, 1, 576)
    latent = pages(torch.zeros(3, 4, 576), keys, None, *lengths, value_head_dim=512)
    assert latent.problem.mla
    assert latent.out_shape == (3, 4, 512)
    assert latent.views(torch.zeros(3, 4, 576), keys, keys)[2].shape == (9, 1, 16, 512)


@pytest.mark.parametrize(
    ("shape", "kind"), [((1,), KvScale.TENSOR), ((2,), KvScale.HEAD), ((9, 2), KvScale.PAGE)]
)
def test_quantised_caches(shape: tuple[int, ...], kind: KvScale) -> None:
    scales = {"k_scale": torch.ones(shape), "v_scale": torch.ones(1)}
    operands = cache(9, 16, 2, 32, dtype=torch.float8_e4m3fn)
    problem = pages(torch.zeros(3, 4, 32), *operands, **scales).problem
    assert (problem.kv_dtype, problem.kv_scale) == (KvDtype.E4M3, kind)


def test_expanded_page_scales_are_head_scales() -> None:
    shared = {name: torch.ones(2).expand(9, 2) for name in ("k_scale", "v_scale")}
    operands = cache(9, 16, 2, 32, dtype=torch.int8)
    assert pages(torch.zeros(3, 4, 32), *operands, **shared).problem.kv_scale is KvScale.HEAD
    mixed = {**shared, "v_scale": torch.ones(9, 2)}
    assert pages(torch.zeros(3, 4, 32), *operands, **mixed).problem.kv_scale is KvScale.PAGE


TOKEN = torch.zeros(3, 4, 32)
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: dense(window=5), r"window cannot be 5: pass \(left, right\)"),
    (lambda: dense(window=(-2, 0)), "the window's left bound cannot be -2: pass a number of keys, or -1"),
    (lambda: dense(softcap=-1.0), "softcap cannot be -1.0: pass a positive number"),
    (lambda: dense(chunk=-8), "chunk cannot be -8: pass how many keys"),
    (lambda: dense(sink_tokens=1.5), "sink_tokens cannot be 1.5"),
    (lambda: dense(alibi_slopes=torch.zeros(3)), r"alibi_slopes has shape \[3\]: pass contiguous \[4\]"),
    (
        lambda: dense(alibi_slopes=torch.zeros(4).half()),
        "alibi_slopes is torch.float16: pass",
    ),
    (lambda: dense(sinks=torch.zeros(2)), r"sinks has shape \[2\]: pass \[4\]"),
    (lambda: dense(attn_bias=torch.zeros(10, 20)), "attn_bias is torch.float32 and q torch.bfloat16"),
    (lambda: dense(attn_bias=TOKEN, attn_mask=TOKEN == 0), "attn_bias and attn_mask are both given"),
    (lambda: dense(attn_mask=torch.zeros(10, 20)), "attn_mask is torch.float32: pass a bool tensor"),
    (
        lambda: dense(attn_mask=torch.ones(9, 20, dtype=torch.bool)),
        r"has shape \[9, 20\]: pass \[2, 4, ",
    ),
    (lambda: dense(attn_mask=torch.ones(10, 1, dtype=torch.bool)), r"has shape \[10, 1\]: pass"),
    (lambda: dense(kv_lengths=torch.zeros(3, dtype=INT)), r"has shape \[3\]: pass \[2\] for 2 sequences"),
    (lambda: dense(prefix_lengths=torch.zeros(2)), "prefix_lengths is torch.float32: pass prefix_lengths.to"),
    (lambda: dense(sinks=torch.zeros(4), k_scale=torch.ones(1)), "k_scale is given and k is torch.bfloat16"),
    (lambda: dense(sinks=torch.zeros(4, device="meta")), "sinks is on meta and q on cpu: move it there"),
    (lambda: varlen(longest=-1), "max_seqlen_q cannot be -1"),
    (
        lambda: varlen(sinks=torch.zeros(4), prefix_lengths=torch.zeros(2, dtype=INT)),
        r"has shape \[2\]: pass \[3\]",
    ),
    (lambda: pages(TOKEN, *cache(9, 20, 2, 32)), "pages of 20 keys are not supported"),
    (lambda: pages(TOKEN, *cache(), layout="dhn"), "layout cannot be 'dhn': pass 'nhd' or 'hnd'"),
    (lambda: pages(TOKEN, *cache(), max_seqlen_q=3), "cu_seqlens_q and max_seqlen_q belong together"),
    (lambda: pages(TOKEN, *cache(), value_head_dim=16), "pass one of v_cache and value_head_dim"),
    (
        lambda: pages(TOKEN, cache()[0], None, *cache()[2:], value_head_dim=0),
        "value_head_dim cannot be 0: pass how many columns",
    ),
    (lambda: pages(TOKEN[:2]), r"kv_lengths has shape \[3\]: pass \[2\]"),
    (
        lambda: pages(TOKEN, *cache()[:2], torch.zeros(2, 5, dtype=INT), torch.zeros(3, dtype=INT)),
        r"block_table has shape \[2, 5\]: pass \[3, pages of the longest\]",
    ),
    (lambda: pages(TOKEN, *cache(9, 16, 2, 32, dtype=torch.int8)), "pass k_scale and v_scale"),
    (lambda: pages(TOKEN.to(torch.float8_e4m3fn)), "q is torch.float8_e4m3fn: with masks, packed sequences"),
    (lambda: pages(TOKEN.half()), "q, k and v are torch.float16, torch.float32 and torch.float32"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[sentence[:24] for _, sentence in WRONG])
def test_invalid_requests_are_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ProblemError, match=sentence):
        call()
