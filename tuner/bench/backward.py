"""Times the backward passes of all implementations on the same inputs.

Each forward pass runs once, before timing. The timed work is the backward pass that autograd runs. Ours is
that of flashtune's entry points, called as programs call them.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import tuned_records
from flashtune.tuner.bench.admission import Bind, Judge
from flashtune.tuner.bench.calls import described, program_call
from flashtune.tuner.bench.flash_attn_4 import FLASH_ATTN_4, flash_attn_4_gradients
from flashtune.tuner.bench.flashinfer import FLASHINFER
from flashtune.tuner.bench.judging import sequence_layout
from flashtune.tuner.bench.peer_runs import FLEX, Contestant, RefusalError, bind_peer
from flashtune.tuner.bench.results import OURS
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.execution.inputs import Tensors, differentiable, gradient_run
from flashtune.tuner.workloads.models import forward_of
from flashtune.verification.gradients.head_sampling import sample_pairs
from flashtune.verification.gradients.reference import Chosen, Expected, expect_gradients
from flashtune.verification.gradients.scores import BackwardCase
from flashtune.verification.inputs.placement import SequenceLayout
from flashtune.verification.reference.forward import sample
from flashtune.verification.tolerance import worst_ratio

SEED = 0


@contextlib.contextmanager
def recording(device: torch.device) -> Iterator[None]:
    """Lets autograd record on a stream on which its backward passes can be captured."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.enable_grad():
        yield


def selected(problem: Problem, target: Target) -> tuple[str, str]:
    """Returns the family and a description of the kernels that dispatch selects."""
    tables = tuned_records(target.name)
    return described(select(problem, target, tables, contiguous_specialization(problem), generated=True))


def gradient_binders(
    problem: Problem, tensors: Tensors, detail: str, peers: Sequence[str]
) -> dict[str, Bind]:
    """Returns functions that bind each contestant to the inputs, by its name."""
    leaves = differentiable(tensors)
    binders: dict[str, Bind] = {OURS: functools.partial(_ours, problem, leaves, detail)}
    return binders | {name: functools.partial(_peer, name, problem, leaves) for name in peers}


def _ours(problem: Problem, tensors: Tensors, detail: str) -> Contestant:
    call = program_call(problem, tensors)

    def forward() -> Tensor:
        return call.heads_first(call.attend(*call.inputs, **call.named, **call.options))

    run = gradient_run(forward, tensors)
    return Contestant(OURS, detail, run, run)


def _peer(name: str, problem: Problem, tensors: Tensors) -> Contestant:
    if name == FLASHINFER:
        raise RefusalError("it has no backward pass")
    if name == FLEX:
        # Otherwise a compiled backward pass would donate its saved tensors, and could run only once.
        import torch._functorch.config as compiling

        compiling.donated_buffer = False
    contestant = bind_peer(name, forward_of(problem), tensors)
    if name == FLASH_ATTN_4:
        own = flash_attn_4_gradients(problem, tensors)
        return Contestant(name, contestant.detail, own, own)
    with contestant.setting():
        run = gradient_run(contestant.run, tensors)
    return Contestant(name, contestant.detail, run, run)


def gradient_judge(problem: Problem, tensors: Tensors) -> Judge:
    """Compares gradients with float64: all rows of some heads, the same for all contestants."""
    assert tensors.backward is not None
    generator = torch.Generator(tensors.q.device).manual_seed(SEED)
    chosen = Chosen(sample_pairs(problem, generator), sample(problem, generator).rows)
    layout = sequence_layout(problem, tensors)
    q, k, v, side = layout.inputs(tensors.q, tensors.k, tensors.v, tensors.side)
    dout = layout.queries(tensors.backward.dout)
    case = BackwardCase(q, k, v, dout, None, side, tensors.scale, layout.lengths)
    with torch.no_grad():
        expected = expect_gradients(problem, case, chosen)
    return functools.partial(error_of, layout=layout, chosen=chosen, expected=expected)


def error_of(result: object, layout: SequenceLayout, chosen: Chosen, expected: Expected) -> float:
    """Returns the largest row error of gradients as a multiple of the tolerance, infinite if not finite.

    Each gradient has the shape of its tensor. There are those of q, k and v, and of an additive bias.
    """
    assert isinstance(result, tuple)
    dq, dk, dv = layout.queries(result[0]), layout.keys(result[1]), layout.keys(result[2])
    pairs = chosen.pairs
    picked: dict[str, Tensor] = {
        "dq": dq[pairs.batch[:, None], pairs.heads(layout.problem)],
        "dk": dk[pairs.batch, pairs.kv_head],
        "dv": dv[pairs.batch, pairs.kv_head],
    }
    if len(result) > 3:
        picked["dbias"] = pairs.of_queries(layout.problem, result[3], chosen.rows)[..., None]
    ratios = [
        float(worst_ratio(picked[name], gradient.exact, gradient.allowed))
        for name, gradient in expected.gradients.items()
        if name in picked
    ]
    return math.inf if any(math.isnan(ratio) for ratio in ratios) else max(ratios)
