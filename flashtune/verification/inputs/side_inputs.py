"""Values of the extra inputs of a case: slopes, biases, sinks, prefixes, softcap and scales of a cache.

Tensors are made in padded form, [batch, heads, ...]. `memory.py` copies them to the kernel's memory layout.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.functions import has_full_lists
from flashtune.core.features.records import ExtraInputs
from flashtune.core.features.table import usual_inputs
from flashtune.core.layouts import LARGEST_STORED, STORED_DTYPES, TORCH_DTYPES
from flashtune.core.problem import Bias, BlockLists, Dtype, Feature, KvDtype, KvScale, Problem
from flashtune.verification.inputs.placement import aside
from flashtune.verification.lengths import Lengths
from flashtune.verification.probes import DEPTH, Probe
from flashtune.verification.reference.scores import FINITE_MASK

# Softcaps: one that changes normal scores, and wider ones that preserve the scores of other probes.
TIGHT_CAP, WIDE_CAP, DEEP_CAP = 2.5, 30.0, 50.0
# Largest ALiBi penalty over all keys in probes whose scores must hardly change.
CALM_SLOPE = 4.0
# Sinks above and below the scores: keys with almost no weight, and a sink with almost no weight.
HIGH_SINK, LOW_SINK = 11.0, -1e4
# Shares of keys, of blocks with a few rows, and of rows that a bias hides.
HIDDEN_KEYS, HIDDEN_BLOCKS, HIDDEN_ROWS = 0.2, 0.3, 0.08
ROWS_OF_A_BLOCK = 16
# One of so many rows, or ROWS_OF_A_BLOCK at most, have a finite mask value for all their keys.
SPARSE_ROWS = 8
# Regions of a bias, in rows and in blocks of keys. HIDDEN_REGIONS of every second one are hidden. In a share
# HAVE_FULL of their rows, FULL_REGIONS of them are visible in full. Kernels find empty and full tiles there.
ROWS_OF_A_REGION, BLOCKS_OF_A_REGION = 256, 2
HIDDEN_REGIONS, FULL_REGIONS, HAVE_FULL = 0.3, 0.7, 0.5
# Share of visible blocks of a block mask, and shares of its lists without any block and with all blocks.
VISIBLE_BLOCKS, EMPTY_LISTS, FULL_LISTS = 0.5, 0.1, 0.2
# Share of keys that a tree mask leaves visible, and shares of its rows without and with all of its keys.
VISIBLE_DRAFTS, EMPTY_DRAFTS, FULL_DRAFTS = 0.5, 0.1, 0.2
# Largest bias in elements. Beyond, sequences share one bias, and then heads do.
MAX_BIAS = 2**28
# Scales of pages, or heads, differ by up to this power of two.
SCALE_POWER = 2
# Probes with normal scores, for which extra inputs can be large.
LOUD = (Probe.RANDOM, Probe.SINK)
# Dropout probabilities: one as in training, and one that drops most of a row.
USUAL_DROPOUT, HIGH_DROPOUT = 0.1, 0.75


class Draw(NamedTuple):
    """A case for which extra inputs are drawn."""

    probe: Probe  # The kind of error that the case exposes.
    problem: Problem
    lengths: Lengths
    block: int  # Number of keys of the tile that the probe is made for.
    # Its device holds the inputs, except the seed of dropout on the CPU.
    generator: torch.Generator


def make_side(
    probe: Probe, problem: Problem, lengths: Lengths, block: int, generator: torch.Generator
) -> ExtraInputs:
    """Returns new extra inputs for a probe, without lengths, block tables and scales.

    The features of `MAKERS` have inputs for each probe. Others have typical inputs.
    """
    draw = Draw(probe, problem, lengths, block, generator)
    others = problem.features - MAKERS.keys()
    dtype = TORCH_DTYPES[problem.dtype]
    made = usual_inputs(problem, others, lengths.keys, dtype, generator.device, generator.initial_seed())
    for feature, make in MAKERS.items():
        if feature in problem.features:
            made |= make(draw)
    return ExtraInputs(**made)


def _cap(draw: Draw) -> dict[str, float]:
    if draw.probe in LOUD:
        return {"softcap": TIGHT_CAP}
    return {"softcap": DEEP_CAP if draw.probe in (Probe.FAR_BELOW, Probe.STEEP, Probe.EDGE) else WIDE_CAP}


def _dropout(draw: Draw) -> dict[str, Any]:
    # Both 32-bit words of the seed are used.
    seed = torch.randint(2**63 - 1, (1,), generator=aside(draw.generator, 5))
    return {"seed": seed, "dropout": HIGH_DROPOUT if draw.probe is Probe.RISING else USUAL_DROPOUT}


def _slopes(draw: Draw) -> dict[str, Tensor]:
    """Returns slopes that differ between heads and sequences: [batch, heads] in float32."""
    problem = draw.problem
    heads = 2.0 ** (-8.0 * (torch.arange(problem.heads) + 1) / problem.heads)
    sequences = 1.0 + 0.25 * (torch.arange(problem.batch) % 4)
    slopes = sequences[:, None] * heads
    if draw.probe not in LOUD:
        slopes = slopes * (CALM_SLOPE / max(1, problem.seqlen_kv))
    return {"slopes": slopes.float().to(draw.generator.device)}


def _bias(draw: Draw) -> dict[str, Tensor]:
    """Returns a bias [batch, heads, seqlen_q, seqlen_kv]. Large ones are broadcast with a stride of zero.

    False or -inf hides random keys, random blocks of keys and rows, random rows, and random regions. Other
    regions are visible in full: True, or a bias of zero. Other keys of a few rows have a large finite bias.
    """
    probe, problem, _, block, generator = draw
    pairs = problem.seqlen_q * problem.seqlen_kv
    heads = problem.heads if problem.heads * pairs <= MAX_BIAS else 1
    batch = problem.batch if problem.batch * heads * pairs <= MAX_BIAS else 1
    device = generator.device
    shape = (batch, heads, problem.seqlen_q, problem.seqlen_kv)

    def drawn(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    def kept(share: float, *size: int) -> Tensor:
        # 0 for this share of the elements, 1 for the others, computed by casts.
        return (drawn(*size) * (1 / share)).int().bool().float()

    rows, columns = -(-shape[2] // ROWS_OF_A_BLOCK), -(-shape[3] // block)
    blocks = kept(HIDDEN_BLOCKS, batch, heads, rows, 1, columns, 1)
    seen = blocks.expand(-1, -1, -1, ROWS_OF_A_BLOCK, -1, block).flatten(4, 5).flatten(2, 3).contiguous()
    seen = seen[:, :, : shape[2], : shape[3]].mul_(kept(HIDDEN_KEYS, *shape))
    seen.mul_(kept(HIDDEN_ROWS, batch, heads, shape[2], 1))
    is_full, is_hidden = _regions(drawn, shape, block * BLOCKS_OF_A_REGION)
    seen.masked_fill_(is_full, 1.0).masked_fill_(is_hidden, 0.0)
    full = (problem.batch, problem.heads, *shape[2:])
    if problem.bias is Bias.BOOLEAN:
        return {"bias": seen.bool().expand(full)}
    size = 1.5 if probe in LOUD else 0.1
    normal = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    bias = normal.mul_(size).masked_fill_(is_full, 0.0).add_(seen.log_())
    if problem.dtype is not Dtype.FP16:
        bias.add_(_finite_mask(problem.seqlen_q, aside(generator, 7)).to(device))
    return {"bias": bias.to(TORCH_DTYPES[problem.dtype]).expand(full)}


def _finite_mask(rows: int, generator: torch.Generator) -> Tensor:
    """Returns FINITE_MASK in a few adjacent rows, like padding, and 0 in others: float32 [rows, 1]."""
    first = torch.randint(max(rows, SPARSE_ROWS), (1,), generator=generator)
    row = torch.arange(rows)
    is_masked = (row >= first) & (row < first + min(ROWS_OF_A_BLOCK, -(-rows // SPARSE_ROWS)))
    return FINITE_MASK * is_masked[:, None].float()


def _regions(
    drawn: Callable[..., Tensor], shape: tuple[int, int, int, int], width: int
) -> tuple[Tensor, Tensor]:
    """Returns which elements of a bias are in regions that are visible in full, and which in hidden ones."""
    rows, columns = -(-shape[2] // ROWS_OF_A_REGION), -(-shape[3] // width)
    share = drawn(*shape[:2], rows, columns)
    # Other rows of regions have no full one, so that some queries see no keys.
    has_full = drawn(*shape[:2], rows, 1) < HAVE_FULL
    row, column = (torch.arange(size, device=share.device) for size in (rows, columns))
    # The first region and every second one are in neither.
    is_drawn = (row[:, None] + column) % 2 == 1
    is_full = is_drawn & has_full & (share < FULL_REGIONS)
    is_hidden = is_drawn & (share > 1.0 - HIDDEN_REGIONS)
    of_row = torch.arange(shape[2], device=share.device) // ROWS_OF_A_REGION
    of_key = torch.arange(shape[3], device=share.device) // width
    return is_full[:, :, of_row][..., of_key], is_hidden[:, :, of_row][..., of_key]


def _sinks(draw: Draw) -> dict[str, Tensor]:
    """Returns sinks with about the weight of all keys. In `sink` some have nearly all weight, others none."""
    probe, problem, lengths, _, generator = draw
    spread = 4.0 * torch.rand(problem.heads, generator=aside(generator, 4)) - 2.0
    level = math.log(max(1, *lengths.keys)) if lengths.keys else 0.0
    if probe is Probe.FAR_BELOW:
        level -= DEEP_CAP * math.tanh(DEPTH / DEEP_CAP) if problem.softcap else DEPTH
    sinks = spread + level
    if probe is Probe.SINK:
        head = torch.arange(problem.heads) % 3
        sinks = torch.where(head == 0, sinks + HIGH_SINK, torch.where(head == 1, LOW_SINK, sinks))
    return {"sinks": sinks.float().to(generator.device)}


def _prefixes(draw: Draw) -> dict[str, Tensor]:
    """Returns prefixes of half, no, one, all, too many keys, and around a block's border: int32 [batch]."""
    block = draw.block
    turns = (
        lambda keys: keys // 2,
        lambda keys: block + 1,
        lambda keys: 0,
        lambda keys: keys + 5,
        lambda keys: 1,
        lambda keys: block - 1,
        lambda keys: keys,
    )
    prefixes = [turns[index % len(turns)](keys) for index, keys in enumerate(draw.lengths.keys)]
    return {"prefix": torch.tensor(prefixes, dtype=torch.int32).to(draw.generator.device)}


