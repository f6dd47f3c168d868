"""Values for the checks at the start of rendered wrappers; `checks.jinja` renders them."""

from flashtune.core.kernel import POINTER_ALIGNMENT, Specialization
from flashtune.core.problem import Dtype, KvDtype, Problem
from flashtune.templates.common.args.feature_context import FeatureContext, feature_context
from flashtune.templates.family import Context, Family


class CheckContext(Context, frozen=True):
    """The values that decide which tensors a wrapper accepts."""

    dtype: Dtype  # Element type of queries.
    # Element type of keys and values if they are quantised and queries are not; else `dtype`.
    kv_dtype: KvDtype | Dtype
    head_dim: int  # Width of queries and keys.
    value_head_dim: int  # Width of values and outputs.
    features: FeatureContext  # The problem's features.
    backward: bool  # Whether the kernel computes gradients.
    dlse: bool  # Whether there is a gradient of the log-sum-exp.
    latent: bool  # Whether values are the first columns of keys.
    # Required divisor of strides, in elements. Above 1, addresses are multiples of 16 bytes.
    alignment: int
    offsets: bool  # Whether the kernel computes offsets in 32 bits.
    interpreted: bool  # Whether Triton's interpreter runs the kernel.
    widens: bool  # Whether the interpreter runs a 16-bit kernel correctly on float32 tensors.

    @property
    def is_fp32(self) -> bool:
        """Whether queries are in fp32."""
        return self.dtype.is_float32

    @property
    def quantized_queries(self) -> bool:
        """Whether queries are in 8 bits."""
        return self.dtype.is_quantized

    @property
    def aligned(self) -> bool:
        """Whether strides and addresses must be aligned."""
        return self.alignment > 1


def checks_of(family: Family, problem: Problem, specialization: Specialization) -> CheckContext:
    """Returns the values that the checks of a kernel's wrapper render from."""
    if family.interpreted:
        alignment = int(specialization.alignment)
    else:
        # Gluon kernels use TMA descriptors, whose strides are multiples of 16 bytes.
        alignment = POINTER_ALIGNMENT // problem.kv_itemsize
    return CheckContext(
        dtype=problem.dtype.stored,
        kv_dtype=problem.kv_dtype or problem.dtype.stored,
        head_dim=problem.head_dim,
        value_head_dim=problem.value_head_dim,
        features=feature_context(problem),
        backward=problem.is_backward,
        dlse=problem.is_backward and specialization.lse,
        latent=problem.mla,
        alignment=alignment,
        # In direct calls, strides that fit have 32 bits, whatever the specialisation.
        offsets=family.interpreted or problem.is_backward,
        interpreted=family.interpreted,
        widens=family.interpreted and problem.dtype.itemsize == 2 and problem.kv_dtype is None,
    )
