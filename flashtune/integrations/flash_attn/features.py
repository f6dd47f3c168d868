"""The options of a call in flash_attn's terms, and the error for calls that flashtune cannot compute."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flashtune.core.errors import ProblemError


class UnsupportedError(ProblemError, NotImplementedError):
    """flash_attn has this function or argument, and flashtune does not compute it."""


class Descales(NamedTuple):
    """Factors of 8-bit queries, keys and values: float32 [batch, kv_heads], or None for 1."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class Features(NamedTuple):
    """The options of a call besides its tensors of queries, keys and values."""

    scale: float | None = None  # Factor of the scores; None means 1 / sqrt(head_dim).
    # Whether keys after a query's position are hidden. The last query has the last key's position.
    causal: bool = False
    # Number of visible keys before the query's own; None for all. It may be negative.
    left: int | None = None
    right: int | None = None  # Number of visible keys after the query's own, likewise.
    softcap: float = 0.0  # Replaces scores s by softcap · tanh(s / softcap); 0 disables it.
    alibi_slopes: Tensor | None = None  # Float32 [heads] or [batch, heads].
    # A logit of each head without a value, of any floating type: [heads].
    sinks: Tensor | None = None
    chunk: int = 0  # Number of keys of a chunk; 0 for no chunks.
    dropout: float = 0.0  # Fraction of attention weights to drop.
    deterministic: bool = False  # Whether gradients must be bit-identical between runs.
    descales: Descales = Descales()  # Factors of 8-bit inputs.
    seed: Tensor | None = None  # Seed of dropout, int64 [1].
    # Whether the call returns the log-sum-exp, [batch, heads, tokens] or packed [heads, tokens].
    wants_lse: bool = False

    @property
    def has_negative_bound(self) -> bool:
        """Whether a window ends before the query's own key, or starts after it."""
        return (self.left is not None and self.left < 0) or (self.right is not None and self.right < 0)

    @property
    def is_positional(self) -> bool:
        """Whether the keys that a query sees depend on its position."""
        return self.causal or self.left is not None or self.right is not None or self.chunk > 0

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but a causal mask and a scale."""
        return not (
            self.left is not None
            or self.right is not None
            or self.softcap
            or self.alibi_slopes is not None
            or self.sinks is not None
            or self.chunk
            or self.dropout
        )

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of flashtune's functions with dense or packed keys."""
        options = self.paged_options() | {"deterministic": self.deterministic}
        return options | {"dropout_p": self.dropout} if self.dropout else options

    def paged_options(self) -> dict[str, Any]:
        """Returns the keyword arguments that all functions of flashtune share."""
        options: dict[str, Any] = {"causal": self.causal, "scale": self.scale}
        if self.left is not None or self.right is not None:
            options["window"] = (self.left, None if self.causal else self.right)
        if self.softcap:
            options["softcap"] = self.softcap
        if self.alibi_slopes is not None:
            options["alibi_slopes"] = self.alibi_slopes
        if self.sinks is not None:
            options["sinks"] = self.sinks.float()
        if self.chunk:
            options["chunk"] = self.chunk
        return options


def read_features(
    softmax_scale: object,
    causal: object,
    window_size: Any,
    softcap: object,
    keys: int | None = None,
    **others: Any,
) -> Features:
    """Returns the options of a call of flash_attn 2 or 3, in which any negative bound means no bound.

    Version 2 passes `keys`, the number of keys of the longest sequence: a bound of as many is no bound
    either. The right bound then also has no effect on queries that are before the first key.
    """

    def is_bound(number: int | None) -> bool:
        return number is not None and number >= 0 and (keys is None or number < keys)

    left, right = (number if is_bound(number) else None for number in read_bounds(window_size))
    return Features(
        scale=_number(softmax_scale),
        causal=bool(causal),
        left=left,
        right=right,
        softcap=max(_number(softcap) or 0.0, 0.0),
        **others,
    )


def read_bounds(window_size: Any) -> tuple[int | None, int | None]:
    """Returns the numbers of `window_size`, of which flash_attn 4 allows None."""
    try:
        left, right = (None if bound is None else int(bound) for bound in window_size)
    except (TypeError, ValueError) as error:
        raise ProblemError(
            f"window_size cannot be {window_size!r:.60}: pass (left, right), the numbers of visible "
            "keys before and after a query's own"
        ) from error
    return left, right


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