def _lists(draw: Draw) -> dict[str, Tensor]:
    """Returns random lists of visible blocks, which differ between heads. Some are empty, some are full.

    Hidden blocks follow after the end of each list, so that a kernel that reads further gives a wrong result.
    """
    problem, generator = draw.problem, aside(draw.generator, 6)
    size, heads = problem.block_mask, problem.heads
    if problem.block_lists is BlockLists.GROUP:
        heads = problem.kv_heads
    shape = (problem.batch, heads, -(-problem.seqlen_q // size), -(-problem.seqlen_kv // size))
    row = torch.rand(*shape[:3], 1, generator=generator)
    seen = torch.rand(shape, generator=generator) < VISIBLE_BLOCKS
    seen = (seen | (row < FULL_LISTS)) & (row < 1.0 - EMPTY_LISTS)
    counts = seen.sum(-1, dtype=torch.int32)
    made = {
        "block_counts": counts,
        "block_indices": (~seen).view(torch.uint8).argsort(dim=-1, stable=True).int(),
    }
    if has_full_lists(problem):
        # The last block may have keys that do not exist, and the mask function then applies there.
        most = (counts - seen[..., -1].int() if seen.shape[-1] else counts).clamp(min=0)
        made["full_counts"] = (torch.rand(counts.shape, generator=generator) * (most + 1)).int()
    return {name: tensor.to(draw.generator.device) for name, tensor in made.items()}


def _tree(draw: Draw) -> dict[str, Tensor]:
    """Returns random masks of the newest keys, bool [batch, seqlen_q, seqlen_q], some rows full or empty."""
    problem, generator = draw.problem, aside(draw.generator, 8)
    shape = (problem.batch, problem.seqlen_q, problem.seqlen_q)
    row = torch.rand(*shape[:2], 1, generator=generator)
    seen = torch.rand(shape, generator=generator) < VISIBLE_DRAFTS
    seen = (seen | (row < FULL_DRAFTS)) & (row < 1.0 - EMPTY_DRAFTS)
    return {"tree": seen.to(draw.generator.device)}


MAKERS: Mapping[Feature, Callable[[Draw], dict[str, Any]]] = {
    Feature.ALIBI: _slopes,
    Feature.BIAS: _bias,
    Feature.SINKS: _sinks,
    Feature.PREFIX: _prefixes,
    Feature.BLOCK_MASK: _lists,
    Feature.TREE: _tree,
    Feature.DROPOUT: _dropout,
    Feature.SOFTCAP: _cap,
}


class Stored(NamedTuple):
    """Stored keys or values of a cache, and the scale of each key."""

    elements: Tensor  # [batch, kv_heads, seqlen_kv, width] in 8 bits.
    scales: Tensor  # Float32 [batch, kv_heads, seqlen_kv].


def store(values: Tensor, problem: Problem, generator: torch.Generator) -> Stored:
    """Quantises keys or values for an 8-bit cache, with scales that differ by powers of two.

    Values are [batch, kv_heads, seqlen_kv, width] in float32. The powers come from a generator on the CPU.
    """
    kind = problem.kv_dtype
    assert kind is not None
    batch, heads, keys, _ = values.shape
    shared = {KvScale.TENSOR: (1, 1, 1), KvScale.HEAD: (1, heads, 1), KvScale.PAGE: (batch, heads, 1)}
    shape = shared[problem.kv_scale]
    if problem.kv_scale is KvScale.PAGE and problem.page_size:
        shape = (batch, heads, -(-keys // problem.page_size))
    # Slightly more than the scale that the largest element needs: beyond it some torch versions give NaN.
    largest = values.abs().amax((0, 2, 3)) if problem.kv_scale is not KvScale.TENSOR else values.abs().amax()
    least = largest.cpu().clamp_min(1e-6).reshape(1, -1, 1) * ((1.0 + 2.0**-20) / LARGEST_STORED[kind])
    powers = 2.0 ** torch.randint(0, SCALE_POWER + 1, shape, generator=generator)
    scales = (least * powers).float()
    if scales.shape[2] > 1:
        scales = scales.repeat_interleave(problem.page_size, 2)[:, :, :keys]
    scales = scales.expand(batch, heads, keys)
    elements = values * (1 / scales)[..., None].to(values.device)
    if kind is KvDtype.INT8:
        elements = elements.round()
    return Stored(elements.to(STORED_DTYPES[kind]), scales.to(values.device))
