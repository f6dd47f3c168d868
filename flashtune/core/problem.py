"""`Problem`: the computation to perform, its optional features, and its cost in FLOPs and bytes."""

from __future__ import annotations

import math

import msgspec

from flashtune.core.errors import ProblemError
from flashtune.core.features.mask_geometry import MaskInfo, distinct_keys, visible_pairs
from flashtune.core.features.plain_problem import Causal, Direction, Dtype
from flashtune.core.features.records import Bias, BlockLists, Feature, FeatureFields, KvDtype, KvScale
from flashtune.core.features.table import BLOCK_PART, FEATURES, feature_words, features_of

# Other packages import the types of a problem's fields from here.
__all__ = [
    "Bias",
    "BlockLists",
    "Causal",
    "Direction",
    "Dtype",
    "Feature",
    "KvDtype",
    "KvScale",
    "Problem",
    "feature_words",
]

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MASK_BLOCKS = (64, 128)
MAX_HEAD_DIM = 256


class Problem(FeatureFields, frozen=True, kw_only=True):
    """One attention computation: the fields of `PlainProblem` and those of its features.

    The position p of a query among the keys is its index plus `diagonal`.
    """

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ProblemError(
                f"{self.heads} query heads do not divide among {self.kv_heads} KV heads: "
                "make heads a multiple of kv_heads"
            )

        if self.page_size and self.page_size not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise ProblemError(f"pages of {self.page_size} keys are not supported: make them one of {sizes}")
        if self.page_size and self.kv_lengths:
            raise ProblemError("a paged cache always has lengths: leave kv_lengths out")
        if self.block_mask and self.block_mask not in MASK_BLOCKS:
            sizes = " or ".join(map(str, MASK_BLOCKS))
            raise ProblemError(
                f"a block mask with blocks of {self.block_mask} is not supported: pass {sizes}"
            )
        if self.kv_dtype is not None and self.dtype.is_quantized:
            raise ProblemError(f"with keys of {self.kv_dtype} leave queries in bf16, fp16 or fp32")

    @property
    def features(self) -> frozenset[Feature]:
        """The features that the problem needs and not every family supports."""
        return features_of(self)

    @property
    def key(self) -> str:
        """The unique and stable key of the problem in databases and results, as one line.

        It has words of its own: `first`, `chunk`, `packed`, `lengths`, `latent`. They do not follow renamed
        fields.
        """
        value_dim = "" if self.value_head_dim == self.head_dim else f"v{self.value_head_dim}"
        return (
            f"{self.direction}_{self.dtype}_d{self.head_dim}{value_dim}_h{self.heads}x{self.kv_heads}"
            f"_b{self.batch}_q{self.seqlen_q}_k{self.seqlen_kv}_{self.causal}{feature_words(self)}"
        )

    @property
    def computation(self) -> Problem:
        """The problem without its extents. With the config, it determines a kernel's source."""
        return msgspec.structs.replace(
            self, heads=1, kv_heads=1, batch=1, seqlen_q=1, seqlen_kv=1, packed=min(self.packed, 1)
        )

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.direction is Direction.BACKWARD

    @property
    def is_causal(self) -> bool:
        """Whether queries see no keys after their position."""
        return self.causal is not Causal.NONE

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one element of keys and values."""
        return 1 if self.kv_dtype else self.dtype.itemsize

    @property
    def out_dtype(self) -> Dtype:
        """Element type of the output."""
        return self.dtype.out

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def diagonal(self) -> int:
        """The position of query 0 among the keys, from the alignment of the causal mask."""
        return 0 if self.causal is Causal.TOP_LEFT else self.seqlen_kv - self.seqlen_q

    @property
    def sight(self) -> MaskInfo:
        """The visible keys of a query, as far as the host knows."""
        right = 0 if self.causal is not Causal.NONE else self.window_right
        if right is not None and self.window_right is not None:
            right = min(right, self.window_right)
        return MaskInfo(
            self.seqlen_q,
            self.seqlen_kv,
            self.diagonal,
            self.window_left,
            right,
            self.sink_tokens,
            self.chunk,
        )

    def visible_pairs(self) -> int:
        """Returns the number of visible (query, key) pairs of one head, with usual lists of a block mask."""
        return math.ceil(visible_pairs(self.sight) * self.block_share)

    @property
    def block_share(self) -> float:
        """The share of visible pairs that a usual block mask leaves."""
        return 1 / BLOCK_PART if self.block_mask else 1.0

    def flops(self) -> int:
        """Returns the floating-point operations of the products over the visible pairs.

        A varlen batch counts as sequences of the longest length, as many as its tokens fill.
        """
        pairs = self.batch * self.visible_pairs()
        if self.packed:
            pairs = pairs * self.packed // max(1, self.batch * self.seqlen_q)
        return 2 * self.heads * pairs * product_widths(self)

    def nominal_flops(self) -> int:
        """Returns the nominal number of operations: 4·B·H·Sq·Sk·D, 2.5 times that backward, half if causal.

        Reported TFLOP/s use it if all sequences have one length. With a window, chunks, a block mask or
        varlen sequences only visible pairs count.
        """
        if any(FEATURES[feature].is_sparse for feature in self.features):
            return self.flops()
        full = 2 * self.batch * self.heads * self.seqlen_q * self.seqlen_kv * product_widths(self)
        return full // 2 if self.is_causal else full

    def minimal_bytes(self) -> int:
        """Returns the HBM bytes if each input is read once and each output is written once."""
        inputs, outputs = _tensor_bytes(self)
        if not self.is_backward:
            return inputs + outputs
        # Each tensor has a gradient. The gradient of the output is read, the others are written.
        return 2 * (inputs + outputs) + _rows(self) * LSE_BYTES

    def written_bytes(self) -> int:
        """Returns the bytes of the outputs, or of the gradients of the inputs in the backward pass."""
        inputs, outputs = _tensor_bytes(self)
        return inputs if self.is_backward else outputs


# Bytes of an element of the log-sum-exp.
LSE_BYTES = 4
# Scores and probabilities are float32 until the product with the values.
SCORE_BYTES = 4


def product_widths(problem: Problem) -> int:
    """Returns the sum of the head dims of all products of a pass.

    The forward pass has two products, for scores and outputs. The backward pass has five: for scores, the
    gradients of the probabilities, dq, dk and dv.
    """
    if problem.is_backward:
        return 3 * problem.head_dim + 2 * problem.value_head_dim
    return problem.head_dim + problem.value_head_dim


def keys_read(problem: Problem) -> int:
    """Returns the keys of one KV head of all sequences that at least one query sees.

    Lengths in a tensor on the device are unknown. They are assumed to be distributed as in a tuned shape:
    one sequence is the longest, and the others have three quarters of its keys. Varlen batches count as in
    `flops`.
    """
    keys = distinct_keys(problem.sight)
    if problem.packed:
        return problem.batch * keys * problem.packed // max(1, problem.batch * problem.seqlen_q)
    if problem.batch and problem.features & {Feature.KV_LENGTHS, Feature.PAGES}:
        shorter = msgspec.structs.replace(problem, seqlen_kv=problem.seqlen_kv * 3 // 4)
        return keys + (problem.batch - 1) * distinct_keys(shorter.sight)
    return problem.batch * keys


def _rows(problem: Problem) -> int:
    """Returns the number of query rows of all heads."""
    return (problem.packed or problem.batch * problem.seqlen_q) * problem.heads


def _tensor_bytes(problem: Problem) -> tuple[int, int]:
    """Returns the bytes of queries, keys and values, and those of outputs."""
    rows = _rows(problem)
    width = problem.head_dim + (0 if problem.mla else problem.value_head_dim)
    queries = rows * problem.head_dim * problem.dtype.itemsize
    keys = problem.kv_heads * keys_read(problem) * width * problem.kv_itemsize
    return queries + keys, rows * problem.value_head_dim * problem.out_dtype.itemsize


def score_bytes(problem: Problem) -> int:
    """Returns the bytes of all scores of a problem. `unfused_attention` needs 2.5 times as many at once."""
    return problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv * SCORE_BYTES
