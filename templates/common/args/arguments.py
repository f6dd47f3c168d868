"""The run-time arguments that forward kernels share, in the order in which they are passed."""

from flashtune.core.config import LaunchOptions
from flashtune.core.kernel import POINTER_ALIGNMENT, Alignment, Argument, Specialization, Step
from flashtune.core.problem import Dtype, KvDtype
from flashtune.templates.family import Arguments

TENSORS = ("q", "k", "v", "out")
# Letters for the strides of a launch's planned tensors.
STRIDE_LETTERS = {
    "q": "q",
    "k": "k",
    "v": "v",
    "out": "o",
    "dout": "do",
    "dq": "dq",
    "dk": "dk",
    "dv": "dv",
}
SCALES = ("q_scale", "k_scale", "v_scale")
COUNTS = ("heads", "group_size", "all_heads", "seqlen_q", "seqlen_kv")
# Partial results of programs over split keys: outputs, and log-sum-exps in units of log2.
PARTIALS = ("partial_out", "partial_lse")
COMBINED = ("out", "lse", *PARTIALS, "stride_ob", "stride_oh", "stride_os", "heads", "seqlen_q")
# Bytes of TMA's widest row without bank conflicts.
WIDEST_SWIZZLE = 128
# Triton's names of element types that differ from ours.
TRITON_TYPES: dict[KvDtype | Dtype, str] = {KvDtype.E4M3: "fp8e4nv", KvDtype.INT8: "i8", Dtype.TF32: "fp32"}


def forward_arguments(dtype: Dtype, specialization: Specialization, workspaces: tuple[str, ...]) -> Arguments:
    """Returns q, k, v, out, lse, workspaces, scale, twelve strides, five counts.

    Workspaces hold float32. With quantised inputs they have the inputs' type, and scales follow lse. Scales
    are contiguous float32 [batch, heads] for q and [batch, kv_heads] for k and v.
    """
    types = (dtype, dtype, dtype, dtype.out)
    scales = SCALES if dtype.is_quantized else ()
    working = dtype if dtype.is_quantized else Dtype.FP32
    return (
        *(tensor_argument(name, kind, specialization) for name, kind in zip(TENSORS, types, strict=True)),
        # The log-sum-exp and the workspaces are allocated per call, aligned to 16 bytes. A kernel without a
        # log-sum-exp gets `out` in its place and never accesses it.
        Argument("lse", "*fp32", POINTER_ALIGNMENT if specialization.lse else 1),
        *(Argument(name, "*fp32") for name in scales),
        *(Argument(name, pointer_type(working), POINTER_ALIGNMENT) for name in workspaces),
        Argument("scale", "fp32"),
        *stride_arguments(specialization, TENSORS),
        *(Argument(name, "i32") for name in COUNTS),
    )


def combine_step(dtype: Dtype, specialization: Specialization, options: LaunchOptions) -> Step:
    """Returns the launch of a kernel that combines the partial results of split keys."""
    plain = {argument.name: argument for argument in forward_arguments(dtype, specialization, PARTIALS)}
    numbers = (Argument(name, "i32") for name in ("rows", "splits"))
    return Step("combine", (*(plain[name] for name in COMBINED), *numbers), options)


def transpose_arguments(dtype: Dtype, specialization: Specialization, workspace: str) -> Arguments:
    """Returns v, the workspace, v's strides, kv_heads, seqlen_kv, for a prologue that transposes v."""
    return (
        tensor_argument("v", dtype, specialization),
        Argument(workspace, pointer_type(dtype), POINTER_ALIGNMENT),
        *stride_arguments(specialization, ("v",)),
        Argument("kv_heads", "i32"),
        Argument("seqlen_kv", "i32"),
    )


def pointer_type(dtype: KvDtype | Dtype) -> str:
    """Returns Triton's type of a pointer to such elements."""
    return f"*{TRITON_TYPES.get(dtype, dtype.value)}"


def descriptor(name: str, dtype: KvDtype | Dtype, box: tuple[int, ...]) -> Argument:
    """Returns a TMA descriptor of tiles that shared memory has in the layout of matrix instructions."""
    swizzle = min(WIDEST_SWIZZLE, box[-1] * dtype.itemsize)
    layout = f"NVMMASharedLayout({swizzle}, {8 * dtype.itemsize}, {len(box)})"
    return Argument(name, f"tensordesc<{pointer_type(dtype)[1:]}{list(box)},{layout}>")


def tensor_argument(name: str, dtype: Dtype, specialization: Specialization) -> Argument:
    """Returns a pointer to a tensor of the caller."""
    aligned = specialization.alignment is not Alignment.ANY
    return Argument(name, pointer_type(dtype), POINTER_ALIGNMENT if aligned else 1)


def stride_arguments(specialization: Specialization, tensors: tuple[str, ...]) -> Arguments:
    """Returns strides of batches, heads and positions of the planned tensors."""
    kind = f"i{specialization.index_bits}"
    return tuple(
        Argument(f"stride_{STRIDE_LETTERS[name]}{axis}", kind, int(specialization.alignment))
        for name in tensors
        if name in STRIDE_LETTERS
        for axis in "bhs"
    )
