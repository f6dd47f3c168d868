"""Tests in the interpreter of the kernel that combines the splits of Hopper's tiles, and of its mutants."""

import math

import msgspec
import pytest
import torch

from flashtune.core.kernel import Kernel, Specialization
from flashtune.launch.compilation import load_module
from flashtune.templates.family import ORDERED_KEYS
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.mutants.core import Mutant, broken, rendered
from tests.mutants.forward_hopper.hopper_splits import PACKED, combining
from tests.problems.hopper import a_config, a_problem

HEADS, TOKENS, END = 3, 7, 5
UNTOUCHED = 777.0


# Keys of a batch-invariant split.
SPLIT_KEYS = ORDERED_KEYS
SINKS = torch.tensor([40.0, 0.0, 30.0])


def error_of(kernel: Kernel, splits: int, width: int, *, packed: bool) -> float:
    """Returns the largest error of combined outputs and log-sum-exps, infinite for NaN.

    One row saw nothing, and others nothing in some splits. Packed sequences end before their tensor.
    """
    torch.manual_seed(0)
    # The interpreter has no kernels at the same time.
    source = kernel.source.replace("    tl.extra.cuda.gdc_wait()\n", "")
    module = load_module(msgspec.structs.replace(kernel, source=source))
    rows = HEADS * TOKENS
    parts, logs = torch.randn(splits, rows, width), 3 * torch.randn(splits, rows) + 40
    logs[:, 3] = -math.inf
    logs[1, ::2] = -math.inf
    parts[logs == -math.inf] = math.nan
    out = torch.full((1, TOKENS, HEADS, width), UNTOUCHED).transpose(1, 2)
    lse = torch.full((1, HEADS, TOKENS), UNTOUCHED)
    q, k = torch.empty(1, HEADS, TOKENS, width), torch.empty(1, 1, splits * SPLIT_KEYS, width)
    starts = torch.tensor([0, 2, END], dtype=torch.int32)
    side = (starts, starts) if packed else ()
    grid, integers = module.epilogue_plan(q, k, k, out, *side)
    module.combine[grid](out, lse, parts, logs, *side[:1], *integers)
    natural = logs.double() * math.log(2)
    weights = natural.softmax(0).nan_to_num(0.0)
    expected = (weights[..., None] * parts.double().nan_to_num(0.0)).sum(0).view(HEADS, TOKENS, width)
    exact = natural.logsumexp(0).view(HEADS, TOKENS)
    if packed:
        expected[:, END:], exact[:, END:] = UNTOUCHED, UNTOUCHED
    same = torch.where(lse[0] == exact, 0.0, (lse[0] - exact).abs())
    return float(torch.stack([(out[0] - expected).abs().max(), same.max()]).nan_to_num(math.inf).max())


@pytest.mark.parametrize(("splits", "width"), [(2, 128), (31, 80), (132, 24), (7, 256)])
@pytest.mark.parametrize("packed", [False, True])
def test_splits_are_combined(splits: int, width: int, packed: bool) -> None:
    problem = a_problem(width, packed=int(packed))
    config = a_config(problem, num_splits=splits, split_epilogue=False, pack_gqa=1)
    kernel = render(find_family("forward_hopper"), problem, config, Specialization(lse=True))
    assert error_of(kernel, splits, width, packed=packed) < 1e-4


@pytest.mark.parametrize("mutant", combining(), ids=lambda mutant: mutant.name)
def test_mutants_are_wrong(mutant: Mutant) -> None:
    width = PACKED.problem.value_head_dim
    splits: int = PACKED.config.num_splits  # type: ignore[attr-defined]
    assert error_of(rendered(PACKED), splits, width, packed=True) < 1e-4
    assert error_of(broken(mutant), splits, width, packed=True) > 1e-2


def rows_in_order(
    kernel: Kernel, parts: torch.Tensor, logs: torch.Tensor, side: torch.Tensor = SINKS
) -> torch.Tensor:
    """Returns the combined rows of a batch-invariant kernel with one extra input."""
    source = kernel.source.replace("    tl.extra.cuda.gdc_wait()\n", "")
    module = load_module(msgspec.structs.replace(kernel, source=source))
    splits, _, width = parts.shape
    out, lse = torch.empty(1, HEADS, TOKENS, width), torch.empty(1, HEADS, TOKENS)
    q, k = torch.empty(1, HEADS, TOKENS, width), torch.empty(1, 1, splits * SPLIT_KEYS, width)
    grid, integers = module.epilogue_plan(q, k, k, out, side)
    module.combine[grid](out, lse, parts, logs, side, *integers)
    return out[0].flatten(0, 1)


@pytest.mark.parametrize(("splits", "width"), [(2, 128), (31, 80), (9, 256)])
def test_splits_of_a_row_are_combined_in_one_order(splits: int, width: int) -> None:
    torch.manual_seed(0)
    problem = a_problem(width, sinks=True, batch_invariant=True)
    config = a_config(problem, num_splits=2, split_epilogue=False, pack_gqa=1)
    kernel = render(find_family("forward_hopper"), problem, config, Specialization(lse=True))
    parts, logs = torch.randn(splits, HEADS * TOKENS, width), 3 * torch.randn(splits, HEADS * TOKENS) + 40
    rows = rows_in_order(kernel, parts, logs)
    natural = torch.cat([logs.double() * math.log(2), SINKS.repeat_interleave(TOKENS)[None]])
    expected = (natural.softmax(0)[:splits, :, None] * parts.double()).sum(0)
    assert torch.allclose(rows.double(), expected, atol=1e-5)
    # Splits without keys before and after those of a row, and more of them in the workspace.
    hidden = torch.full((5, *logs.shape[1:]), -math.inf)
    more = torch.cat([torch.randn(5, *parts.shape[1:]), parts, torch.randn(5, *parts.shape[1:])])
    assert torch.equal(rows_in_order(kernel, more, torch.cat([hidden, logs, hidden])), rows)


def test_lengths_that_end_beyond_the_workspace_have_all_splits() -> None:
    torch.manual_seed(0)
    problem = a_problem(16, kv_lengths=True, batch_invariant=True)
    config = a_config(problem, num_splits=2, split_epilogue=False, pack_gqa=1)
    kernel = render(find_family("forward_hopper"), problem, config, Specialization(lse=True))
    parts, logs = torch.randn(3, HEADS * TOKENS, 16), torch.randn(3, HEADS * TOKENS)
    whole, beyond, less = (
        rows_in_order(kernel, parts, logs, torch.tensor([keys], dtype=torch.int32))
        for keys in (3 * SPLIT_KEYS, 2**31 - 1, 2 * SPLIT_KEYS)
    )
    assert torch.equal(beyond, whole)
    assert not torch.equal(less, whole)
