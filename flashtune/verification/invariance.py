"""Compares the bits of batch-invariant rows: one sequence alone, with others, in chunks, and one query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.core.kernel import Kernel
from flashtune.core.layouts import Layout
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target
from flashtune.launch.binding import Binary, bind, compile_binary
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.registry import find_family
from flashtune.verification.cases import Case
from flashtune.verification.comparison import Finding
from flashtune.verification.inputs.guarded_tensors import bits_of, nonzero
from flashtune.verification.inputs.memory import Dense, MemoryFrame, placed
from flashtune.verification.inputs.prepared import dense_values, generator_of
from flashtune.verification.lengths import Lengths, is_ragged
from flashtune.verification.probes import Probe

if TYPE_CHECKING:
    from flashtune.launch.bundle_binding import BundledBinary

# Dimensions of an input without keys.
PER_HEAD = 2
HEADS, KV_HEADS, SEQUENCES, OWN = 4, 2, 3, 1
# Blocks of keys after two splits, in halves, and the queries of a chunk.
HALF_BLOCKS, CHUNK = 3, 70
# The page size of the kernel that others are compared with, if an 8-bit cache needs pages.
PAGE = 64


class Surrounding(NamedTuple):
    """Sequences of a call, with their queries and keys. The queries are the last ones of the keys."""

    name: str
    sequences: tuple[int, ...]
    lengths: Lengths

    @property
    def end(self) -> int:
        """The number of keys of the compared sequence."""
        return self.lengths.keys[self.sequences.index(OWN)]


def invariance_findings(
    kernel: Kernel,
    binary: Binary | BundledBinary,
    problem: Problem,
    target: Target,
    device: torch.device,
    seed: int,
    *,
    others: bool,
) -> Iterator[Finding]:
    """Yields the numbers of rows that have other bits than the same rows of the sequence alone.

    With `others`, rows are also compared with those of the family's kernel for prompts without packing and
    pages, which is compiled first.
    """
    family = find_family(kernel.family)
    order = family.numeric_order(problem)
    assert order is not None
    keys = 2 * order.split_keys + HALF_BLOCKS * order.block_n // 2
    base = msgspec.structs.replace(
        problem, heads=HEADS, kv_heads=KV_HEADS, batch=SEQUENCES, seqlen_q=keys, seqlen_kv=keys, packed=0
    )
    scale = problem.head_dim**-0.5
    case = Case(problem=base, probe=Probe.RANDOM, block=order.block_n, scale=scale)
    lengths = Lengths((keys,) * SEQUENCES, (keys,) * SEQUENCES)
    dense = dense_values(case, lengths, generator_of(case, device, seed))
    generator = torch.Generator().manual_seed(seed)
    expected: Tensor | None = None
    # Rows see the same keys in a chunk.
    is_cut = problem.is_causal and not problem.prefix
    for surrounding in _surroundings(problem, keys):
        if surrounding.end < keys and not is_cut:
            continue
        rows = _rows(kernel, binary, problem, dense, surrounding, target, scale, generator)
        if expected is None:
            expected = rows
        first = 0 if problem.causal is Causal.TOP_LEFT else surrounding.end - rows.shape[1]
        same = expected[:, first : first + rows.shape[1]]
        yield Finding(f"rows of a sequence, {surrounding.name}", nonzero(rows - same), 0.0)
    if others and expected is not None:
        page = PAGE if problem.kv_dtype else 0
        plain = msgspec.structs.replace(problem, packed=0, kv_lengths=False, page_size=page)
        peer = _whole_kernel(plain, kernel, target)
        alone = next(_surroundings(plain, keys))
        rows = _rows(peer, compile_binary(peer, target), plain, dense, alone, target, scale, generator)
        # The other kernel returns no log-sum-exp.
        yield Finding(
            "rows of a sequence, by another kernel", nonzero(rows - expected[..., : rows.shape[-1]]), 0.0
        )


def _whole_kernel(problem: Problem, kernel: Kernel, target: Target) -> Kernel:
    """Returns the default kernel of a family for long prompts."""
    from flashtune.templates.rendering import render

    family = find_family(kernel.family)
    long = msgspec.structs.replace(
        problem, heads=HEADS, kv_heads=KV_HEADS, batch=64, seqlen_q=4096, seqlen_kv=4096
    )
    specialization = msgspec.structs.replace(kernel.specialization, lse=False)
    return render(family, problem, family.default(long, target), specialization)


def _surroundings(problem: Problem, keys: int) -> Iterator[Surrounding]:
    """Yields the sequence alone, and then other calls with its last queries or fewer of its keys."""
    yield Surrounding("alone", (OWN,), Lengths((keys,), (keys,)))
    yield Surrounding("again", (OWN,), Lengths((keys,), (keys,)))
    ragged = is_ragged(problem)
    longer, shorter = (keys, keys // 3) if ragged else (keys, keys)
    queries = (CHUNK, 3, 129) if problem.packed else (CHUNK,) * SEQUENCES
    end = keys // 2 + 1
    # The sequence is not the longest one.
    few = (longer, end, shorter) if ragged else (end,) * SEQUENCES
    for name, each in (("with others", (longer, keys, shorter)), ("a chunk with others", few)):
        yield Surrounding(name, (0, OWN, 2), Lengths(queries, each))
    yield Surrounding("a chunk", (OWN,), Lengths((CHUNK,), (end,)))
    yield Surrounding("one query", (OWN,), Lengths((1,), (keys,)))
    yield Surrounding("one query with others", (2, OWN), Lengths((1, 1), (keys, end if ragged else keys)))


def _rows(
    kernel: Kernel,
    binary: Binary | BundledBinary,
    problem: Problem,
    dense: Dense,
    surrounding: Surrounding,
    target: Target,
    scale: float,
    generator: torch.Generator,
) -> Tensor:
    """Returns the bits of the sequence's output in a call, [heads, queries, columns].

    A log-sum-exp is one more column.
    """
    queries, keys = surrounding.lengths
    longest, page = max(keys), problem.page_size or 1
    own = msgspec.structs.replace(
        problem,
        heads=HEADS,
        kv_heads=KV_HEADS,
        batch=len(keys),
        seqlen_q=max(queries),
        seqlen_kv=-(-longest // page) * page,
        packed=sum(queries) if problem.packed else 0,
    )
    sequences = list(surrounding.sequences)
    q = torch.zeros_like(dense.q[sequences, :, : max(queries)])
    for row, (sequence, many, end) in enumerate(zip(sequences, queries, keys, strict=True)):
        first = 0 if problem.causal is Causal.TOP_LEFT else end - many
        q[row, :, :many] = dense.q[sequence, :, first : first + many]
    side = dense.side
    by_sequence = {
        name: value[sequences][..., :longest] if value.dim() > PER_HEAD else value[sequences]
        for name in ("slopes", "prefix", "k_scale", "v_scale")
        if (value := getattr(side, name)) is not None
    }
    k, v = (tensor[sequences, :, :longest] for tensor in (dense.k, dense.v))
    chosen = Dense(q, k, v, side._replace(**by_sequence))
    frame = MemoryFrame(kernel.specialization.alignment, Layout.BSHD)
    memory = placed(own, chosen, surrounding.lengths, frame, generator)
    tensors = tuple(tensor.given for tensor in (memory.q, memory.k, memory.v, memory.out))
    lse = memory.lse.given if kernel.specialization.lse else None
    launch = bind(kernel, target, ForwardTensors(*tensors), memory.side, compiled=binary)
    launch((*tensors, lse), scale, memory.side)
    place = sequences.index(OWN)
    row, start = (0, sum(queries[:place])) if problem.packed else (place, 0)
    results = (memory.out.view, *((memory.lse.view[..., None],) if kernel.specialization.lse else ()))
    return torch.cat([bits_of(result[row, :, start : start + queries[place]]) for result in results], dim=-1)
