"""A kernel of quantised inputs with a prologue, like rendered ones, and its mutants."""

from pathlib import Path

from flashtune import testing
from flashtune.core.config import LaunchOptions
from flashtune.core.kernel import Kernel, Specialization, Step
from flashtune.core.problem import Dtype
from flashtune.templates.common.args.arguments import forward_arguments, transpose_arguments
from flashtune.templates.forward_q_outer.space import QOuterConfig

SOURCE = Path(__file__).parents[1] / "data" / "kernels" / "plain_e4m3.py"
WORKSPACE = "values"
# Its tile, for the lengths of a check.
CONFIG = QOuterConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
PROBLEM = testing.problem("heads=8,kv_heads=2,seqlen_q=1024,seqlen_kv=4096,head_dim=64,dtype=e4m3,batch=2")
TAIL = 'tl.where((keys < seqlen_kv)[None, :], tl.dot(q_tile, k_tile.T) * scale_log2, float("-inf"))'
# Texts of the source, each with a replacement that makes it wrong.
MISTAKES = (
    ("tl.load(q_scale + batch_head)", "tl.load(q_scale + kv_batch_head)"),
    ("tl.load(k_scale + kv_batch_head)", "tl.load(k_scale)"),
    ("tl.load(v_scale + kv_batch_head)", "1.0"),
    ("(weights * WEIGHT_RANGE)", "(weights * WEIGHT_RANGE * 2.0)"),
    (TAIL, "tl.dot(q_tile, k_tile.T) * scale_log2"),
    ("keys[None, :], tile.T)", "keys[None, :] + 1, tile.T)"),
    ("(batch_head % kv_heads) * stride_vh", "(batch_head % kv_heads) * stride_vs"),
    ("accumulator * rescale[:, None]", "accumulator"),
)


def plain_e4m3(index_bits: int = 32) -> Kernel:
    """The kernel; it writes the log-sum-exp."""
    specialization = Specialization(index_bits=index_bits, lse=True)
    return Kernel(
        family="plain_e4m3",
        entry="attend",
        source=SOURCE.read_text(encoding="utf-8"),
        arguments=forward_arguments(Dtype.E4M3, specialization, (WORKSPACE,)),
        options=LaunchOptions(4, 2),
        specialization=specialization,
        prologue=Step(
            "transpose_values",
            transpose_arguments(Dtype.E4M3, specialization, WORKSPACE),
            LaunchOptions(4, 1),
        ),
    )
