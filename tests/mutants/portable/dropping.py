"""Mutants of dropout, in the forward pass and in both kernels of the split backward one."""

from __future__ import annotations

import msgspec

from flashtune.core.problem import Causal, Direction
from flashtune.templates.registry import find_family
from tests.mutants.core import Mutant, Part, Patch, Subject
from tests.mutants.portable.backward_size import KEYS, QUERIES, Size

FORWARD = "forward_masked"
ROWS = Part("def random_rows(", "def stays(")
STAYS = Part("def stays(", "def forward_masked(")
# Where weights are dropped by blocks: in a loop of blocks that no mask touches, and in another.
LOOPS = 2


def forward(size: Size) -> tuple[Mutant, ...]:
    """What the generator hangs on, and what falling weights count for."""
    problem = msgspec.structs.replace(
        size.subject().problem, direction=Direction.FORWARD, causal=Causal.BOTTOM_RIGHT, dropout=True
    )
    tile = {"block_m": size.block_m, "block_n": size.block_n, "num_warps": 4, "num_stages": 2}
    subject = Subject(FORWARD, problem, msgspec.convert(tile, find_family(FORWARD).config_type))
    fallen = "staying = stays("
    mutants = (
        ("heads drop alike", "The head is not in the hash.", "^ head_number)", ")", ROWS, 2),
        (
            "rows drop alike",
            "The first word of all rows is one.",
            "scrambled(first ^ queries)",
            "scrambled(first ^ (queries & 0))",
            ROWS,
            1,
        ),
        (
            "one word of the seed",
            "Its upper half is ignored.",
            "scrambled(low) ^ high",
            "scrambled(low)",
            ROWS,
            1,
        ),
        (
            "keys count in their block",
            "Blocks of keys drop alike.",
            "keys[None, :], dropout",
            "key_offsets[None, :], dropout",
            None,
            LOOPS,
        ),
        (
            "keys are one off",
            "The mask lies one key beside.",
            "keys[None, :], dropout",
            "(keys + 1)[None, :], dropout",
            None,
            LOOPS,
        ),
        (
            "the others fall",
            "Kept weights are dropped.",
            "0xAC4C1B51 >=",
            "0xAC4C1B51 <",
            STAYS,
            1,
        ),
        ("one word of a row", "The second word is not used.", " ^ row_second", "", STAYS, 1),
        ("unscaled", "Kept weights are not scaled.", " * (1.0 - dropout)", "", None, 1),
        (
            "nothing falls in whole blocks",
            "The first loop drops nothing.",
            fallen,
            "staying = True | stays(",
            Part("for start in tl.range(0, n_full_max", "for start in tl.range(n_full_max"),
            1,
        ),
        (
            "dropped twice as often",
            "The share is doubled.",
            "dropout, tl.float32)",
            "2.0 * dropout, tl.float32)",
            STAYS,
            1,
        ),
    )
    return tuple(
        Mutant(f"dropout: {name}", breaks, subject, (Patch(old, new, part, times),))
        for name, breaks, old, new, part, times in mutants
    )


def backward(size: Size) -> tuple[Mutant, ...]:
    """Which weights fall in each kernel, and what their gradients are."""
    whole = size.subject()
    subject = whole._replace(problem=msgspec.structs.replace(whole.problem, dropout=True))
    mutants = (
        (
            "keys: gradients of dropped weights",
            "Scores of dropped weights get no gradient.",
            "p_kept * (dp * kept_factor) - p *",
            "p_kept * (dp * kept_factor) - p_kept *",
            KEYS,
            LOOPS,
        ),
        (
            "keys: dp unscaled",
            "The gradient of the weights lacks the factor of kept weights.",
            "(dp * kept_factor)",
            "dp",
            KEYS,
            LOOPS,
        ),
        (
            "keys: dv of all weights",
            "Dropped weights count in dv.",
            "p_low = p_kept",
            "p_low = p",
            KEYS,
            LOOPS,
        ),
        (
            "keys: dv unscaled",
            "It lacks the factor of kept weights.",
            "(dv_sum * kept_factor)",
            "dv_sum",
            KEYS,
            1,
        ),
        (
            "keys: another mask",
            "Keys are one off.",
            "keys[:, None], dropout",
            "keys[:, None] + 1, dropout",
            KEYS,
            LOOPS,
        ),
        (
            "queries: another mask",
            "Keys are one off.",
            "keys[None, :], dropout",
            "keys[None, :] + 1, dropout",
            QUERIES,
            LOOPS,
        ),
        (
            "queries: dp unscaled",
            "The gradient of the weights lacks the factor of kept weights.",
            "(staying, dp, 0.0) * kept_factor",
            "(staying, dp, 0.0)",
            QUERIES,
            LOOPS,
        ),
        (
            "words of other rows",
            "The words are read of the row before.",
            "words_at = workspace_2 + (row_base + queries) * 2",
            "words_at = workspace_2 + tl.maximum((row_base + queries) * 2 - 2, 0)",
            QUERIES,
            1,
        ),
        (
            "one word for two",
            "The first word is read for the second.",
            "tl.load(words_at + 1",
            "tl.load(words_at",
            QUERIES,
            1,
        ),
    )
    return tuple(
        Mutant(f"dropout: {name}", breaks, subject, (Patch(old, new, part, times),))
        for name, breaks, old, new, part, times in mutants
    )
