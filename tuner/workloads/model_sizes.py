"""Phase and sizes of a model's calls as a user wrote them; imports nothing heavy."""

import enum
from typing import NamedTuple

DEFAULT_SEQLEN = "4096"
DEFAULT_BATCH = "1"
DEFAULT_PAGE_SIZE = "16"


class Phase(enum.StrEnum):
    """Phase of a model: PREFILL attends from a whole prompt to itself, DECODE from one new token to all.

    TRAINING is PREFILL followed by the computation of gradients.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    TRAINING = "training"


class ModelSizes(NamedTuple):
    """Sizes of a model's calls, in the syntax of shapes; None if not given."""

    phase: Phase = Phase.PREFILL
    seqlen: str | None = None  # Length of a sequence: of the prompt, or of the cache in decoding.
    batch: str | None = None  # Sequences.
    dtype: str | None = None  # Element types instead of the checkpoint's.
    # Keys of a page of the cache in decoding, 0 for caches without pages.
    page_size: str | None = None
    packed: bool = False  # Whether the prompts of a prefill form a varlen batch.

    @property
    def any_size(self) -> bool:
        """Returns whether the user gave a size that only models have. Shapes can be trained too."""
        named = any(size is not None for size in self[1:5])
        return named or self.packed or self.phase is Phase.DECODE
