"""Tensors of a backward case: inputs, gradients of the output and of the log-sum-exp, and the reference.

They are made on the device. A search caches them for its next candidates.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.features.table_gradients import gradient_numbers
from flashtune.core.kernel import Alignment
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Bias, Problem
from flashtune.launch.tensors import BackwardTensors
from flashtune.verification.cases import Case, lengths_of
from flashtune.verification.gradients.head_sampling import Pairs, sample_pairs
from flashtune.verification.gradients.reference import Chosen, Expected, expect_gradients
from flashtune.verification.gradients.scores import BackwardCase
from flashtune.verification.inputs.guarded_tensors import (
    Guarded,
    Role,
    checksum,
    guarded,
    guarded_flat,
    poison,
)
from flashtune.verification.inputs.memory import Dense, Memory, MemoryFrame, fill, placed
from flashtune.verification.inputs.placement import aside, capacities, excused, missing, query_places
from flashtune.verification.inputs.prepared import ROWS_AFTER, CaseCache, float_values, generator_of
from flashtune.verification.inputs.score_steps import away_from_steps
from flashtune.verification.lengths import Lengths
from flashtune.verification.probes import Probe, with_needles
from flashtune.verification.reference.forward import Sample, sample

# Heads that are not compared get a log-sum-exp of about the right size, so that probabilities are finite.
ABOUT_ONE = 1.0
# That of functions of scores. Their results have any size: all probabilities are 0.
ABOVE_ALL = 1e30


class Prepared(NamedTuple):
    """A case's tensors and reference."""

    read: tuple[Guarded, ...]  # All tensors that a launch reads, in poisoned surroundings.
    # The gradients in poisoned surroundings, by their names in `BackwardTensors`.
    written: dict[str, Guarded]
    tensors: BackwardTensors  # The tensors as a launch takes them.
    side: ExtraInputs  # The extra inputs as a launch takes them.
    lengths: Lengths
    chosen: Chosen  # The compared pairs and rows.
    # Their reference. Rows that a varlen sequence does not have may be anything.
    expected: Expected
    checksum: Tensor  # Sums of the bits of the tensors in `read`.


def prepare(case: Case, alignment: Alignment, device: torch.device, seed: int, dlse: bool) -> Prepared:
    """Returns new tensors for a case, with their reference.

    The case and the seed determine all values. `dlse` adds a gradient of the log-sum-exp.
    """
    problem = case.problem
    generator, lengths = generator_of(case, device, seed), lengths_of(case)
    inputs = given_values(case, lengths, generator, dlse)
    chosen = Chosen(sample_pairs(problem, generator), sample(problem, generator).rows)
    # Gradients of keys are sums over all rows.
    compared = Sample(chosen.pairs.numbers(problem).flatten(), torch.arange(problem.seqlen_q))
    q = away_from_steps(
        problem, inputs[:3], inputs.scale, inputs.side, lengths, compared, aside(generator, 3)
    )
    inputs = inputs._replace(q=q)
    expected = expect_gradients(problem, inputs, chosen)
    gradients = {
        name: gradient._replace(
            allowed=excused(gradient.allowed, _absent(name, problem, lengths, chosen.pairs))
        )
        for name, gradient in expected.gradients.items()
    }
    expected = expected._replace(gradients=gradients)
    frame = MemoryFrame(alignment, case.layout, case.far, behind=ROWS_AFTER)
    memory = placed(problem, Dense(*inputs[:3], inputs.side), lengths, frame, aside(generator))
    came = came_back(problem, inputs, _results(problem, inputs, chosen, expected), memory, frame)
    written = written_to(problem, memory, frame)
    read = (memory.q, memory.k, memory.v, *came.values(), *memory.extra_inputs)
    taken = {name: tensor.given for name, tensor in (*came.items(), *written.items())}
    tensors = BackwardTensors(memory.q.given, memory.k.given, memory.v.given, **taken)
    return Prepared(read, written, tensors, memory.side, lengths, chosen, expected, checksum(read))


def given_values(case: Case, lengths: Lengths, generator: torch.Generator, dlse: bool) -> BackwardCase:
    """Returns a case's values in padded form, in the dtypes that the kernel reads."""
    problem, own = case.problem, TORCH_DTYPES[case.problem.dtype]
    values, side = float_values(case, lengths, generator)
    dout = make_dout(case.probe, problem, case.block, generator)
    came_back = make_dlse(problem, generator) if dlse else None
    q, k, v, dout = (value.to(own) for value in (*values, dout))
    return BackwardCase(q, k, v, dout, came_back, side, case.scale, lengths)


def _absent(name: str, problem: Problem, lengths: Lengths, pairs: Pairs) -> Tensor | None:
    """Returns which compared rows of a gradient a varlen sequence lacks, or None if none can be absent."""
    if name == "dq":
        heads = pairs.numbers(problem)
        absent = missing(problem, lengths, heads.flatten(), torch.arange(problem.seqlen_q))
        return None if absent is None else absent.unflatten(0, tuple(heads.shape))
    if problem.packed and name in ("dk", "dv"):
        room = torch.tensor(capacities(problem, lengths))[pairs.batch]
        return torch.arange(problem.seqlen_kv) >= room[:, None]
    return None


