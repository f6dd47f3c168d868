"""Mutants of dropout, in the forward pass and in both kernels of the split backward one."""

import msgspec

from flashtune.core.problem import Causal, Direction
from flashtune.templates.registry import find_family
from tests.mutants.core import Mutant, Part, Subject, mutants_of
from tests.mutants.portable.backward_size import KEYS, QUERIES, Size

FORWARD = "forward_masked"
ROWS = Part("def random_rows(", "def stays(")
STAYS = Part("def stays(", "def forward_masked(")
# Where weights are dropped by blocks: in a loop of blocks that no mask touches, and in another.
LOOPS = 2


def forward(size: Size) -> tuple[Mutant, ...]:
    """Mutants of the generator's inputs, and of the sums that dropped weights count in."""
    problem = msgspec.structs.replace(
        size.subject().problem, direction=Direction.FORWARD, causal=Causal.BOTTOM_RIGHT, dropout=True
    )
    tile = {"block_m": size.block_m, "block_n": size.block_n, "num_warps": 4, "num_stages": 2}
    subject = Subject(FORWARD, problem, msgspec.convert(tile, find_family(FORWARD).config_type))
    fallen = "staying = stays("
    return mutants_of(subject, (
        ("heads drop alike", "^ head_number)", ")", ROWS, 2),
        ("rows drop alike", "scrambled(first ^ queries)", "scrambled(first ^ (queries & 0))", ROWS),
        ("one word of the seed", "scrambled(low) ^ high", "scrambled(low)", ROWS),
        ("keys count in their block", "keys[None, :], dropout", "key_offsets[None, :], dropout", None, LOOPS),
        ("keys are one off", "keys[None, :], dropout", "(keys + 1)[None, :], dropout", None, LOOPS),
        ("the others fall", "0xAC4C1B51 >=", "0xAC4C1B51 <", STAYS),
        ("one word of a row", " ^ row_second", "", STAYS),
        ("unscaled", " * (1.0 - dropout)", ""),
        ("nothing falls in whole blocks",
         fallen, "staying = True | stays(",
         Part("for start in tl.range(0, n_full_max", "for start in tl.range(n_full_max")),
        ("dropped twice as often", "dropout, tl.float32)", "2.0 * dropout, tl.float32)", STAYS),
    ), prefix="dropout: ")  # fmt: skip


def backward(size: Size) -> tuple[Mutant, ...]:
    """Which weights fall in each kernel, and what their gradients are."""
    whole = size.subject()
    subject = whole._replace(problem=msgspec.structs.replace(whole.problem, dropout=True))
    return mutants_of(subject, (
        ("keys: gradients of dropped weights",
         "p_kept * (dp * kept_factor) - p *", "p_kept * (dp * kept_factor) - p_kept *", KEYS, LOOPS),
        ("keys: dp unscaled", "(dp * kept_factor)", "dp", KEYS, LOOPS),
        ("keys: dv of all weights", "p_low = p_kept", "p_low = p", KEYS, LOOPS),
        ("keys: dv unscaled", "(dv_sum * kept_factor)", "dv_sum", KEYS),
        ("keys: another mask", "keys[:, None], dropout", "keys[:, None] + 1, dropout", KEYS, LOOPS),
        ("queries: another mask", "keys[None, :], dropout", "keys[None, :] + 1, dropout", QUERIES, LOOPS),
        ("queries: dp unscaled", "(staying, dp, 0.0) * kept_factor", "(staying, dp, 0.0)", QUERIES, LOOPS),
        ("words of other rows",
         "words_at = workspace_2 + (row_base + queries) * 2",
         "words_at = workspace_2 + tl.maximum((row_base + queries) * 2 - 2, 0)", QUERIES),
        ("one word for two", "tl.load(words_at + 1", "tl.load(words_at", QUERIES),
    ), prefix="dropout: ")  # fmt: skip
