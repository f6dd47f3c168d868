"""A case's tensors and reference, made on the device and, for the levels of a search, cached."""

import functools
import itertools
import secrets
import zlib
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Alignment
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Bias
from flashtune.request.quantization import E4M3, LARGEST
from flashtune.verification.cases import Case, lengths_of
from flashtune.verification.inputs.guarded_tensors import Guarded, checksum
from flashtune.verification.inputs.memory import Dense, Memory, MemoryFrame, placed
from flashtune.verification.inputs.placement import aside, excused, missing
from flashtune.verification.inputs.score_steps import away_from_steps
from flashtune.verification.inputs.side_inputs import make_side, store
from flashtune.verification.lengths import Lengths
from flashtune.verification.probes import Values, make_values
from flashtune.verification.reference.forward import Expected, Sample, expect, sample
from flashtune.verification.tolerance import inverse

# Number of consecutive seeds that one check may use, at the strict level.
STEPS_PER_SEED = 10
# Checks of one process that share a seed, and so the cached references.
CHECKS_PER_SEED = 32

# Unused rows after the last sequence of varlen queries, as in a batch that is smaller than its tensors.
ROWS_AFTER = 3

_RUN_SEED = secrets.randbits(30)
_CHECKS = itertools.count()

SMALL_CACHED = 256
MIDDLE_CACHED = 8
MIDDLE_ELEMENTS = 2**22
LARGE_CACHED = 2
LARGE_ELEMENTS = 2**24

Made = TypeVar("Made")


class CaseCache(Generic[Made]):
    """Prepares cases and caches recent results: many small ones and few large ones."""

    def __init__(self, prepare: Callable[..., Made]) -> None:
        self._prepare = prepare
        self._small = functools.lru_cache(maxsize=SMALL_CACHED)(prepare)
        self._middle = functools.lru_cache(maxsize=MIDDLE_CACHED)(prepare)
        self._large = functools.lru_cache(maxsize=LARGE_CACHED)(prepare)

    def __call__(self, case: Case, *rest: Hashable) -> Made:
        """Returns the result of `prepare` for the same arguments, possibly from the cache."""
        # The tensors do not depend on the number of launches.
        once = msgspec.structs.replace(case, repeats=1)
        if case.far is not None:
            return self._prepare(once, *rest)
        problem = case.problem
        elements = problem.minimal_bytes() // problem.dtype.itemsize
        if problem.bias is not Bias.NONE:
            elements += problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
        if elements > LARGE_ELEMENTS:
            return self._large(once, *rest)
        return (self._middle if elements > MIDDLE_ELEMENTS else self._small)(once, *rest)

    def forget(self) -> None:
        """Clears the cache, because a wrong kernel may have written anywhere."""
        for cached in (self._small, self._middle, self._large):
            cached.cache_clear()


class Prepared(NamedTuple):
    """A case's tensors and reference."""

    memory: Memory
    lengths: Lengths
    chosen: Sample
    expected: Expected  # Rows that a varlen sequence does not have may be anything.
    checksum: Tensor  # Sums of the bits of all inputs.

    @property
    def read(self) -> tuple[Guarded, ...]:
        """All tensors that the kernel reads."""
        return self.memory.read

    @property
    def written(self) -> dict[str, Guarded]:
        """All tensors that a kernel may write, by name."""
        return {"out": self.memory.out, "lse": self.memory.lse}

    @property
    def side(self) -> ExtraInputs:
        """The extra inputs as a launch takes them."""
        return self.memory.side


def prepare(case: Case, alignment: Alignment, device: torch.device, seed: int) -> Prepared:
    """Returns new tensors for a case, with their reference.

    The case and the seed determine all values.
    """
    problem = case.problem
    generator, lengths = generator_of(case, device, seed), lengths_of(case)
    dense = dense_values(case, lengths, generator)
    chosen = sample(problem, generator)
    compared = case.scale, dense.side, lengths, chosen, aside(generator, 3)
    dense = dense._replace(q=away_from_steps(problem, (dense.q, dense.k, dense.v), *compared))
    frame = MemoryFrame(alignment, case.layout, case.far, case.faulty is True, ROWS_AFTER)
    memory = placed(problem, dense, lengths, frame, aside(generator))
    q, k, v, side = dense
    expected = expect(problem, q, k, v, case.scale, chosen, side, lengths)
    absent = missing(problem, lengths, *chosen)
    expected = expected._replace(
        allowed=excused(expected.allowed, absent), lse_allowed=excused(expected.lse_allowed, absent)
    )
    return Prepared(memory, lengths, chosen, expected, checksum(memory.read))


def generator_of(case: Case, device: torch.device, seed: int) -> torch.Generator:
    """Returns the generator of a case's values, which the case and the seed determine."""
    # The CPU generator uses only 32 bits of a seed.
    return torch.Generator(device=device).manual_seed(zlib.crc32(msgspec.json.encode((seed, case))))


def float_values(case: Case, lengths: Lengths, generator: torch.Generator) -> tuple[Values, ExtraInputs]:
    """Returns a case's q, k and v in float32, and its extra inputs."""
    side = NO_EXTRA_INPUTS
    if case.problem.features:
        side = make_side(case.probe, case.problem, lengths, case.block, generator)
    return make_values(case.probe, case.problem, case.scale, case.block, generator, lengths, side), side


def dense_values(case: Case, lengths: Lengths, generator: torch.Generator) -> Dense:
    """Returns a case's values in the dtypes that the kernel reads."""
    problem = case.problem
    values, side = float_values(case, lengths, generator)
    if problem.dtype.is_quantized:
        (q, q_scale), (k, k_scale), (v, v_scale) = (_quantized(value) for value in values)
        return Dense(q, k, v, side._replace(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale))
    own = TORCH_DTYPES[problem.dtype]
    q = values.q.to(own)
    if problem.kv_dtype is None:
        return Dense(q, values.k.to(own), values.v.to(own), side)
    k, k_scale = store(values.k, problem, aside(generator))
    if problem.mla:
        return Dense(q, k, k[..., : problem.value_head_dim], side._replace(k_scale=k_scale, v_scale=k_scale))
    # Values get other scales than keys, so that a kernel that swaps them gives a wrong result.
    v, v_scale = store(values.v, problem, aside(generator, 1))
    return Dense(q, k, v, side._replace(k_scale=k_scale, v_scale=v_scale))


def _quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises as `quantize` does, without loading other CUDA kernels. Heads must not be all zeros."""
    largest = tensor.abs().amax((2, 3), keepdim=True)
    # Scales the largest element to slightly less than the largest number, above which torch may give NaN.
    elements = tensor * inverse(largest) * (LARGEST * (1.0 - 2.0**-20))
    return elements.to(E4M3), (largest * (1 / LARGEST)).flatten(1)


prepare_and_keep = CaseCache(prepare)


def next_seed() -> int:
    """Returns a seed that is random per process and shared by CHECKS_PER_SEED checks."""
    return _RUN_SEED + STEPS_PER_SEED * (next(_CHECKS) // CHECKS_PER_SEED)
