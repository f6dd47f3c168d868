"""Forward kernels in the interpreter: small configs, inputs of each feature, and the float64 reference."""

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment, Specialization, specialization_of
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.compilation import load_module
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.backward_fused.space import Reduction
from flashtune.templates.family import Family
from flashtune.templates.rendering import render
from flashtune.verification.lengths import Lengths, equal_lengths
from tests.problems.backward_calls import LENGTHS
from tests.problems.kernel_cases import FORWARD
from tests.problems.plain_masks import plain_attention

TARGET = find_target("h200")
SIDES = ("block_m", "block_n", "dq_block_m", "dq_block_n")
# Values of the other fields of configs. The interpreter ignores warps and stages.
CHOICES: dict[str, Sequence[Any]] = {
    "num_warps": (4,),
    "num_stages": (1,),
    "dq_warps": (4,),
    "dq_stages": (1,),
    "num_splits": (1, 2, 3),
    "split_masked_loop": (True, False),
    "split_head_dim": (False, True),
    "lpt": (False, True),
    "heads_innermost": (False, True),
    "transpose_dq": (False, True),
    "reduction": tuple(Reduction),
}
# A search of packed sequences of four at a time, so that few sequences take several steps.
SHORT_STEPS = "SEARCHED = tl.constexpr(256)", "SEARCHED = tl.constexpr(4)"
close = functools.partial(torch.testing.assert_close, atol=2e-5, rtol=1e-5)


class Call(NamedTuple):
    """The arguments of a kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    side: ExtraInputs
    scale: float = 0.3


a_problem = functools.partial(
    testing.problem,
    "heads=2,kv_heads=1,seqlen_q=35,seqlen_kv=53,head_dim=24,value_head_dim=16,dtype=fp32,batch=2",
)


def small_config(family: Family, seed: str, sides: tuple[int, ...] = (16, 32), **changes: Any) -> Config:
    """A config whose tiles have these sides; the seed selects all values that `changes` does not have."""
    pick = random.Random(seed)
    choices = {**dict.fromkeys(SIDES, sides), **CHOICES}
    names = family.config_type.__struct_fields__
    chosen = {name: pick.choice(choices[name]) for name in names if name in choices}
    return msgspec.convert({**chosen, **changes}, family.config_type)


def together(*names: str) -> dict[str, Any] | None:
    """The fields of several features, or None if they contradict each other."""
    fields: dict[str, Any] = {}
    for name in names:
        if any(fields.get(field, value) != value for field, value in FORWARD[name].items()):
            return None
        fields |= FORWARD[name]
    if fields.get("kv_lengths") and fields.get("page_size"):
        return None
    return None if "bias" in fields and "packed" in fields else fields


def poisoned(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, device=device)


def run(
    family: Family,
    problem: Problem,
    call: Call,
    config: Config,
    *,
    index_bits: int = 32,
    lse: bool = True,
    before: float = torch.nan,
    instead: tuple[str, str] = ("", ""),
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, in memory that contained `before`. Without `lse` no log-sum-exp is written.

    `instead` is a part of the source and what replaces it.
    """
    assert family.supports(problem, TARGET) is None
    q, k, v, side, scale = call
    out = torch.full((*q.shape[:3], v.shape[-1]), before)
    row_lse = torch.full(q.shape[:3], before)
    required = specialization_of((q, k, v, out), lse)
    specialization = Specialization(required.alignment, max(required.index_bits, index_bits), lse)
    kernel = render(family, problem, config, specialization)
    assert instead[0] in kernel.source
    kernel = msgspec.structs.replace(kernel, source=kernel.source.replace(*instead))
    launch = bind(kernel, TARGET, ForwardTensors(q, k, v, out), side, allocate=poisoned)
    launch((q, k, v, out, row_lse if lse else None), scale, side)
    return out, row_lse


def check(family: Family, problem: Problem, call: Call, config: Config, **options: Any) -> None:
    """Compares a kernel with plain attention in float64; options are those of `run`."""
    out, lse = run(family, problem, call, config, **options)
    expected_out, expected_lse = plain_attention(problem, *call)
    if options.get("lse", True):
        close(lse.double(), expected_lse)
    close(out.double(), expected_out)


def standalone(
    family: Family, problem: Problem, call: Call, config: Config, alignment: Alignment = Alignment.ANY
) -> Any:
    """Checks `attention` of a rendered module with its default scale and a negative one, and returns it.

    It takes extra inputs by name.
    """
    q, k, v, side, _ = call
    kernel = render(family, problem, config, Specialization(alignment, lse=True))
    attention = load_module(kernel).attention
    extra = {name: getattr(side, name) for name in kernel.side}
    for scale in (None, -0.5):
        out, lse = attention(q, k, v, scale, **extra)
        used = problem.head_dim**-0.5 if scale is None else scale
        expected_out, expected_lse = plain_attention(problem, q, k, v, side, used)
        close(out.double(), expected_out)
        close(lse.double(), expected_lse)
    return attention


def make_call(problem: Problem) -> Call:
    """Inputs of a problem. Packed and paged sequences have the lengths of `LENGTHS`."""
    lengths = equal_lengths(problem)
    if problem.packed or problem.page_size:
        lengths = Lengths(*zip(*LENGTHS, strict=True))
        if not problem.packed:
            lengths = Lengths((problem.seqlen_q,) * 3, lengths.keys[:3])
    if problem.kv_lengths:
        lengths = lengths._replace(keys=tuple(max(0, count - 7 * i) for i, count in enumerate(lengths.keys)))
    page = problem.page_size or 1
    longest = {"seqlen_q": max(lengths.queries), "seqlen_kv": -(-max(lengths.keys) // page) * page}
    if not problem.packed and not page > 1:
        longest = {}
    shaped = msgspec.structs.replace(problem, batch=len(lengths.keys), **longest)
    inputs = testing.tensors(shaped, scale=Call._field_defaults["scale"], layout="bshd", lengths=lengths)
    return Call(inputs.q, inputs.k, inputs.v, inputs.extra)
