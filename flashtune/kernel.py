"""`Kernel`: rendered source and how it is specialised; its digest names the binary it becomes."""

from __future__ import annotations

import enum
import functools
import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from flashtune.canonical_source import canonical_source
from flashtune.config import LaunchOptions
from flashtune.problem import Dtype
from flashtune.side import Side

if TYPE_CHECKING:
    from torch import Tensor

MAX_INT32 = 2**31 - 1
POINTER_ALIGNMENT = 16


class Alignment(enum.IntEnum):
    """The power of two that divides every stride (in elements) of a kernel's tensors.

    16 and 8 also promise pointers on 16-byte borders; 1 promises nothing.
    """

    ANY = 1
    EIGHT = 8
    SIXTEEN = 16


class Specialization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a kernel assumes of the tensors it is launched on.

    Attributes:
        alignment: Alignment class of pointers and strides.
        index_bits: Width of strides and offsets; 64 where an offset exceeds 2^31 - 1 elements.
        lse: Whether the log-sum-exp of each row is written; of a backward pass, whether a gradient of it
            comes in.
    """

    alignment: Alignment = Alignment.SIXTEEN
    index_bits: Annotated[int, msgspec.Meta(ge=32, le=64, multiple_of=32)] = 32
    lse: bool = False

    def takes_descriptors(self, dtype: Dtype) -> bool:
        """Whether TMA can address the tensors: strides are multiples of 16 bytes."""
        return self.alignment * dtype.itemsize >= POINTER_ALIGNMENT


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run-time argument: Triton's type (`*bf16`, `i32`, `fp32`) and what divides its value."""

    name: str
    type: str
    divisibility: int = 1


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another kernel of the same source, launched before or after the one that it belongs to.

    A prologue fills the workspace; its grid and integers come from the module's own `prologue_plan`. An
    epilogue makes the output of the workspaces; likewise, `epilogue_plan`. Both take what `launch_plan` does.
    Of a backward pass each step takes what its arguments name, as the kernel itself does.

    Attributes:
        entry: Name of the jitted function in the source.
        arguments: Run-time arguments in order. A prologue's: v, workspace, integers. An epilogue's: out, lse,
            workspaces, integers.
        options: Launch options of the compiler.
    """

    entry: str
    arguments: tuple[Argument, ...]
    options: LaunchOptions


# `omit_defaults` keeps digests when an optional field is added; `dict` holds the cached digest.
class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Rendered source of (family, problem's static features, config), and its specialisation.

    Attributes:
        family: The family's name.
        entry: Name of the jitted function in the source.
        source: The rendered Python file.
        arguments: Run-time arguments in order: q, k, v, out, lse, side inputs (by their names in `Side`),
            workspaces, scale, numbers of `Side` where there are some, integers; descriptors instead of q, k,
            v, out and what a prologue wrote. Of a backward pass: what `BackwardTensors` and `Side` name, and
            `workspace_0` and so on, in any order, then integers; descriptors come first.
        options: Launch options of the compiler.
        specialization: What is assumed of the tensors.
        prologue: What is launched before it, if anything.
        epilogue: What is launched after it, if anything.
    """

    family: str
    entry: str
    source: str
    arguments: tuple[Argument, ...]
    options: LaunchOptions
    specialization: Specialization
    prologue: Step | None = None
    epilogue: Step | None = None

    @property
    def takes_descriptors(self) -> bool:
        """Whether tensors are passed as descriptors, which the module's `descriptors` makes."""
        return any(argument.type.startswith("tensordesc") for argument in self.arguments)

    @property
    def side(self) -> tuple[str, ...]:
        """Names of the side inputs that it takes, in order."""
        return self._named(self.arguments)

    @property
    def all_side(self) -> tuple[str, ...]:
        """Names of the side inputs that it or a step of it takes, in the order of `Side`."""
        steps = (self.prologue, self.epilogue)
        taken = {*self.side, *(name for step in steps if step for name in self._named(step.arguments))}
        return tuple(name for name in Side._fields if name in taken)

    @property
    def first(self) -> Kernel | None:
        """The prologue as a kernel by itself: it compiles like any other."""
        return self._alone(self.prologue)

    @property
    def last(self) -> Kernel | None:
        """The epilogue as a kernel by itself."""
        return self._alone(self.epilogue)

    @staticmethod
    def _named(arguments: tuple[Argument, ...]) -> tuple[str, ...]:
        return tuple(argument.name for argument in arguments if argument.name in Side._fields)

    def _alone(self, step: Step | None) -> Kernel | None:
        if step is None:
            return None
        return Kernel(self.family, step.entry, self.source, step.arguments, step.options, self.specialization)

    @functools.cached_property
    def digest(self) -> str:
        """Hash over everything that decides what is launched, 32 hex digits.

        Comments, docstrings and the stand-alone wrapper of the source do not count; see `canonical_source`.
        """
        counted = msgspec.structs.replace(self, source=canonical_source(self.source))
        return hashlib.sha256(msgspec.json.encode(counted)).hexdigest()[:32]


def specialization_of(tensors: tuple[Tensor, ...], lse: bool, bias: Tensor | None = None) -> Specialization:
    """The narrowest specialisation that is right for these tensors.

    Args:
        tensors: q, k, v and out as [batch, heads, seqlen, head_dim], last dimension contiguous.
        lse: Whether the log-sum-exp is wanted.
        bias: What lies over the scores: nothing is promised of its strides, but offsets must reach its end.
    """
    combined = 16
    pointers = 0
    repeats = False
    extent = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
        reach = 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
            # A dimension of one element is never stepped over: its stride means nothing, but it
            # is passed to the kernel and so must keep the promise made of it.
            combined |= stride
            reach += max(size - 1, 0) * abs(stride)
            extent = max(extent, abs(stride))
        # The copy engine takes no rows that all lie in one place.
        repeats |= tensor.shape[2] > 1 and tensor.stride(2) == 0
        # A tile may run past the end of a sequence before it is masked: leave it room.
        extent = max(extent, reach + 1024 * tensor.stride(2) + tensor.shape[3])
    if bias is not None:
        reach = sum((size - 1) * stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
        # Likewise a tile of both queries and keys.
        extent = max(extent, reach + 1024 * (bias.stride(2) + 1))
    if repeats or pointers % POINTER_ALIGNMENT:
        alignment = Alignment.ANY
    elif combined % 16 == 0:
        alignment = Alignment.SIXTEEN
    elif combined % 8 == 0:
        alignment = Alignment.EIGHT
    else:
        alignment = Alignment.ANY
    return Specialization(alignment, 64 if extent > MAX_INT32 else 32, lse)
