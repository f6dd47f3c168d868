"""Batches of new tokens over a paged cache, as serving engines make them, and their attention in float64."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune import testing

HEADS, KV_HEADS, PAGE = 4, 2, 16
# Keys and new tokens of each sequence: decoding, a chunk of a prompt, a whole prompt, decoding, padding.
MIXED = ((37, 1), (45, 6), (9, 9), (1, 1), (0, 0))
DECODING = ((37, 1), (50, 1), (1, 1), (0, 0))
PROMPTS = ((20, 20), (3, 3), (33, 33))
E4M3 = torch.float8_e4m3fn


class Case(NamedTuple):
    """The features of a layer; `window` counts the query's own key."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    slopes: list[float] | None = None
    sinks: Tensor | None = None
    causal: bool = True
    k_scale: float = 1.0
    v_scale: float = 1.0


CASES = {
    "plain": Case(),
    "window": Case(window=8),
    "softcap": Case(softcap=2.0),
    "alibi": Case(slopes=[0.5, 0.25, 0.125, 0.0625]),
    "sinks": Case(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)),
    "all": Case(window=20, softcap=5.0, sinks=torch.tensor([1.0, 0.0, -2.0, 3.0])),
}


class Batch(NamedTuple):
    """A batch: the lengths of sequences, their new tokens, all their keys and values, and their pages.

    `q`, `k` and `v` are [tokens, heads, head_dim]; `keys` and `values` have one tensor for each sequence.
    """

    lengths: Sequence[tuple[int, int]]
    q: Tensor
    k: Tensor
    v: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    table: Tensor
    slots: Tensor

    @property
    def width(self) -> int:
        """The head dim."""
        return self.q.shape[-1]

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.width)

    @property
    def starts(self) -> Tensor:
        """Offsets of the sequences' new tokens."""
        return torch.tensor([0, *(new for _, new in self.lengths)]).cumsum(0).int()

    @property
    def seqlens(self) -> Tensor:
        """Keys of each sequence."""
        return torch.tensor([keys for keys, _ in self.lengths]).int()

    @property
    def longest(self) -> int:
        """The new tokens of the longest sequence."""
        return max(new for _, new in self.lengths)


def make_batch(
    lengths: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    *,
    width: int = 32,
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """A batch on the CPU; `padding` tokens have slots of -1 and come last."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, width, generator=generator).to(dtype)

    keys = [draw(total, KV_HEADS) for total, _ in lengths]
    values = [draw(total, KV_HEADS) for total, _ in lengths]
    pages = max(1, *(-(-total // PAGE) for total, _ in lengths))
    table = 1 + torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages).int()
    slots, new_keys, new_values = [], [], []
    for row, (total, new), k, v in zip(table, lengths, keys, values, strict=True):
        places = torch.arange(total - new, total)
        slots.append(row[places // PAGE] * PAGE + places % PAGE)
        new_keys.append(k[total - new :])
        new_values.append(v[total - new :])
    tokens = sum(new for _, new in lengths)
    return Batch(
        lengths,
        draw(tokens + padding, HEADS),
        torch.cat([*new_keys, draw(padding, KV_HEADS)]),
        torch.cat([*new_values, draw(padding, KV_HEADS)]),
        keys,
        values,
        table,
        torch.cat([*slots, torch.full((padding,), -1)]).long(),
    )


def fill_earlier(
    batch: Batch, keys: Tensor, values: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Writes the keys before the new tokens to pages [pages, kv_heads, page_size, head_dim]."""
    for row, (total, new), k, v in zip(
        batch.table.long(), batch.lengths, batch.keys, batch.values, strict=True
    ):
        for position in range(total - new):
            for pages, rows, scale in ((keys, k, k_scale), (values, v, v_scale)):
                stored = (rows[position].float() / scale).to(pages.dtype)
                pages[row[position // PAGE], :, position % PAGE] = stored


def expected(batch: Batch, case: Case, dtype: torch.dtype | None = None) -> Tensor:
    """The attention of all new tokens in float64; keys and values are rounded as in a cache of `dtype`."""
    keys = torch.cat([_stored(rows, case.k_scale, dtype) for rows in batch.keys])
    values = torch.cat([_stored(rows, case.v_scale, dtype) for rows in batch.values])
    key_starts = torch.nn.functional.pad(batch.seqlens.cumsum(0), (1, 0)).int()
    left = None if case.window is None else case.window - 1
    inputs = testing.varlen_inputs(
        *(batch.q[: batch.starts[-1]].double(), keys, values, batch.starts, key_starts),
        *(batch.longest, int(batch.seqlens.max())),
        causal=case.causal,
        window=None if left is None else (left, 0 if case.causal else left),
        chunk=case.chunk or 0,
        softcap=case.softcap,
        alibi_slopes=None if case.slopes is None else torch.tensor(case.slopes),
        sinks=None if case.sinks is None else case.sinks.float(),
    )
    return testing.reference(inputs).out.exact


def _stored(rows: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
    if dtype is not E4M3:
        return rows.double()
    return (rows.float() / scale).to(E4M3).double() * scale
