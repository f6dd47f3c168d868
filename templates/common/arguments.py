"""The run-time arguments that forward kernels share, in the order in which they are passed."""

from __future__ import annotations

from flashtune.kernel import POINTER_ALIGNMENT, Alignment, Argument, Specialization
from flashtune.problem import Dtype

TENSORS = ("q", "k", "v", "out")
COUNTS = ("heads", "group_size", "all_heads", "seqlen_q", "seqlen_kv")


def forward_arguments(
    dtype: Dtype, specialization: Specialization, workspaces: tuple[str, ...]
) -> tuple[Argument, ...]:
    """q, k, v, out, lse, float32 workspaces, scale, twelve strides, five counts."""
    aligned = specialization.alignment is not Alignment.ANY
    pointer = POINTER_ALIGNMENT if aligned else 1
    integer = f"i{specialization.index_bits}"
    strides = (f"stride_{tensor[0]}{axis}" for tensor in TENSORS for axis in "bhs")
    return (
        *(Argument(name, f"*{dtype.value}", pointer) for name in TENSORS),
        # The log-sum-exp and the workspaces are allocated per call: always on a 16-byte border.
        # A kernel that writes no log-sum-exp is given `out` in its place and never touches it.
        Argument("lse", "*fp32", POINTER_ALIGNMENT if specialization.lse else 1),
        *(Argument(name, "*fp32", POINTER_ALIGNMENT) for name in workspaces),
        Argument("scale", "fp32"),
        *(Argument(name, integer, int(specialization.alignment)) for name in strides),
        *(Argument(name, "i32") for name in COUNTS),
    )
