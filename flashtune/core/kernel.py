"""`Kernel`: rendered source and its specialization. The digest hashes the source in canonical form."""

from __future__ import annotations

import enum
import functools
import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from flashtune.core.canonical_source import canonical_source
from flashtune.core.config import LaunchOptions
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Dtype

if TYPE_CHECKING:
    from torch import Tensor

MAX_INT32 = 2**31 - 1
POINTER_ALIGNMENT = 16


class Alignment(enum.IntEnum):
    """The power of two that divides every stride (in elements) of a kernel's tensors.

    All but 1 also guarantee 16-byte aligned pointers; 1 guarantees nothing.
    """

    ANY = 1
    TWO = 2
    FOUR = 4
    EIGHT = 8
    SIXTEEN = 16


class Specialization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Assumptions of a kernel about its tensors."""

    alignment: Alignment = Alignment.SIXTEEN  # Alignment class of pointers and strides.
    # Width of strides and offsets; 64 where an offset exceeds 2^31 - 1 elements.
    index_bits: Annotated[int, msgspec.Meta(ge=32, le=64, multiple_of=32)] = 32
    # Whether the log-sum-exp of each row is written. In a backward pass, whether there is a gradient of the
    # log-sum-exp.
    lse: bool = False
    # False if TMA cannot copy the additive bias, otherwise unset.
    # Unset in stored kernels, so that their digests do not change.
    copies_bias: bool | msgspec.UnsetType = msgspec.UNSET
    # True in a backward pass that does not write the gradient of the additive bias, otherwise unset.
    constant_bias: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_best(self) -> bool:
        """Whether kernels of all families can address the tensors."""
        return self == Specialization(lse=self.lse, constant_bias=self.constant_bias)

    def takes_descriptors(self, dtype: Dtype) -> bool:
        """Returns whether TMA can address the tensors: strides must be multiples of 16 bytes."""
        return self.alignment * dtype.itemsize >= POINTER_ALIGNMENT


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run-time argument: Triton's type (`*bf16`, `i32`, `fp32`) and a known divisor of its value."""

    name: str
    type: str
    divisibility: int = 1


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Another kernel of the same source, launched before (prologue) or after (epilogue) the main kernel.

    A prologue fills the workspace. Its grid and integers come from the module's `prologue_plan`. An epilogue
    computes the output from the workspaces; its plan is `epilogue_plan`. Both take the arguments of
    `launch_plan`. In a backward pass, each step takes the tensors that its arguments name.
    """

    entry: str  # Name of the jitted function in the source.
    # Run-time arguments in order. For a prologue: v, workspace, integers. For an epilogue: out, lse,
    # workspaces, integers.
    arguments: tuple[Argument, ...]
    options: LaunchOptions
    # The step before a prologue, if any. Its plan is the module's `first_plan`.
    before: Step | None = None


# `omit_defaults` keeps digests unchanged when an optional field is added; `dict` holds the cached digest.
class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Rendered source for a family, a problem's static features and a config, and its specialization."""

    family: str
    entry: str  # Name of the jitted function in the source.
    source: str  # The rendered Python file.
    # Run-time arguments in order: q, k, v, out, lse, extra inputs (by their names in `ExtraInputs`),
    # workspaces, scale, numbers of `ExtraInputs` if any, integers. Tensor descriptors replace q, k, v, out
    # and the prologue's output if the kernel uses TMA. In a backward pass: names of `BackwardTensors` and
    # `ExtraInputs`, and `workspace_0` and so on, in any order, then integers. Descriptors are first.
    arguments: tuple[Argument, ...]
    options: LaunchOptions
    specialization: Specialization
    prologue: Step | None = None  # The kernel that is launched before it, if any.
    epilogue: Step | None = None  # The kernel that is launched after it, if any.

    @property
    def takes_descriptors(self) -> bool:
        """Whether tensors are passed as descriptors, which the module's `descriptors` creates."""
        return any(argument.type.startswith("tensordesc") for argument in self.arguments)

    @property
    def describes_bias(self) -> bool:
        """Whether the bias is passed as a descriptor."""
        return any(argument.name == "bias_desc" for argument in self.arguments)

    @property
    def side(self) -> tuple[str, ...]:
        """Names of the extra inputs that the kernel takes, in order."""
        return self._named(self.arguments)

    @property
    def all_side(self) -> tuple[str, ...]:
        """Names of the extra inputs that the kernel or its steps take, in the order of `ExtraInputs`."""
        taken = {*self.side, *(name for step in self.steps for name in self._named(step.arguments))}
        return tuple(name for name in ExtraInputs._fields if name in taken)

    def writes(self, name: str) -> bool:
        """Returns whether the kernel or one of its steps has an argument of this name, or its descriptor."""
        signatures = (self.arguments, *(step.arguments for step in self.steps))
        names = name, f"{name}_desc"
        return any(argument.name in names for arguments in signatures for argument in arguments)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps before the kernel, in order, and then the one after it."""
        first = self.prologue and self.prologue.before
        return tuple(step for step in (first, self.prologue, self.epilogue) if step is not None)

    @property
    def parts(self) -> tuple[Kernel, ...]:
        """The kernel, and then its steps as separate kernels for the compiler."""
        return self, *(self._alone(step) for step in self.steps)

    @staticmethod
    def _named(arguments: tuple[Argument, ...]) -> tuple[str, ...]:
        return tuple(argument.name for argument in arguments if argument.name in ExtraInputs._fields)

    def _alone(self, step: Step) -> Kernel:
        return Kernel(self.family, step.entry, self.source, step.arguments, step.options, self.specialization)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the kernel as it is compiled and launched, 32 hex digits.

        It excludes comments, docstrings and the stand-alone wrapper of the source; see `canonical_source`.
        """
        counted = msgspec.structs.replace(self, source=canonical_source(self.source))
        return hashlib.sha256(msgspec.json.encode(counted)).hexdigest()[:32]


