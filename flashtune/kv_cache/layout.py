"""Tensors of a paged cache: pools of pages, scales of quantized pages, slots, block tables and lengths."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashtune.core.arguments import MAX_FLOAT32, MAX_TOKENS, read_count, read_flag, shown
from flashtune.core.errors import ProblemError, UsageError
from flashtune.core.problem import PAGE_SIZES, KvScale
from flashtune.kv_cache.block_manager import Ledger
from flashtune.request.tensor_checks import require_dense

# The scale of a page with only zeros. Any other row raises it.
MIN_SCALE = 1e-30


class Encoding(enum.IntEnum):
    """The encoding of numbers in a pool: unchanged, or divided by a scale in 8 bits."""

    PLAIN = 0
    E4M3 = 1
    INT8 = 2

    @property
    def largest(self) -> float:
        """The largest quotient of the encoding."""
        return {Encoding.E4M3: 448.0, Encoding.INT8: 127.0}.get(self, torch.inf)


WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENCODINGS = {torch.float8_e4m3fn: Encoding.E4M3, torch.int8: Encoding.INT8}


class Pool(NamedTuple):
    """The pages of one layer's keys or values.

    Attributes:
        elements: [pages, kv_heads, page_size, head_dim], the last dimension contiguous.
        scale: Float32 [pages, kv_heads], any strides; None if the pool is not quantised.
        growing: Whether each page has a scale, which is updated with its rows.
    """

    elements: Tensor
    scale: Tensor | None = None
    growing: bool = False

    @property
    def encoding(self) -> Encoding:
        """The encoding of numbers."""
        return ENCODINGS.get(self.elements.dtype, Encoding.PLAIN)


DTYPES = (*WIDE_DTYPES, *ENCODINGS)
MAX_HEAD_DIM = 1024


class PageLayout(enum.StrEnum):
    """The order of a page's dimensions.

    nhd    [page_size, kv_heads, head_dim], the default of vLLM.
    hnd    [kv_heads, page_size, head_dim].
    """

    NHD = "nhd"
    HND = "hnd"


class Extents(NamedTuple):
    """The sizes of a cache."""

    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    layers: int

    def checked(self) -> Extents:
        """Returns the sizes as integers after a check."""
        if not isinstance(self.page_size, int) or self.page_size not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise ProblemError(
                f"pages of {shown(self.page_size)} tokens are not supported: make them one of {sizes}"
            )
        what = f"from 1 to {MAX_HEAD_DIM}, or 0 as value_head_dim where values are columns of the keys"
        return Extents(
            read_count("pages", self.pages, f"a number of pages from 1 to {MAX_TOKENS}", 1),
            self.page_size,
            read_count("kv_heads", self.kv_heads, "1 or more", 1),
            read_count("head_dim", self.head_dim, what, 1, MAX_HEAD_DIM),
            read_count("value_head_dim", self.value_head_dim, what, 0, MAX_HEAD_DIM),
            read_count("layers", self.layers, "1 or more", 1),
        )


class LayeredPool(NamedTuple):
    """The keys or the values of all layers.

    Attributes:
        elements: [layers, pages, page_size, kv_heads, width], or with heads before rows.
        scales: Float32 [layers, pages, kv_heads] of a quantised cache; expanded if pages share them.
        kind: The granularity of the scales; None if the cache is not quantised.
        layout: The order of a page's dimensions.
    """

    elements: Tensor
    scales: Tensor | None
    kind: KvScale | None
    layout: PageLayout

    def layer(self, layer: int) -> Pool:
        """Returns one layer's part with heads before rows: [pages, kv_heads, page_size, width]."""
        elements = self.elements[layer]
        heads_first = elements if self.layout is PageLayout.HND else elements.transpose(1, 2)
        return Pool(
            heads_first, None if self.scales is None else self.scales[layer], self.kind is KvScale.PAGE
        )

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copies pages, int64 [copies], of all layers, and their scales if each page has one."""
        elements = self.elements
        if elements.dtype is torch.float8_e4m3fn:
            # Some versions of torch cannot index 8-bit floats.
            elements = elements.view(torch.uint8)
        elements[:, targets] = elements[:, sources]
        if self.kind is KvScale.PAGE and self.scales is not None:
            self.scales[:, targets] = self.scales[:, sources]


def read_device(device: torch.device | str | None) -> torch.device:
    """Returns the device of a cache, by default torch's default device."""
    try:
        return torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ProblemError(f"device cannot be {shown(device)}: pass 'cuda', 'cuda:0' or 'cpu'") from None


def make_pools(
    extents: Extents,
    dtype: torch.dtype,
    device: torch.device,
    layout: PageLayout,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    page_scales: bool,
) -> tuple[LayeredPool, LayeredPool]:
    """Returns pools of zeros for keys and values.

    Kernels multiply unwritten rows by zero, so these rows must not have NaN.
    """
    keys = _make_pool(extents, extents.head_dim, dtype, device, layout, k_scale, page_scales)
    if not extents.value_head_dim and v_scale is not None:
        raise ProblemError("v_scale is given and values are columns of the keys: k_scale is theirs too")
    values = _make_pool(extents, extents.value_head_dim, dtype, device, layout, v_scale, page_scales)
    if not extents.value_head_dim:
        values = values._replace(scales=keys.scales, kind=keys.kind)
    return keys, values


