"""Kernels of the portable serving families for mutants."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.registry import find_family
from tests.mutants.core import Subject

MASKED, DECODING = "forward_masked", "decode_split_kv"
# Pages that hold a part of a block of keys; such kernels have blocks of so many keys.
SMALL_PAGE, SMALL_PAGES_BLOCK = 16, 32
FIRST_TOKENS = 5
# No power of two, so that the kernel that combines parts has room for one that does not exist.
SPLITS = 3


class Size(NamedTuple):
    """Type of the inputs, tile, and how many queries and keys there are; of decoding the keys."""

    dtype: Dtype
    block_m: int
    block_n: int
    seqlen: int

    @property
    def near(self) -> int:
        """Keys of a window that a short sequence is longer than."""
        return self.block_n + 4

    @property
    def window(self) -> int:
        """Keys of a window in which a tile of queries has blocks that all of them see."""
        return self.block_m + 2 * self.block_n + 2

    @property
    def chunk(self) -> int:
        """Keys of a chunk that ends in a block."""
        return self.block_n + self.block_n // 2

    @property
    def page(self) -> int:
        """Keys of a page that holds two blocks."""
        return 2 * self.block_n

    def masked(self, config: Mapping[str, object] | None = None, /, **features: object) -> Subject:
        """A kernel of the masked family, causal unless the features say otherwise."""
        tile = {"block_m": self.block_m, "block_n": self.block_n, "num_warps": 4, "num_stages": 2}
        problem = {"seqlen_q": self.seqlen, "seqlen_kv": self.seqlen, "heads": 4, **features}
        return self._subject(MASKED, problem, {**tile, **(config or {})})

    def decoding(self, config: Mapping[str, object] | None = None, /, **features: object) -> Subject:
        """A kernel of the decoding family, likewise."""
        tile = {"block_m": 16, "block_n": self.block_n, "num_warps": 4, "num_stages": 2, "num_splits": SPLITS}
        problem = {"seqlen_q": 4, "seqlen_kv": self.seqlen, "heads": 8, **features}
        return self._subject(DECODING, problem, {**tile, **(config or {})})

    def _subject(self, family: str, problem: dict[str, object], config: dict[str, object]) -> Subject:
        defaults = {"dtype": self.dtype, "head_dim": 24, "value_head_dim": 20, "kv_heads": 2, "batch": 2}
        asked = msgspec.convert({**defaults, "causal": Causal.BOTTOM_RIGHT, **problem}, Problem)
        tile = msgspec.convert(config, find_family(family).config_type)
        return Subject(family, asked, tile, Specialization(lse=True))


# Under the interpreter 16-bit products are garbage.
INTERPRETED = Size(Dtype.FP32, 16, 16, 64)
USUAL = Size(Dtype.BF16, 64, 32, 512)