def specialization_of(tensors: tuple[Tensor, ...], lse: bool, bias: Tensor | None = None) -> Specialization:
    """Returns the narrowest specialization that is valid for some tensors.

    `tensors` are q, k, v and out as [batch, heads, seqlen, head_dim], last dimension contiguous. `lse` is
    whether the log-sum-exp is needed. Strides of the bias or mask need no alignment, but offsets must reach
    its end.
    """
    combined = int(Alignment.SIXTEEN)
    pointers = 0
    repeats = False
    extent = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
        reach = 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
            # The stride of a dimension of one element is unused, but it is passed to the kernel. So it must
            # have the alignment too.
            combined |= stride
            reach += max(size - 1, 0) * abs(stride)
            extent = max(extent, abs(stride))
        # TMA does not support a row stride of zero.
        repeats |= tensor.shape[2] > 1 and tensor.stride(2) == 0
        # A tile may extend past the end of a sequence before it is masked, so offsets must reach further.
        extent = max(extent, reach + 1024 * tensor.stride(2) + tensor.shape[3])
    if bias is not None:
        reach = sum((size - 1) * stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
        # A tile of the bias extends past the end in both queries and keys.
        extent = max(extent, reach + 1024 * (bias.stride(2) + 1))
    # The lowest bit that is set in any stride is the power of two that divides all strides.
    common = combined & -combined
    alignment = Alignment.ANY if repeats or pointers % POINTER_ALIGNMENT else Alignment(common)
    copies_bias = msgspec.UNSET if bias is None or _is_copied(bias) else False
    return Specialization(alignment, 64 if extent > MAX_INT32 else 32, lse, copies_bias)


def _is_copied(bias: Tensor) -> bool:
    """Returns whether TMA can copy tiles of a bias. Masks need no copies."""
    size = bias.element_size()
    steps = [step for step, extent in zip(bias.stride()[:3], bias.shape, strict=False) if extent > 1]
    repeats = bias.shape[2] > 1 and bias.stride(2) == 0
    unaligned = bias.data_ptr() % POINTER_ALIGNMENT or any(step * size % POINTER_ALIGNMENT for step in steps)
    return size == 1 or not (repeats or unaligned)
