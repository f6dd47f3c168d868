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
    """A tensor of a feature."""

    name: str  # Its name in `ExtraInputs`.
    option: str  # Its name in calls, for arguments and errors.
    dtype: str | None = "float32"  # Its element type as torch names it, or None if it is q's.
    # The shape that a call must pass, in names of `batch` and `heads`; None if other code checks it.
    shape: tuple[str, ...] | None = None
    is_strided: bool = False  # Whether its last dimension may have any stride.
    has_gradient: bool = False  # Whether its gradient is computed, if its elements are numbers.


class NumberInput(NamedTuple):
    """A number of a feature, which kernels take by value. 0 and None mean that the feature is absent."""

    name: str  # Its name in `ExtraInputs`.
    option: str  # Its name in calls, for arguments and errors.
    least: float  # The smallest number apart from 0.
    most: float  # The largest number.
    remedy: str  # A description of valid numbers, for errors.


class ScoreRows(NamedTuple, Generic[Fields, Inputs]):
    """Some rows of scores. Results of the functions broadcast with the scores, in their type and device."""

    fields: Fields
    inputs: Inputs  # Extra inputs of the call.
    of_heads: Callable[[Tensor], Tensor]  # Returns a tensor [batch, heads] as [..., 1, 1].
    # Returns a tensor [batch, heads, seqlen_q, seqlen_kv] as [..., rows, keys].
    of_pairs: Callable[[Tensor], Tensor]
    # Returns the positions of the queries among the keys, [..., rows, 1].
    positions: Callable[[], Tensor]
    distances: Callable[[], Tensor]  # Returns the distances of queries and keys, [..., rows, keys].
    sequence: int = 0  # Number of the first sequence, if the rows are those of one sequence of a batch.


class Changed(NamedTuple):
    """Scores after a feature, and the term that it added, or None if it added none."""

    scores: Tensor
    added: Tensor | None = None


class UsualCall(NamedTuple, Generic[Fields]):
    """A call for which typical inputs are made."""

    fields: Fields
    keys: tuple[int, ...]  # Number of keys of each sequence.
    dtype: torch.dtype  # Element type of q.
    device: torch.device  # Device of the inputs.
    seed: int = 0  # Seed of random values, which depend on no other state.


class Description(NamedTuple, Generic[Fields, Inputs]):
    """One feature."""

    title: str  # Its row of docs/features.md.
    example: str  # An example in a shape.
    word: str  # Its part of `Problem.key`, a format of its fields.
    # Its fields of a problem. A problem has the feature if one of them is not the default.
    fields: tuple[str, ...]
    keys: Mapping[str, str]  # Its keys in shapes, each with its meaning.
    # Further fields, without effect on a problem without the feature.
    details: tuple[str, ...] = ()
    tensors: tuple[TensorInput, ...] = ()
    numbers: tuple[NumberInput, ...] = ()  # Its numbers. They are last in `ExtraInputs`.
    is_mask: bool = False  # Whether it decides which keys a query sees.
    # Whether its inputs refer to positions among all keys of a sequence.
    is_positional: bool = False
    is_sparse: bool = False  # Whether the nominal FLOPs then count visible pairs only.
    # Returns the changed scores. Differentiable; does not write to its argument.
    change: Callable[[Tensor, ScoreRows[Fields, Inputs]], Changed] | None = None
    # Returns the derivative of the changed scores by the scores before; None means 1.
    derivative: Callable[[Tensor, ScoreRows[Fields, Inputs]], Tensor | None] | None = None
    # Returns magnitudes that bound rounding errors of the change, in place of `Changed.added`.
    sizes: Callable[[Tensor, ScoreRows[Fields, Inputs]], Tensor | None] | None = None
    # Returns typical inputs by name.
    usual: Callable[[UsualCall[Fields]], dict[str, Any]] | None = None

    @property
    def inputs(self) -> tuple[TensorInput | NumberInput, ...]:
        """Its tensors and numbers."""
        return *self.tensors, *self.numbers
