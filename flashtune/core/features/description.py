"""The record that describes a feature, and the arguments of its functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The fields of a problem, and the extra inputs of a call.
Fields = TypeVar("Fields")
Inputs = TypeVar("Inputs")


class TensorInput(NamedTuple):
    """A tensor of a feature.

    Attributes:
        name: Its name in `ExtraInputs`.
        option: Its name in calls, for arguments and errors.
        dtype: Its element type as torch names it, or None if it is q's.
        shape: The shape that a call must pass, in names of `batch` and `heads`; None if other code checks it.
        is_strided: Whether its last dimension may have any stride.
        has_gradient: Whether its gradient is computed, if its elements are numbers.
    """

    name: str
    option: str
    dtype: str | None = "float32"
    shape: tuple[str, ...] | None = None
    is_strided: bool = False
    has_gradient: bool = False


class NumberInput(NamedTuple):
    """A number of a feature, which kernels take by value. 0 and None mean that the feature is absent.

    Attributes:
        name: Its name in `ExtraInputs`.
        option: Its name in calls, for arguments and errors.
        least: The smallest number apart from 0.
        most: The largest number.
        remedy: A description of valid numbers, for errors.
    """

    name: str
    option: str
    least: float
    most: float
    remedy: str


class ScoreRows(NamedTuple, Generic[Fields, Inputs]):
    """Some rows of scores. Results of the functions broadcast with the scores, in their type and device.

    Attributes:
        fields: The problem.
        inputs: Extra inputs of the call.
        of_heads: Returns a tensor [batch, heads] as [..., 1, 1].
        of_pairs: Returns a tensor [batch, heads, seqlen_q, seqlen_kv] as [..., rows, keys].
        positions: Returns the positions of the queries among the keys, [..., rows, 1].
        distances: Returns the distances of queries and keys, [..., rows, keys].
    """

    fields: Fields
    inputs: Inputs
    of_heads: Callable[[Tensor], Tensor]
    of_pairs: Callable[[Tensor], Tensor]
    positions: Callable[[], Tensor]
    distances: Callable[[], Tensor]


class Changed(NamedTuple):
    """Scores after a feature, and the term that it added, or None if it added none."""

    scores: Tensor
    added: Tensor | None = None


class UsualCall(NamedTuple, Generic[Fields]):
    """A call for which typical inputs are made.

    Attributes:
        fields: The problem.
        keys: Number of keys of each sequence.
        dtype: Element type of q.
        device: Device of the inputs.
    """

    fields: Fields
    keys: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Description(NamedTuple, Generic[Fields, Inputs]):
    """One feature.

    Attributes:
        title: Its row of docs/features.md.
        example: An example in a shape.
        word: Its part of `Problem.key`, a format of its fields.
        fields: Its fields of a problem. A problem has the feature if one of them is not the default.
        details: Further fields, without effect on a problem without the feature.
        keys: Its keys in shapes, each with its meaning.
        tensors: Its tensors.
        numbers: Its numbers. They are last in `ExtraInputs`.
        is_mask: Whether it decides which keys a query sees.
        is_positional: Whether its inputs refer to positions among all keys of a sequence.
        is_sparse: Whether the nominal FLOPs then count visible pairs only.
        change: Returns the changed scores. Differentiable; does not write to its argument.
        derivative: Returns the derivative of the changed scores by the scores before; None means 1.
        usual: Returns typical inputs by name.
    """

    title: str
    example: str
    word: str
    fields: tuple[str, ...]
    keys: Mapping[str, str]
    details: tuple[str, ...] = ()
    tensors: tuple[TensorInput, ...] = ()
    numbers: tuple[NumberInput, ...] = ()
    is_mask: bool = False
    is_positional: bool = False
    is_sparse: bool = False
    change: Callable[[Tensor, ScoreRows[Fields, Inputs]], Changed] | None = None
    derivative: Callable[[Tensor, ScoreRows[Fields, Inputs]], Tensor] | None = None
    usual: Callable[[UsualCall[Fields]], dict[str, Any]] | None = None

    @property
    def inputs(self) -> tuple[TensorInput | NumberInput, ...]:
        """Its tensors and numbers."""
        return *self.tensors, *self.numbers
