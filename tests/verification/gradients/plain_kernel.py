"""A backward pass in plain torch, with the rounding and the tensors of a kernel.

It reads lengths itself, sequence by sequence. Mistakes are put into its inputs, or made by its `Hooks`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.config import Config
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, Problem
from flashtune.launch.tensors import BackwardTensors
from tests.verification.plain_kernel import key_count, out_of_sight, query_rows

BLOCK = 16


class TwoTiles(Config, frozen=True):
    """Tiles of a kernel that computes the scores twice."""

    block_m: int = 16
    block_n: int = 16
    dq_block_m: int = 16
    dq_block_n: int = 16
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int = 0


class Scores(NamedTuple):
    """P, dS of products and dS of scores of one sequence, float32 [heads, queries, keys], not yet rounded."""

    weights: Tensor
    slopes: Tensor
    biased: Tensor


class Hooks(NamedTuple):
    """Where a kernel may go wrong; each is given what is right and says what is taken for it."""

    problem: Callable[[Problem], Problem] = lambda problem: problem  # Masks and lengths.
    # Tensors that are read.
    read: Callable[[BackwardTensors], BackwardTensors] = lambda tensors: tensors
    side: Callable[[ExtraInputs], ExtraInputs] = lambda side: side
    head: Callable[[Tensor], Tensor] = lambda head: head  # The KV head of each query head.
    # The masked pairs, [heads | 1, queries, keys].
    hidden: Callable[[Tensor], Tensor] = lambda hidden: hidden
    log: Callable[[Tensor], Tensor] = lambda lse: lse  # The log-sum-exp.
    # rowsum(dout · out), less the gradient of the log-sum-exp.
    delta: Callable[[Tensor], Tensor] = lambda delta: delta
    # P and dS, by the name of the gradient that they are for.
    scores: Callable[[str, Scores], Scores] = lambda _, scores: scores
    scale: Callable[[str, float], float] = lambda _, scale: scale  # By the name of the gradient.
    # A sequence's gradient, [heads, rows, columns], before it is rounded, by its name.
    gradient: Callable[[str, Tensor], Tensor] = lambda _, gradient: gradient


RIGHT = Hooks()


def differentiate(
    problem: Problem, tensors: BackwardTensors, scale: float, side: ExtraInputs, hooks: Hooks = RIGHT
) -> None:
    """Fills dq, dk and dv."""
    told, read, side = hooks.problem(problem), hooks.read(tensors), hooks.side(side)
    for sequence in range(problem.batch):
        _one(told, read, scale, side, hooks, sequence)


def _one(
    problem: Problem, tensors: BackwardTensors, scale: float, side: ExtraInputs, hooks: Hooks, sequence: int
) -> None:
    rows, count = query_rows(problem, sequence, side), key_count(problem, sequence, side)
    first = 0 if side.cu_seqlens_kv is None else int(side.cu_seqlens_kv[sequence])
    block, keys = 0 if problem.packed else sequence, slice(first, first + count)
    low = tensors.q.dtype
    head = hooks.head(torch.arange(problem.heads) // problem.group_size)
    own = torch.arange(problem.heads) // problem.group_size
    q, out, dout = (tensor[block, :, rows].float() for tensor in (tensors.q, tensors.out, tensors.dout))
    k, v = (tensor[block, :, keys].float() for tensor in (tensors.k, tensors.v))
    lse = hooks.log(tensors.lse[block, :, rows])
    delta = (dout * out).sum(-1)
    if tensors.dlse is not None:
        delta = delta - tensors.dlse[block, :, rows]
    made = _scores(problem, scale, side, hooks, sequence, (q, k[head]), lse)
    weights, steepness, distance = made
    biased = weights * (dout @ v[head].mT - hooks.delta(delta)[..., None])
    scores = Scores(weights, biased * steepness, biased)
    of = {name: hooks.scores(name, scores) for name in ("dq", "dk", "dv", "dbias", "dslopes")}
    dq = hooks.scale("dq", scale) * (of["dq"].slopes.to(low).float() @ k[head])
    dk = hooks.scale("dk", scale) * (of["dk"].slopes.to(low).float().mT @ q)
    dv = of["dv"].weights.to(low).float().mT @ dout
    shape = (problem.kv_heads, count, -1)
    tensors.dq[block, :, rows] = hooks.gradient("dq", dq).to(low)
    room = _room(problem, tensors, side, sequence)
    for name, written, part in (("dk", tensors.dk, dk), ("dv", tensors.dv, dv)):
        shared = hooks.gradient(name, part.new_zeros(shape[0], count, part.shape[-1]).index_add(0, own, part))
        written[block, :, first : first + room] = 0.0
        written[block, :, keys] = shared.to(low)
    if tensors.dbias is not None:
        tensors.dbias[sequence] = 0.0
        tensors.dbias[sequence, :, : q.shape[1], :count] = hooks.gradient("dbias", of["dbias"].biased).to(low)
    if tensors.dslopes is not None:
        dslopes = -(of["dslopes"].biased * distance).sum((-1, -2))
        tensors.dslopes[sequence] = hooks.gradient("dslopes", dslopes[:, None])[:, 0]
    if tensors.dsinks is not None:
        assert side.sinks is not None
        taken = torch.exp(side.sinks[:, None] - lse).masked_fill(lse.isneginf(), 0.0)
        dsinks = -(taken * hooks.delta(delta)).sum(-1)
        tensors.dsinks[sequence] = hooks.gradient("dsinks", dsinks[:, None])[:, 0]


def _room(problem: Problem, tensors: BackwardTensors, side: ExtraInputs, sequence: int) -> int:
    """Returns how many rows of keys a sequence has, used or not; unused ones have gradients of zero."""
    if side.cu_seqlens_kv is None:
        return tensors.k.shape[2]
    return int(side.cu_seqlens_kv[sequence + 1] - side.cu_seqlens_kv[sequence])


def _scores(
    problem: Problem,
    scale: float,
    side: ExtraInputs,
    hooks: Hooks,
    sequence: int,
    operands: tuple[Tensor, Tensor],
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """P, the derivative of a capped score, and how far queries and keys are apart."""
    scores = operands[0] @ operands[1].mT * scale
    steepness = torch.ones(())
    if side.softcap is not None:
        bent = torch.tanh(scores / side.softcap)
        scores, steepness = side.softcap * bent, 1.0 - bent * bent
    query, key = torch.arange(scores.shape[1])[:, None], torch.arange(scores.shape[2])
    position = query if problem.causal == "top_left" else query + scores.shape[2] - scores.shape[1]
    distance = (position - key).abs()
    hidden = out_of_sight(problem, position, key, sequence, side)
    if side.slopes is not None:
        scores = scores - side.slopes[sequence][:, None, None] * distance
    if side.bias is not None:
        bias = side.bias[sequence, :, : scores.shape[1], : scores.shape[2]]
        if problem.bias is Bias.BOOLEAN:
            hidden = hidden | ~bias
        else:
            scores = scores + bias.float()
    scores = scores.masked_fill(hooks.hidden(hidden), float("-inf"))
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    # A large log-sum-exp has lost the logarithm of the sum.
    is_large = lse.isfinite() & (lse.abs() > 1e20)
    weights = torch.where(is_large[..., None], scores.softmax(-1), weights)
    return weights, steepness, distance
