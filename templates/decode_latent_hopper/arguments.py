"""Run-time arguments of the kernel, with descriptors."""

from flashtune.core.kernel import POINTER_ALIGNMENT, Argument, Specialization
from flashtune.core.problem import Problem
from flashtune.templates.common.args.arguments import PARTIALS, pointer_type
from flashtune.templates.common.args.side import side_tensors
from flashtune.templates.decode_latent_hopper.space import ROWS, LatentConfig, copied_keys

# TMA's widest row without bank conflicts, in bytes.
WIDEST_SWIZZLE = 128


def latent_arguments(
    problem: Problem, config: LatentConfig, specialization: Specialization
) -> tuple[Argument, ...]:
    """Returns descriptors of q, k, and of out if not split; lse, side tensors, partial results, numbers."""
    half, rest = problem.value_head_dim // 2, problem.head_dim - problem.value_head_dim
    queries, keys = (1, ROWS // config.queries, config.queries), (1, 1, 1, copied_keys(problem))
    many = config.num_splits > 1
    counts = ("heads", "all_heads", "seqlen_q", "seqlen_kv")
    return (
        _descriptor("q_desc", problem, (*queries, half)),
        _descriptor("q_rest_desc", problem, (*queries, rest)),
        _descriptor("k_desc", problem, (*keys, half)),
        _descriptor("k_rest_desc", problem, (*keys, rest)),
        *(() if many else (_descriptor("o_desc", problem, (*queries, half)),)),
        # A kernel without a log-sum-exp gets `out` in its place and never accesses it.
        Argument("lse", "*fp32", POINTER_ALIGNMENT if specialization.lse else 1),
        *side_tensors(problem),
        *(Argument(name, "*fp32", POINTER_ALIGNMENT) for name in PARTIALS if many),
        Argument("scale", "fp32"),
        *(Argument(name, "i32") for name in counts),
        *((Argument("stride_table", f"i{specialization.index_bits}"),) if problem.page_size else ()),
        *((Argument("splits", "i32"),) if many else ()),
    )


def _descriptor(name: str, problem: Problem, box: tuple[int, ...]) -> Argument:
    swizzle = min(WIDEST_SWIZZLE, box[-1] * problem.dtype.itemsize)
    layout = f"NVMMASharedLayout({swizzle}, {8 * problem.dtype.itemsize}, {len(box)})"
    sides = ", ".join(str(side) for side in box)
    return Argument(name, f"tensordesc<{pointer_type(problem.dtype)[1:]}[{sides}],{layout}>")
