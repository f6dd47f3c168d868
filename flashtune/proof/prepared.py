"""A case's tensors and reference, made on the device and, for the levels of a search, kept a while."""

from __future__ import annotations

import functools
import itertools
import secrets
import zlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from flashtune.kernel import Alignment
from flashtune.proof.cases import Case
from flashtune.proof.inputs import Guarded, Role, checksum, guarded, guarded_flat
from flashtune.proof.probes import make_values
from flashtune.proof.reference import Expected, Sample, expect, sample
from flashtune.quantization import given_scales, quantize
from flashtune.side import Side

if TYPE_CHECKING:
    from torch import Tensor

# Seeds in a row that one check may use: the strict level's.
STEPS_PER_SEED = 10
# Checks of one process that share a seed, and so the references of its larger problems.
CHECKS_PER_SEED = 32
SMALL_CACHED = 96
MIDDLE_CACHED = 8
MIDDLE_ELEMENTS = 2**22
LARGE_CACHED = 2
LARGE_ELEMENTS = 2**24

_RUN_SEED = secrets.randbits(30)
_CHECKS = itertools.count()


class Prepared(NamedTuple):
    """A case's tensors and what a right kernel makes of them.

    Attributes:
        q, k, v: Inputs, each in its poisoned surroundings.
        factors: Side of quantised inputs, likewise; empty where they are not quantised.
        out: Where the kernel writes.
        lse: Where it writes the log-sum-exp, [batch, heads, seqlen_q].
        chosen: The rows that are compared.
        expected: What they must be.
        checksum: Sums of the bits of all inputs.
    """

    q: Guarded
    k: Guarded
    v: Guarded
    factors: tuple[Guarded, ...]
    out: Guarded
    lse: Guarded
    chosen: Sample
    expected: Expected
    checksum: Tensor

    @property
    def inputs(self) -> tuple[Guarded, ...]:
        """All that a kernel reads."""
        return self.q, self.k, self.v, *self.factors

    @property
    def scales(self) -> Side:
        """What a launch is given beside the tensors."""
        return given_scales(*(factor.view for factor in self.factors))


def prepare_and_keep(case: Case, alignment: Alignment, device: torch.device, seed: int) -> Prepared:
    """As `prepare`, with recent results kept: the larger the fewer."""
    once = msgspec.structs.replace(case, repeats=1)
    if case.far is not None:
        return prepare(once, alignment, device, seed)
    elements = case.problem.minimal_bytes() // case.problem.dtype.itemsize
    if elements > LARGE_ELEMENTS:
        return _large(once, alignment, device, seed)
    return (_middle if elements > MIDDLE_ELEMENTS else _small)(once, alignment, device, seed)


def prepare(case: Case, alignment: Alignment, device: torch.device, seed: int) -> Prepared:
    """Fresh tensors for a case, and the reference of what they give.

    Args:
        case: Shape, probe and layout.
        alignment: The alignment class that the tensors must have, and no better one.
        device: Where to make them, and to work out the reference.
        seed: With the case, decides every value.
    """
    problem = case.problem
    generator = torch.Generator(device=device)
    # The CPU's generator takes no more than 32 bits of a seed.
    generator.manual_seed(zlib.crc32(msgspec.json.encode((seed, case))))
    values: tuple[Tensor, ...] = make_values(case.probe, problem, case.scale, case.block, generator)
    factors: tuple[Guarded, ...] = ()
    if problem.dtype.is_quantized:
        values, scales = zip(*(quantize(value) for value in values), strict=True)
        factors = tuple(_guarded_copy(scale) for scale in scales)
    out_shape = (*values[0].shape[:3], problem.value_head_dim)
    # The tensors' rows differ in width, so that one's stride does not serve for another.
    inputs = ((tuple(value.shape), problem.dtype, Role.INPUT) for value in values)
    tensors = (*inputs, (out_shape, problem.out_dtype, Role.OUTPUT))
    q, k, v, out = (
        guarded(shape, dtype, alignment, case.layout, device, role, spare=2 * index, far=case.far == index)
        for index, (shape, dtype, role) in enumerate(tensors)
    )
    for tensor, value in zip((q, k, v), values, strict=True):
        tensor.view.copy_(value)
    chosen = sample(problem, generator)
    given = given_scales(*(factor.view for factor in factors))
    expected = expect(problem, q.view, k.view, v.view, case.scale, chosen, given)
    lse = guarded_flat(out_shape[:3], device, Role.OUTPUT)
    return Prepared(q, k, v, factors, out, lse, chosen, expected, checksum((q, k, v, *factors)))


def _guarded_copy(scale: Tensor) -> Guarded:
    """Scales, [batch, heads], in poisoned surroundings."""
    copy = guarded_flat(tuple(scale.shape), scale.device, Role.INPUT)
    copy.view.copy_(scale)
    return copy


_small = functools.lru_cache(maxsize=SMALL_CACHED)(prepare)
_middle = functools.lru_cache(maxsize=MIDDLE_CACHED)(prepare)
_large = functools.lru_cache(maxsize=LARGE_CACHED)(prepare)


def forget() -> None:
    """Drops what is kept: a wrong kernel may have written anywhere."""
    _small.cache_clear()
    _middle.cache_clear()
    _large.cache_clear()


def next_seed() -> int:
    """A seed that other processes do not use, and that this one uses for a few checks only."""
    return _RUN_SEED + STEPS_PER_SEED * (next(_CHECKS) // CHECKS_PER_SEED)