def _make_pool(
    extents: Extents,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: PageLayout,
    scale: Tensor | float | None,
    page_scales: bool,
) -> LayeredPool:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        names = ", ".join(str(supported).removeprefix("torch.") for supported in DTYPES)
        named = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise ProblemError(f"a cache of {named} is not supported: make it one of {names}")
    page = (extents.page_size, extents.kv_heads)
    shape = (extents.layers, extents.pages, *(page if layout is PageLayout.NHD else page[::-1]), width)
    scales = kind = None
    if dtype in ENCODINGS:
        scales, kind = _read_scales(extents, device, scale, page_scales)
    elif page_scales or scale is not None:
        raise ProblemError(f"scales belong to caches of float8_e4m3fn or int8, not {dtype}: leave them out")
    return LayeredPool(_zeros(shape, dtype, device), scales, kind, layout)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    if size < 2**62:
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:
            # Messages of torch have many lines.
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"a cache of {size / 2**30:.3g} GiB cannot be allocated on {device}: {reason}"
            ) from error
    raise UsageError(f"a cache of 2^{size.bit_length() - 1} bytes is too large: make it of fewer pages")


def _as_tensor(scale: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        require_dense("a scale", scale)
    elif not isinstance(scale, numbers.Real) or isinstance(scale, bool) or not abs(scale) <= MAX_FLOAT32:
        raise ProblemError(f"a scale cannot be {shown(scale)}: pass a positive number or a float32 tensor")
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


def _read_scales(
    extents: Extents, device: torch.device, requested: Tensor | float | None, page_scales: bool
) -> tuple[Tensor, KvScale]:
    """Returns scales as kernels take them, and their granularity."""
    shape = (extents.layers, extents.pages, extents.kv_heads)
    if read_flag("page_scales", page_scales):
        if requested is not None:
            raise ProblemError("scales of pages follow what is appended: leave k_scale and v_scale out")
        return torch.full(shape, MIN_SCALE, dtype=torch.float32, device=device), KvScale.PAGE
    scale = _as_tensor(1.0 if requested is None else requested, device)
    if not scale.dim():
        scale = scale[None]
    allowed = [(1,), (extents.kv_heads,), (extents.layers, 1), (extents.layers, extents.kv_heads)]
    if tuple(scale.shape) not in allowed:
        shapes = ", ".join(str(list(choice)) for choice in dict.fromkeys(allowed))
        raise ProblemError(f"a scale of shape {list(scale.shape)} does not fit: pass one of {shapes}")
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ProblemError("a scale is not a positive number: quotients by it mean nothing")
    kind = KvScale.TENSOR if scale.shape[-1] == 1 else KvScale.HEAD
    # Copy, so that a later change of the caller's tensor has no effect on written rows.
    return scale.clone().reshape(-1, 1, scale.shape[-1]).expand(shape), kind


Integers = NDArray[np.signedinteger[Any]]


def listed(sequences: int | Sequence[int], tokens: int | Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns sequences and a count of tokens for each. Either argument may be one number."""
    numbers = [sequences] if isinstance(sequences, int) else numbers_of("sequences", sequences)
    return numbers, [tokens] * len(numbers) if isinstance(tokens, int) else numbers_of("tokens", tokens)


def numbers_of(name: str, value: Sequence[int]) -> list[int]:
    """Returns a list of numbers. Its elements are not checked."""
    try:
        return list(value)
    except TypeError:
        raise UsageError(f"{name} cannot be {shown(value)}: pass a list of numbers") from None


def slots_of(ledger: Ledger, sequences: Sequence[int], tokens: Sequence[int]) -> Integers:
    """Returns the slots of the last tokens of sequences, int64 [all tokens]."""
    runs = [run for pair in zip(sequences, tokens, strict=True) for run in ledger.runs(*pair)]
    first, rows = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    before = rows.cumsum() - rows
    return np.repeat(first - before, rows) + np.arange(rows.sum())


def table_of(ledger: Ledger, sequences: Sequence[int]) -> Integers:
    """Returns the pages of sequences, int32 [batch, pages of the longest, at least 1], padded with 0."""
    pages = [ledger.holding(sequence).pages for sequence in numbers_of("sequences", sequences)]
    table = np.zeros((len(pages), max([1, *map(len, pages)])), dtype=np.int32)
    for row, held in zip(table, pages, strict=True):
        row[: len(held)] = held
    return table


def lengths_of(ledger: Ledger, sequences: Sequence[int]) -> Integers:
    """Returns the numbers of tokens of sequences, int32 [batch]."""
    lengths = [ledger.holding(sequence).length for sequence in numbers_of("sequences", sequences)]
    return np.array(lengths, dtype=np.int32)


def check_out(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Checks the type, device and shape of a tensor for a result."""
    if out is None:
        return
    require_dense("out", out)
    if out.dtype is not dtype or out.device != device or out.dim() != len(shape):
        raise UsageError(
            f"out is {out.dtype} of {out.dim()} dimensions on {out.device}: "
            f"pass {dtype} of {len(shape)} on {device}"
        )
    if any(size < needed for size, needed in zip(out.shape, shape, strict=True)):
        raise UsageError(f"out of shape {list(out.shape)} is too small: {list(shape)} are needed")


def delivered(array: Integers, device: torch.device, out: Tensor | None, rest: int) -> Tensor:
    """Returns an array on a device, in the first elements of `out` if given; its others become `rest`."""
    host = torch.from_numpy(array)
    check_out(out, array.shape, host.dtype, device)
    # With pinned memory, which torch keeps until the copy ends, the host need not wait for the copy.
    there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
    if out is None:
        return there
    out.fill_(rest)
    out[tuple(slice(size) for size in array.shape)] = there
    return out
