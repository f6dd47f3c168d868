"""Run-time arguments of the kernel, with descriptors."""

from flashtune.core.kernel import POINTER_ALIGNMENT, Argument, Specialization
from flashtune.core.problem import Problem
from flashtune.templates.common.args.arguments import PARTIALS, descriptor
from flashtune.templates.common.args.side import side_tensors
from flashtune.templates.decode_latent_hopper.space import ROWS, LatentConfig, copied_keys
from flashtune.templates.family import Arguments


def latent_arguments(problem: Problem, config: LatentConfig, specialization: Specialization) -> Arguments:
    """Returns descriptors of q, k, and of out if not split; lse, side tensors, partial results, numbers."""
    half, rest = problem.value_head_dim // 2, problem.head_dim - problem.value_head_dim
    queries, keys = (1, ROWS // config.queries, config.queries), (1, 1, 1, copied_keys(problem))
    many = config.num_splits > 1
    counts = ("heads", "all_heads", "seqlen_q", "seqlen_kv")
    return (
        descriptor("q_desc", problem.dtype, (*queries, half)),
        descriptor("q_rest_desc", problem.dtype, (*queries, rest)),
        descriptor("k_desc", problem.dtype, (*keys, half)),
        descriptor("k_rest_desc", problem.dtype, (*keys, rest)),
        *(() if many else (descriptor("o_desc", problem.dtype, (*queries, half)),)),
        # A kernel without a log-sum-exp gets `out` in its place and never accesses it.
        Argument("lse", "*fp32", POINTER_ALIGNMENT if specialization.lse else 1),
        *side_tensors(problem),
        *(Argument(name, "*fp32", POINTER_ALIGNMENT) for name in PARTIALS if many),
        Argument("scale", "fp32"),
        *(Argument(name, "i32") for name in counts),
        *((Argument("stride_table", f"i{specialization.index_bits}"),) if problem.page_size else ()),
        *((Argument("splits", "i32"),) if many else ()),
    )
