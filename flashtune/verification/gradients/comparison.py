"""The comparison of a backward kernel's gradients with the reference."""

import functools
from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor

from flashtune.core.features.table_gradients import table_gradients
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Problem
from flashtune.verification.cases import Case
from flashtune.verification.comparison import Finding, Pass
from flashtune.verification.gradients.inputs import Prepared
from flashtune.verification.gradients.tolerance import beyond_order
from flashtune.verification.inputs.guarded_tensors import bits_of, nonzero
from flashtune.verification.inputs.placement import capacities, pick, starts
from flashtune.verification.tolerance import worst_ratio


def backward_pass(kernel: Kernel, case: Case, prepared: Prepared) -> Pass:
    """Returns the launch of a backward kernel.

    Each launch is compared with the reference, and later launches also with the first. They must agree bit
    for bit if the problem is deterministic. Otherwise 16-bit gradients may differ by the order of summation.
    """
    # Portable kernels leave the gradient of sinks to torch.
    left_out = set() if kernel.writes("dsinks") else {"dsinks"}
    if kernel.specialization.constant_bias is True:
        left_out.add("dbias")
    if "dtables" not in prepared.expected.gradients:
        # Gradients of captured tensors are sums over all heads, of which a large problem has a sample.
        left_out.add("dtables")
    written = {name: tensor for name, tensor in prepared.written.items() if name not in left_out}
    prepared = prepared._replace(written=written)

    def compare(repeat: int) -> Generator[Finding, None, dict[str, Tensor]]:
        del repeat
        # Rows that a varlen sequence lacks are replaced by others.
        rows = {name: _PICKED[name](case.problem, prepared, tensor.view) for name, tensor in written.items()}
        yield from _compare(case, prepared, rows)
        return _held(case, prepared, rows)

    unlike = functools.partial(_unlike, case, prepared)
    return Pass(prepared, prepared.tensors, prepared.tensors, compare, unlike)


def _compare(case: Case, prepared: Prepared, rows: dict[str, Tensor]) -> Iterator[Finding]:
    for name, tensor in prepared.written.items():
        gradient = prepared.expected.gradients[name]
        ratio = worst_ratio(rows[name], gradient.exact, gradient.allowed)
        yield Finding(f"{case.label}: row errors of {name}", ratio, 1.0)
        # Infinity or NaN times zero is NaN, and a finite number times zero is zero.
        lost = nonzero(_owned(name, case.problem, prepared, tensor.view) * 0)
        yield Finding(f"{case.label}: elements of {name} not written or not finite", lost, 0.0)


def _held(case: Case, prepared: Prepared, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the results that must agree between launches: all bits, or the rows of 16-bit gradients.

    Float32 gradients are left out: the order of summation may be their only error.
    """
    views = {name: tensor.view for name, tensor in prepared.written.items()}
    if case.problem.deterministic:
        return {name: bits_of(view) for name, view in views.items()}
    return {name: rows[name] for name, view in views.items() if view.dtype.itemsize == 2}


def _unlike(
    case: Case, prepared: Prepared, first: dict[str, Tensor], held: dict[str, Tensor]
) -> Iterator[Finding]:
    """Yields the differences of a launch from the first one."""
    for name, earlier in first.items():
        if case.problem.deterministic:
            unlike = nonzero(earlier - held[name])
            yield Finding(f"{case.label}: elements of {name} unlike an earlier launch's", unlike, 0.0)
            continue
        allowed, stored = prepared.expected.gradients[name].allowed, prepared.written[name].view.dtype
        beyond = beyond_order(earlier, held[name], allowed, stored)
        what = f"elements of {name} farther from an earlier launch's than another order of sums"
        yield Finding(f"{case.label}: {what}", beyond, 0.0)


def _owned(name: str, problem: Problem, prepared: Prepared, written: Tensor) -> Tensor:
    """Returns the part of a gradient that belongs to sequences: varlen tensors without keys have one row."""
    if not problem.packed or name not in ("dk", "dv"):
        return written
    return written[:, :, : sum(capacities(problem, prepared.lengths))]


def _of_queries(problem: Problem, prepared: Prepared, written: Tensor) -> Tensor:
    """Returns the rows of the pairs' query heads, [pairs, group, seqlen_q, columns]. Absent ones are any."""
    heads = prepared.chosen.pairs.numbers(problem)
    picked = pick(written, problem, prepared.lengths, heads.flatten(), torch.arange(problem.seqlen_q))
    return picked.reshape(*heads.shape, *picked.shape[1:])


def _of_keys(problem: Problem, prepared: Prepared, written: Tensor) -> Tensor:
    """Returns the key rows of the compared pairs, [pairs, seqlen_kv, columns]. Absent ones are any."""
    pairs = prepared.chosen.pairs
    if not problem.packed:
        return pairs.of_keys(problem, written)
    room = capacities(problem, prepared.lengths)
    if not sum(room):
        # The only row belongs to no sequence.
        return written.new_zeros(len(pairs.batch), problem.seqlen_kv, written.shape[-1])
    first = starts(room).to(torch.int64)[pairs.batch][:, None]
    rows = (first + torch.arange(problem.seqlen_kv)).clamp_max(written.shape[2] - 1)
    return written[0][pairs.kv_head[:, None], rows]


def _of_bias(problem: Problem, prepared: Prepared, written: Tensor) -> Tensor:
    pairs, rows = prepared.chosen
    return pairs.of_queries(problem, written, rows)[..., None]


def _of_heads(problem: Problem, prepared: Prepared, written: Tensor) -> Tensor:
    return prepared.chosen.pairs.of_queries(problem, written)[..., None]


def _of_tables(problem: Problem, prepared: Prepared, written: Tensor) -> Tensor:
    tables = table_gradients(problem, prepared.side, written)
    return torch.cat([table.flatten() for table in tables.values()])[:, None]


# Functions that return the compared part of each gradient, in the shape of `Expected`.
_PICKED: dict[str, Callable[[Problem, Prepared, Tensor], Tensor]] = {
    "dq": _of_queries,
    "dk": _of_keys,
    "dv": _of_keys,
    "dbias": _of_bias,
    "dslopes": _of_heads,
    "dsinks": _of_heads,
    "dtables": _of_tables,
}
