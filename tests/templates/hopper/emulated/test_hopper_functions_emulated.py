"""Tests of emulated Hopper kernels with score and mask functions, against torch's in float64."""

import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from flashtune.core.block_mask import BLOCK_SIZE
from flashtune.core.expressions.evaluation import Values, evaluate
from flashtune.core.expressions.text import parse_functions
from flashtune.core.features.functions import function_tensors, integers_of
from flashtune.core.features.records import NO_EXTRA_INPUTS, TABLES, ExtraInputs
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype, Problem
from flashtune.request.functions.call import flex_call
from flashtune.templates.rendering import render
from tests.emulator.block_lists import lists_of_blocks
from tests.emulator.program import emulate
from tests.interpreter.test_flex_attention import (
    BATCH,
    CASES,
    HEADS,
    KEYS,
    QUERIES,
    WIDTH,
    inputs,
    mask_of,
)
from tests.problems.exact_lists import exact_lists
from tests.problems.hopper import FAMILY, a_config
from tests.problems.plain_masks import largest_error
from tests.problems.random_functions import FLOATS, INTS, random_functions, random_tables
from tests.support.fuzzing import fuzz_count

ALONE = {
    "num_consumer_groups": 1, "rows_per_group": 64, "block_n": 64, "num_stages": 3, "q_stages": 2,
    "ping_pong": False, "order": "lpt",
}  # fmt: skip
PAIR = {**ALONE, "num_consumer_groups": 2, "num_stages": 2, "ping_pong": True}
TALL = {**ALONE, "rows_per_group": 128, "block_n": 128, "conditional_rescale": False}
# Configs and the blocks of block masks.
LAYOUTS = {"one group": (ALONE, 64), "two groups": (PAIR, 128), "parts": (ALONE, 128), "tall": (TALL, 128)}
UNTOUCHED = 777.0
# Bounds where torch computes in float32, as captured values are of that type. A constant of gelu is too.
IN_FLOAT32 = {"alibi": 3e-5, "rows": 1e-5, "gate": 1e-6, "nested": 1e-6, "no score": 1e-6, "activation": 1e-8}