def _results(
    problem: Problem, inputs: BackwardCase, chosen: Chosen, expected: Expected
) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp, which are exact only in compared heads."""
    if chosen.pairs.are_all(problem):
        return expected.out.reshape(inputs.dout.shape), expected.lse.reshape(inputs.dout.shape[:3])
    out, lse = about_right(problem, inputs)
    batch, heads = chosen.pairs.batch[:, None], chosen.pairs.heads(problem)
    out[batch, heads] = expected.out
    lse[batch, heads] = expected.lse
    return out, lse


def about_right(problem: Problem, inputs: BackwardCase) -> tuple[Tensor, Tensor]:
    """Returns an output of zeros, and a log-sum-exp with which probabilities are finite."""
    out = torch.zeros_like(inputs.dout)
    size = ABOVE_ALL if problem.functions else math.log(max(1, problem.seqlen_kv)) + ABOUT_ONE
    return out, torch.full(out.shape[:3], size, dtype=torch.float32, device=out.device)


def came_back(
    problem: Problem, inputs: BackwardCase, results: tuple[Tensor, Tensor], memory: Memory, frame: MemoryFrame
) -> dict[str, Guarded]:
    """Returns the output, the log-sum-exp and their gradients in the memory layout of the kernel."""
    places = query_places(problem, inputs.lengths)
    came = {
        "out": memory.out._replace(role=Role.INPUT),
        "dout": _like(memory.out, problem, frame, Role.INPUT, 8, 3),
        "lse": memory.lse._replace(role=Role.INPUT),
    }
    values = {"out": results[0], "dout": inputs.dout, "lse": results[1]}
    if inputs.dlse is not None:
        shape = tuple(memory.lse.given.shape)
        came["dlse"] = guarded_flat(shape, inputs.dout.device, Role.INPUT).without(memory.lse.behind)
        values["dlse"] = inputs.dlse
    for name, tensor in came.items():
        poison(tensor)
        fill(tensor.view, values[name], places)
    return came


def written_to(problem: Problem, memory: Memory, frame: MemoryFrame) -> dict[str, Guarded]:
    """Returns the poisoned tensors that receive the gradients, by name."""
    # Row strides differ between tensors, so that the stride of another tensor gives a wrong result.
    written = {
        name: _like(tensor, problem, frame, Role.OUTPUT, 10 + 2 * index, index)
        for index, (name, tensor) in enumerate((("dq", memory.q), ("dk", memory.k), ("dv", memory.v)))
    }
    device = memory.q.view.device
    if problem.bias is Bias.ADDITIVE:
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_kv)
        written["dbias"] = guarded_flat(shape, device, Role.OUTPUT, TORCH_DTYPES[problem.dtype])
    if problem.alibi:
        written["dslopes"] = guarded_flat((problem.batch, problem.heads), device, Role.OUTPUT)
    numbers = gradient_numbers(problem, memory.side)
    if numbers:
        written["dtables"] = guarded_flat((numbers,), device, Role.OUTPUT)
    if problem.sinks:
        written["dsinks"] = guarded_flat((problem.batch, problem.heads), device, Role.OUTPUT)
    return written


def _like(
    model: Guarded, problem: Problem, frame: MemoryFrame, role: Role, spare: int, number: int
) -> Guarded:
    """Returns a tensor of the same shape with another row stride. It is far if `number` is `frame.far`."""
    tensor = guarded(
        tuple(model.given.shape), problem.dtype, frame.alignment, frame.layout, model.view.device, role,
        spare=spare, far=frame.far == number,
    )  # fmt: skip
    return tensor.without(model.behind)


prepare_and_keep = CaseCache(prepare)


NEEDLES = (Probe.NEEDLE, Probe.FIRST, Probe.LAST)


def make_dout(probe: Probe, problem: Problem, block: int, generator: torch.Generator) -> Tensor:
    """Returns a new gradient of the output, [batch, heads, seqlen_q, value_head_dim] in float32.

    In probes with needles it has one needle per block of queries. A block that is skipped, masked or
    processed twice is missing or doubled in a column of dv, and in dk. The values are made on the generator's
    device.
    """
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.value_head_dim)
    normal = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    if probe not in NEEDLES:
        return normal
    # Neighbouring blocks, and heads that share keys, use different columns.
    return with_needles(normal, probe, block, aside(generator, 2), (5, 3))


def make_dlse(problem: Problem, generator: torch.Generator) -> Tensor:
    """Returns a new gradient of the log-sum-exp, float32 [batch, heads, seqlen_q]."""
    shape = (problem.batch, problem.heads, problem.seqlen_q)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
