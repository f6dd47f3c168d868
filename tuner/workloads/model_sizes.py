"""What a model is asked to do and at which sizes, as a user wrote it; imports nothing heavy."""

from __future__ import annotations

import enum
from typing import NamedTuple

DEFAULT_SEQLEN = "4096"
DEFAULT_BATCH = "1"
DEFAULT_PAGE_SIZE = "16"


class Phase(enum.StrEnum):
    """What a model does: PREFILL attends from a whole prompt to itself, DECODE from one new token to all.

    TRAINING does what PREFILL does, and then computes the gradients.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    TRAINING = "training"


class ModelSizes(NamedTuple):
    """Sizes of a model's calls, as shapes write numbers and words; None where the user left one out.

    Attributes:
        phase: What the model does.
        seqlen: Tokens of a sequence: of the prompt, or of what a new token attends to.
        batch: Sequences.
        dtype: Element types, in place of the checkpoint's own.
        page_size: Keys of a page of decode's cache; 0 for caches without pages.
        packed: Whether the prompts of a prefill lie packed one behind the other.
    """

    phase: Phase = Phase.PREFILL
    seqlen: str | None = None
    batch: str | None = None
    dtype: str | None = None
    page_size: str | None = None
    packed: bool = False

    @property
    def any_size(self) -> bool:
        """Whether the user named what goes with a model alone; shapes too are trained."""
        named = any(size is not None for size in self[1:5])
        return named or self.packed or self.phase is Phase.DECODE