@pytest.fixture(autouse=True)
def computed_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels of functions compute those that are features too."""
    monkeypatch.setattr("flashtune.request.functions.call.built_in", lambda *_, **__: None)


def error_of(name: str, layout: str, text: str = "", wrong: str = "") -> float:
    """Returns the error of outputs and log-sum-exps of a kernel against torch with a case's functions.

    `wrong` replaces a text of the kernel.
    """
    (config, size), case = LAYOUTS[layout], CASES[name]
    q, k, v = inputs(2)
    mask = mask_of(case, size)
    call = flex_call(
        q, k, v, case.score, mask, None, enable_gqa=True, return_lse=True, list_blocks=exact_lists
    )
    side = call.side
    if mask is None:
        size = 0 if side.block_counts is None else BLOCK_SIZE
    problem = Problem(
        dtype=Dtype.BF16, head_dim=WIDTH, value_head_dim=WIDTH, heads=HEADS, kv_heads=2, batch=BATCH,
        seqlen_q=QUERIES, seqlen_kv=KEYS, functions=parse_functions(str(call.options.functions)),
        block_mask=size,
    )  # fmt: skip
    if side.block_counts is not None:
        assert side.block_indices is not None
        assert side.full_counts is not None
        shape = BATCH, HEADS, side.block_counts.shape[-1]
        side = side._replace(
            block_counts=side.block_counts.expand(shape),
            full_counts=side.full_counts.expand(shape),
            block_indices=side.block_indices.expand(*shape, -1),
        )
    results = emulated(problem, config, (q, k, v), side, text, wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = q.double(), k.double(), v.double()
        expected = flex_attention(*wide, case.score, mask, enable_gqa=True, return_lse=True)
    return largest_error(results, expected, UNTOUCHED)


def emulated(
    problem: Problem,
    config: dict[str, Any],
    tensors: tuple[Tensor, ...],
    side: ExtraInputs,
    text: str = "",
    wrong: str = "",
) -> tuple[Tensor, Tensor]:
    """Returns the outputs and log-sum-exps of a kernel."""
    chosen = a_config(problem, **config)
    kernel = render(FAMILY, problem, chosen, Specialization(lse=True))
    assert text in kernel.source
    if text:
        kernel = msgspec.structs.replace(kernel, source=kernel.source.replace(text, wrong))
    q = tensors[0]
    out = torch.full(q.shape, UNTOUCHED, dtype=torch.float64)
    lse = np.full(q.numel() // WIDTH, UNTOUCHED)
    like = tuple(torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for tensor in (*tensors, q))
    memory = (*(tensor.double().flatten().numpy() for tensor in tensors), out.view(-1).numpy())
    extra_inputs = tuple(
        (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy() for tensor in side.tensors
    )
    workspaces = lists_of_blocks(problem, chosen, side) if problem.block_mask else ()
    emulate(kernel, like, memory, extra_inputs, lse, WIDTH**-0.5, 2, workspaces)
    return out, torch.from_numpy(lse).view(q.shape[:3])


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_torch(name: str, layout: str) -> None:
    assert error_of(name, layout) < IN_FLOAT32.get(name, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(fuzz_count(20, 500)))
def test_random_functions(seed: int) -> None:
    functions, ints, order = random_functions(seed)
    tensors = tuple(inputs(2))
    tables = [random_tables()[place] for place in order]
    numbers = [INTS[place] for place in ints]
    captured: dict[str, Any] = dict(zip(TABLES, tables, strict=False))
    side = NO_EXTRA_INPUTS._replace(
        function_ints=torch.tensor(integers_of(numbers, tables), dtype=torch.int32),
        function_floats=torch.tensor(FLOATS),
        **captured,
    )
    problem = Problem(
        dtype=Dtype.BF16, head_dim=WIDTH, value_head_dim=WIDTH, heads=HEADS, kv_heads=2, batch=BATCH,
        seqlen_q=QUERIES, seqlen_kv=KEYS, functions=functions,
    )  # fmt: skip
    needed = function_tensors(problem)
    side = side._replace(
        **{name: None for name in ("function_ints", "function_floats") if name not in needed}
    )
    results = emulated(problem, ALONE, tensors, side)
    scores = tensors[0].double() @ tensors[1].double().repeat_interleave(2, 1).mT * WIDTH**-0.5
    extents = (BATCH, (-1, 1, 1, 1)), (HEADS, (-1, 1, 1)), (QUERIES, (-1, 1)), (KEYS, (-1,))
    batch, head, query, key = (torch.arange(extent).view(shape) for extent, shape in extents)
    own = Values(batch, head, query, key, torch.tensor(numbers), torch.tensor(FLOATS), tuple(tables), scores)
    if functions.score >= 0:
        scores = evaluate(functions, own, functions.score).expand_as(scores)
    if functions.mask >= 0:
        scores = torch.where(evaluate(functions, own, functions.mask), scores, -torch.inf)
    lse = scores.logsumexp(-1)
    # Rows with poles, and those of which the largest scores exceed the precision, are left out.
    usable = scores.abs().nan_to_num(posinf=0.0).amax(-1) < 1e4
    usable &= ~(scores.isnan() | scores.isposinf()).any(-1)
    out = torch.softmax(scores, -1).nan_to_num() @ tensors[2].double().repeat_interleave(2, 1)
    torch.testing.assert_close(results[1][usable], lse[usable], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(results[0][usable], out[usable], atol=1e-4, rtol=1e-4)


# A text of a kernel and another one in its place, by the name of the case.
MISTAKES = (
    ("causal", "row_1 + 1", "row_1 + 0"),
    ("causal", "if has_effect != 0:", "if has_effect == 0:"),
    ("causal by score", "select_pairs(s, word_2)", "s"),
    ("alibi", "scheduler.group_size + this.head", "scheduler.group_size"),
    ("alibi", "row_max += ", "row_max += 0.0 * "),
    ("alibi", "start = (n_block * BLOCK_N - origin", "start = (n_block * BLOCK_N + 1 - origin"),
    ("relative bias", "gl.minimum(32, pair_7)", "gl.minimum(31, pair_7)"),
    ("relative bias from the end", "index + size, index", "index, index"),
    ("softcap and window", "* -2.8853900817779268", "* -2.8"),
    ("no score", "(n_last + 1) * BLOCK_N > this.seqlen_kv", "(n_last + 1) * BLOCK_N < 0"),
    ("documents", "== row_", "!= row_"),
    ("checkerboard", ">> 4", ">> 3"),
    ("neighbourhood", "(rest ^ b) < 0", "(rest ^ b) > 0"),
    ("gate", "score_scale = s_scale_log2 * LN_2", "score_scale = s_scale_log2"),
    ("temperature", "table_0 + scalar", "table_0 + 0 * scalar"),
    ("no score", "gl.zeros_like(s)", "s"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "wrong"), MISTAKES)
def test_wrong_kernels_have_other_results(name: str, text: str, wrong: str) -> None:
    assert not error_of(name, "parts", text, wrong) < 1e-3
