"""What attention may ask for beside shapes, types and causality: masks, biases, packing, pages."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashtune.problem import Problem

PAGE_SIZES = (16, 32, 64, 128, 256)


class Feature(enum.StrEnum):
    """A part of a problem that not every kernel family computes."""

    WINDOW = "window"
    SOFTCAP = "softcap"
    ALIBI = "alibi"
    BIAS = "bias"
    SINKS = "sinks"
    FIRST_TOKENS = "first_tokens"
    PREFIX = "prefix"
    CHUNK = "chunk"
    PACKED = "packed"
    LENGTHS = "lengths"
    PAGES = "pages"
    QUANTIZED_KV = "quantized_kv"
    LATENT = "latent"
    DROPOUT = "dropout"
    DETERMINISTIC = "deterministic"


class Bias(enum.StrEnum):
    """What is laid over the scores of a call.

    none      Nothing.
    additive  Numbers in q's type, added to the scaled (and capped) scores.
    boolean   Whether a query sees a key.
    """

    NONE = "none"
    ADDITIVE = "additive"
    BOOLEAN = "boolean"


class KvDtype(enum.StrEnum):
    """Element types of caches that were quantised, beside queries that were not."""

    E4M3 = "e4m3"
    INT8 = "int8"


class KvScale(enum.StrEnum):
    """What shares one scale in a quantised cache: all of it, a head, or a head's part of a page."""

    TENSOR = "tensor"
    HEAD = "head"
    PAGE = "page"


def feature_words(problem: Problem) -> str:
    """What a problem asks for beside shapes, as the end of its key; nothing where it asks for nothing."""
    left, right = ("" if side is None else side for side in (problem.window_left, problem.window_right))
    words = (
        (Feature.WINDOW, f"window{left}:{right}"),
        (Feature.FIRST_TOKENS, f"first{problem.first_tokens}"),
        (Feature.CHUNK, f"chunk{problem.chunk}"),
        (Feature.PREFIX, "prefix"),
        (Feature.SOFTCAP, "softcap"),
        (Feature.ALIBI, "alibi"),
        (Feature.BIAS, f"bias-{problem.bias}"),
        (Feature.SINKS, "sinks"),
        (Feature.PACKED, f"packed{problem.packed}"),
        (Feature.LENGTHS, "lengths"),
        (Feature.PAGES, f"page{problem.page_size}"),
        (Feature.QUANTIZED_KV, f"kv-{problem.kv_dtype}-{problem.kv_scale}"),
        (Feature.LATENT, "latent"),
        (Feature.DROPOUT, "dropout"),
        (Feature.DETERMINISTIC, "deterministic"),
    )
    asked = problem.features
    return "".join(f"_{text}" for feature, text in words if feature in asked)
