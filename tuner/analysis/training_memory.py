"""Memory of the attention of all layers of a model in training, unfused and by kernels."""

from flashtune.core.problem import Causal, Problem, score_bytes
from flashtune.core.target import Target
from flashtune.tuner.analysis.charts import BYTES, Chart
from flashtune.tuner.analysis.model_overview import (
    FLOAT32_BYTES,
    LSE_BYTES,
    flash_way,
    out_bytes,
    standard_way,
)
from flashtune.tuner.tables.kernel_choice import choose
from flashtune.tuner.workloads.model_sizes import ModelSizes
from flashtune.tuner.workloads.models import LayerCall, ModelAttention, backward_of, model_calls


def kept_by_unfused(problem: Problem) -> tuple[int, int]:
    """Returns bytes that autograd keeps of `unfused_attention`: in S x S matrices, and in others.

    The matrices are the probabilities in float32 and in the type of the values, and a causal mask. The others
    are the values, and queries and keys in float32.
    """
    size = problem.dtype.itemsize
    copies = 1 if problem.dtype.is_float32 else 1 + size / FLOAT32_BYTES
    mask = 0 if problem.causal is Causal.NONE else problem.seqlen_q * problem.seqlen_kv
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv
    wide = (rows + keys) * problem.head_dim * FLOAT32_BYTES
    return int(copies * score_bytes(problem)) + mask, wide + keys * problem.value_head_dim * size


def kept_by_kernels(problem: Problem) -> int:
    """Returns bytes that autograd keeps of `flashtune.attention`: q, k, v, the output and its log-sum-exp."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv
    elements = rows * problem.head_dim + keys * (problem.head_dim + problem.value_head_dim)
    return elements * problem.dtype.itemsize + out_bytes(problem) + rows * LSE_BYTES


def peaks(calls: tuple[LayerCall, ...], target: Target, db: str | None) -> tuple[int, int, int]:
    """Returns bytes of all layers at the start of the backward pass: unfused, its S x S matrices, kernels.

    All layers keep tensors. The layer that needs most has gradients and workspaces too.
    """
    unfused = scores = kernels = working = launched = 0
    for problem, layers in calls:
        square, others = kept_by_unfused(problem)
        gradients = LayerCall(backward_of(problem), layers)
        scores += layers * square
        unfused += layers * others
        kernels += layers * kept_by_kernels(problem)
        # The memory of a backward pass includes tensors that its forward pass has kept.
        held = out_bytes(problem)
        working = max(working, standard_way(gradients, target).memory - held - square)
        held += problem.batch * problem.heads * problem.seqlen_q * LSE_BYTES
        chosen = choose(gradients.problem, target, db)
        launched = max(launched, flash_way(chosen, gradients, target).memory - held)
    return scores + unfused + working, scores, kernels + launched


def training_memory(
    attention: ModelAttention, sizes: ModelSizes, target: Target, db: str | None
) -> tuple[Chart, ...]:
    """Returns the memory of all layers over sequence length, and the share that kernels save."""
    groups: dict[str, dict[int, tuple[int, int, int]]] = {}
    for calls in model_calls(attention, sizes):
        problem = calls[0].problem
        title = f"{attention.name}, {attention.layers} layers, batch {problem.batch}, {problem.dtype.value}"
        groups.setdefault(title, {})[problem.seqlen_kv] = peaks(calls, target, db)
    charts = []
    for title, found in groups.items():
        lengths, points = zip(*sorted(found.items()), strict=True)
        names = "unfused", "its S x S matrices", "kernels"
        lines = dict(zip(names, zip(*points, strict=True), strict=True))
        share = {"saved": tuple(100 * (1 - kernels / unfused) for unfused, _, kernels in points)}
        memory = f"Memory of attention in training, {title}"
        charts += [
            Chart(title=memory, across="tokens", positions=lengths, unit=BYTES, lines=lines),
            Chart(
                title="Share that kernels save",
                across="tokens",
                positions=lengths,
                unit="%",
                lines=share,
                log=False,
            ),
        ]
    return tuple(charts)
