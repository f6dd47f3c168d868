"""`flex_attention` in the interpreter, against torch's, which computes in float64."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils.flop_counter import FlopCounterMode

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import BlockLists, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.request.functions.tracing import trace
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel, check_rendered
from tests.interpreter.families.kernel_calls import small_config

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 150, 210, 16
MASKED = find_family("forward_masked")


class Case(NamedTuple):
    """A score function and a mask function."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    heads: int | None = 1  # Heads of the block mask; None for those of the queries.


def window_of(size: int) -> Callable[..., Any]:
    return lambda b, h, q, k: (q + 60 - k < size) & (k <= q + 60)


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return LIMIT * torch.tanh(score / LIMIT)


LIMIT = 1.5
PAIRS = torch.randn(QUERIES, KEYS)
SLOPES, TABLE, GATES = torch.rand(HEADS), torch.randn(HEADS, 65), torch.randn(BATCH, QUERIES)
DOCUMENTS_Q = torch.arange(QUERIES, dtype=torch.int32) // 40
DOCUMENTS_K = torch.arange(KEYS, dtype=torch.int64) // 56
PREFIXES, VISIBLE = torch.tensor([30, 90]), torch.rand(HEADS, KEYS) < 0.6
TEMPERATURES, NEAREST = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.bfloat16), torch.tensor(20)
STARTS, TILES = torch.tensor([0, 56, 12, 64]), torch.randint(7, (5, 3))
ROWS_Q, ROWS_K = torch.randn(BATCH, QUERIES, 6), torch.randn(HEADS, KEYS, 6)
ACTIVATE, BEYOND = torch.nn.functional.gelu, torch.full((BATCH,), 2**29 + 5, dtype=torch.int32)
CASES = {
    "causal": Case(mask=lambda b, h, q, k: q >= k),
    "causal by score": Case(lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))),
    "alibi": Case(lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "relative bias": Case(lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-32, 32) + 32]),
    "relative bias from the end": Case(lambda s, b, h, q, k: s + TABLE[h][(k - q).clamp(-65, 64)]),
    "softcap and window": Case(capped, window_of(50)),
    "prefix": Case(mask=lambda b, h, q, k: (k < PREFIXES[b]) | (q >= k)),
    "documents": Case(mask=lambda b, h, q, k: DOCUMENTS_Q[q] == DOCUMENTS_K[k]),
    "dilated": Case(mask=lambda b, h, q, k: (abs(q - k) % 3 == 0) & (q + NEAREST >= k)),
    "checkerboard": Case(mask=lambda b, h, q, k: ((q - k) // 16 % 2 == 0) ^ (h % 2 == 0), heads=None),
    "neighbourhood": Case(
        mask=lambda b, h, q, k: ((q % 15 - k % 15).abs() <= 3) & ((q // 15 - k // 15).abs() <= 3)
    ),
    "bias of pairs": Case(lambda s, b, h, q, k: s + PAIRS[q, k]),
    "gate": Case(lambda s, b, h, q, k: s * torch.sigmoid(GATES[b, q]) + torch.log(1.0 + torch.exp(s / 8))),
    "temperature": Case(lambda s, b, h, q, k: s / TEMPERATURES[h], lambda b, h, q, k: VISIBLE[h, k], None),
    "hidden by both": Case(
        lambda s, b, h, q, k: torch.where(k % 7 != 0, s, float("-inf")), lambda b, h, q, k: q >= k
    ),
    "no score": Case(lambda s, b, h, q, k: SLOPES[h] * 1.0, lambda b, h, q, k: k > 5),
    "bits": Case(mask=lambda b, h, q, k: ((q ^ k) & 6 == 0) | (((q >> 3) << 2) < (~k & 31) | 3)),
    "nested": Case(lambda s, b, h, q, k: s + TABLE[h, STARTS[DOCUMENTS_K[k]]] * ROWS_Q[b, q][2]),
    "rows": Case(lambda s, b, h, q, k: s + (ROWS_Q[b, q] * ROWS_K[h, k]).sum(-1)),
    "tiles": Case(mask=lambda b, h, q, k: (TILES[q // 32] == (k // 32).unsqueeze(-1)).any(-1)),
    "waves": Case(
        lambda s, b, h, q, k: torch.sin(s) + torch.cos(s * b) - torch.tan(s / 900) + torch.sqrt(abs(s) + 1)
    ),
    "hidden scores": Case(lambda s, b, h, q, k: torch.where((s <= 0.3) & (q >= k), s, -torch.inf)),
    "silu": Case(lambda s, b, h, q, k: torch.nn.functional.silu(s)),
    "activation": Case(lambda s, b, h, q, k: torch.log(ACTIVATE(s) + 1)),
    "distance of floats": Case(mask=lambda b, h, q, k: (q * 0.5 - k).abs() < 2.5),
    "equal floats": Case(
        mask=lambda b, h, q, k: (q * 0.1 == k * 0.1) | (q / 7 < k / 7) & ((q * q + k * k).sqrt() / 50 >= 0.5)
    ),
    "large numbers": Case(mask=lambda b, h, q, k: q + 2**29 - k >= BEYOND[b]),
    "nothing visible": Case(mask=lambda b, h, q, k: (q < 70) & (k < 100)),
}


def inputs(kv_heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((HEADS, QUERIES), (kv_heads, KEYS), (kv_heads, KEYS))
    return [torch.randn(BATCH, heads, length, WIDTH) for heads, length in shapes]


def mask_of(case: Case, size: Any = 128) -> Any:
    if case.mask is None:
        return None
    heads = HEADS if case.heads is None else case.heads
    batch = BATCH if case is CASES["prefix"] else None
    return flex.create_block_mask(case.mask, batch, heads, QUERIES, KEYS, device="cpu", BLOCK_SIZE=size)


def check(
    score: Any, mask: Any, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    q, k, v = (tensor.to(dtype) for tensor in inputs(kv_heads))
    options["enable_gqa"] = kv_heads < HEADS
    out, lse = flashtune.flex_attention(q, k, v, score, mask, return_lse=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = q.double(), k.double(), v.double()
        exact, exact_lse = flex.flex_attention(*wide, score, mask, return_lse=True, **options)
    torch.testing.assert_close(out, exact.to(dtype), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, exact_lse.to(dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_torch(name: str) -> None:
    case = CASES[name]
    check(case.score, mask_of(case), kv_heads=2 if name == "documents" else HEADS)


@pytest.mark.parametrize("name", CASES)
def test_unfused_results_in_float64(name: str) -> None:
    case = CASES[name]
    check(case.score, mask_of(case, 64), dtype=torch.float64)


@pytest.mark.parametrize("size", [64, (128, 64), (256, 128)])
def test_block_sizes(size: Any) -> None:
    check(None, mask_of(CASES["softcap and window"], size), scale=0.3)


def test_torchs_mask_of_one_block_shows_all_keys() -> None:
    q, k, _ = inputs()
    check(CASES["alibi"].score, flex._create_empty_block_mask(q, k))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["alibi", "causal by score", "dilated", "checkerboard", "nothing visible"])
@pytest.mark.parametrize("queries", [1, 16])
def test_few_queries_are_decoded(queries: int, name: str) -> None:
    (q, k, v), case = inputs(2), CASES[name]
    q = q[:, :, :queries].contiguous()
    # A mask of all heads, since lists of single heads are not those of tiles.
    heads = None if name == "checkerboard" else 1
    mask = case.mask and flex.create_block_mask(case.mask, None, heads, queries, KEYS, device="cpu")
    arguments: dict[str, Any] = {"score_mod": case.score, "block_mask": mask, "enable_gqa": True}
    selection = flashtune.explain_flex(q, k, v, **arguments).selection
    assert selection is not None
    assert selection.record.family == "decode_split_kv"
    out, lse = flashtune.flex_attention(q, k, v, **arguments, return_lse=True)
    wide = q.double(), k.double(), v.double()
    exact, exact_lse = flex.flex_attention(*wide, **arguments, return_lse=True)
    torch.testing.assert_close(out, exact.float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, exact_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_strides_of_outputs_are_those_of_torch() -> None:
    k, v = (torch.randn(2, 3, 40, width) for width in (16, 24))
    queries = [torch.randn(2, 20, 3, 48)[..., :16].transpose(1, 2)]
    for order, length in itertools.product(itertools.permutations(range(3)), (1, 20)):
        memory = torch.randn([(2, 3, length)[place] for place in order] + [16])
        queries.append(memory.permute(*map(order.index, range(3)), 3))
    for q in queries:
        other: Any = flex.flex_attention(q, k, v, capped)
        out, _ = flashtune.flex_attention(q, k, v, capped, return_lse=True)
        unfused = flashtune.flex_attention(q.double(), k.double(), v.double(), capped)
        with FlopCounterMode(display=False):
            by_operator = flashtune.flex_attention(q, k, v, capped)
        assert out.stride() == unfused.stride() == by_operator.stride() == other.stride()
        torch.testing.assert_close(out, other, atol=1e-5, rtol=1e-4)


def test_sequences_that_share_their_keys() -> None:
    q, k, v = inputs()
    case = CASES["alibi"]
    out = flashtune.flex_attention(q, k[:1], v[:1], case.score)
    shared = (tensor[:1].expand(tensor.shape).double() for tensor in (k, v))
    exact: Any = flex.flex_attention(q.double(), *shared, case.score)  # type: ignore[call-overload]
    torch.testing.assert_close(out, exact.float(), atol=1e-5, rtol=1e-4)


def test_a_mask_of_flashtune() -> None:
    q, k, v = inputs()
    seen = torch.rand(3, 4) < 0.6
    mask = flashtune.BlockMask.from_blocks(seen, 64)
    out = flashtune.flex_attention(q, k, v, CASES["alibi"].score, mask)
    shown = seen.repeat_interleave(64, 0).repeat_interleave(64, 1)[:QUERIES, :KEYS]
    bias = (-SLOPES[:, None, None] * (torch.arange(QUERIES)[:, None] - torch.arange(KEYS))).where(
        shown, -torch.inf
    )
    exact = torch.softmax(q @ k.mT / WIDTH**0.5 + bias, -1).nan_to_num() @ v
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-4)


def test_other_captured_values_and_lengths_need_no_other_kernel() -> None:
    digests = set()
    for size, table in ((20, SLOPES), (90, torch.rand(7))):
        q, k, v = (tensor[:, :, : QUERIES + size // 4] for tensor in inputs())
        mask = flex.create_block_mask(window_of(size), None, None, q.shape[2], k.shape[2], device="cpu")

        def score(s: Any, b: Any, h: Any, q: Any, k: Any, table: Tensor = table) -> Any:
            return s + table[h]

        explained = flashtune.explain_flex(q, k, v, score, mask)
        digests.add(explained.kernel)
    assert len(digests) == 1


def test_compiled_programs_break_their_graph() -> None:
    q, k, v = inputs()
    score = CASES["alibi"].score

    @torch.compile(backend="eager")
    def program(q: Tensor) -> Tensor:
        return flashtune.flex_attention(2 * q, k, v, score) + 1

    expected = flashtune.flex_attention(2 * q, k, v, score) + 1
    torch.testing.assert_close(program(q), expected)


def a_problem(name: str) -> Problem:
    """Returns a problem with the functions of a case."""
    case = CASES[name]
    return Problem(
        dtype=Dtype.FP32, head_dim=16, value_head_dim=16, heads=2, kv_heads=1, batch=2, seqlen_q=70,
        seqlen_kv=150, functions=trace(case.score, case.mask).functions, block_mask=64 if case.mask else 0,
        block_lists=BlockLists.GROUP if name == "causal" else BlockLists.HEAD,
    )  # fmt: skip


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", CASES)
def test_kernels_pass_the_verification(name: str) -> None:
    problem = a_problem(name)
    target, device = find_target("nvidia-h200"), torch.device("cpu")
    config = small_config(MASKED, problem.key, (32, 64), split_masked_loop=len(name) % 2 == 0, num_splits=1)
    verdict = check_kernel(MASKED, problem, config, Specialization(), target, device, Level.QUICK)
    assert verdict.passed, verdict


def test_functions_have_no_trees_or_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, target = a_problem("alibi"), find_target("nvidia-h200")
    assert MASKED.supports(problem, target) is None
    for feature in ("tree", "batch_invariant"):
        assert MASKED.supports(msgspec.structs.replace(problem, **{feature: True}), target)
    q, k, v = inputs()
    monkeypatch.setattr("flashtune.request.invariance._is_default", True)
    with pytest.raises(ProblemError, match=r"\(batch_invariant, functions\).*leave out batch_invariant"):
        flashtune.flex_attention(q, k, v, CASES["alibi"].score)


# A text of a kernel and another one in its place, by the name of the case.
MISTAKES = (
    ("causal", "<= row_1[:, None]", "<= row_1[:, None] + 1"),
    ("causal", "| (start < n_listed_full)", "| (start < n_listed_full + BLOCK_N)"),
    ("causal", "n_full_max = n_listed_full", "n_full_max = n_listed_full + BLOCK_N"),
    ("causal by score", "visible &= function_mask", "visible &= function_mask | True"),
    ("alibi", "scalar_1 = head", "scalar_1 = kv_head"),
    ("relative bias from the end", "index + size, index", "index, index"),
    ("relative bias", "tl.minimum(queries, seqlen_q - 1)", "queries + 1"),
    ("softcap and window", "1.0 - 2.0 /", "1.0 - 1.9 /"),
    ("softcap and window", "tl.load(function_floats + 0)", "tl.load(function_floats + 0) * 1.01"),
    ("documents", "== row", "!= row"),
    ("checkerboard", "quotient - 1, quotient", "quotient, quotient"),
    ("neighbourhood", "(rest ^ b) < 0", "(rest ^ b) > 0"),
    ("gate", "s *= score_scale", "s *= score_scale * 1.001"),
    ("temperature", "table_0 + scalar", "table_0 + 0 * scalar"),
    ("bits", " ^ ", " | "),
    ("bits", "6 & pair", "7 & pair"),
    ("bits", " >> 3", " >> 2"),
    ("nested", "place_in(2, size", "place_in(1, size"),
    ("activation", "tl.erf", "tl.sin"),
    ("waves", "tl.cos(pair_7", "tl.cos(1.01 * pair_7"),
    ("no score", "+ tl.zeros_like(s)", "+ s"),
)


@pytest.mark.parametrize(("name", "text", "wrong"), MISTAKES)
def test_wrong_kernels_are_rejected(name: str, text: str, wrong: str) -> None:
    problem = a_problem(name)
    config = small_config(MASKED, name, (32, 64), split_masked_loop=True, num_splits=1)
    kernel = render(MASKED, problem, config, Specialization())
    assert text in kernel.source, kernel.source
    patched = msgspec.structs.replace(kernel, source=kernel.source.replace(text, wrong))
    target, device = find_target("nvidia-h200"), torch.device("cpu")
    assert not check_rendered(patched, problem, config, target, device, Level.QUICK).passed
