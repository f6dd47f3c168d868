"""The tensors of a paged cache: how its pages lie, and the scales of quantised ones."""

from __future__ import annotations

import enum
import math
import numbers
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.append import ENCODINGS, LEAST_SCALE, WIDE_DTYPES, Pool
from flashtune.arguments import MOST_FLOAT32, MOST_TOKENS, read_count, read_flag, shown
from flashtune.errors import ProblemError, UsageError
from flashtune.features import PAGE_SIZES, KvScale
from flashtune.tensor_checks import require_dense

DTYPES = (*WIDE_DTYPES, *ENCODINGS)
MAX_HEAD_DIM = 1024


class PageLayout(enum.StrEnum):
    """The order of a page's dimensions.

    nhd    [page_size, kv_heads, head_dim], vLLM's usual one.
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
        """Returns the sizes as integers, of a cache that there can be.

        Raises:
            ProblemError: There cannot be such a cache.
        """
        if not isinstance(self.page_size, int) or self.page_size not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise ProblemError(
                f"pages of {shown(self.page_size)} tokens are not supported: make them one of {sizes}"
            )
        what = f"from 1 to {MAX_HEAD_DIM}, or 0 as value_head_dim where values are columns of the keys"
        return Extents(
            read_count("pages", self.pages, f"a number of pages from 1 to {MOST_TOKENS}", 1),
            self.page_size,
            read_count("kv_heads", self.kv_heads, "1 or more", 1),
            read_count("head_dim", self.head_dim, what, 1, MAX_HEAD_DIM),
            read_count("value_head_dim", self.value_head_dim, what, 0, MAX_HEAD_DIM),
            read_count("layers", self.layers, "1 or more", 1),
        )


class LayeredPool(NamedTuple):
    """The keys of all layers, or the values.

    Attributes:
        elements: [layers, pages, page_size, kv_heads, width], or with heads before rows.
        scales: Float32 [layers, pages, kv_heads] of a quantised cache; expanded where pages share them.
        kind: What shares a scale; None where nothing is quantised.
        layout: The order of a page's dimensions.
    """

    elements: Tensor
    scales: Tensor | None
    kind: KvScale | None
    layout: PageLayout

    def layer(self, layer: int) -> Pool:
        """One layer's part, heads before rows: [pages, kv_heads, page_size, width]."""
        elements = self.elements[layer]
        heads_first = elements if self.layout is PageLayout.HND else elements.transpose(1, 2)
        return Pool(
            heads_first, None if self.scales is None else self.scales[layer], self.kind is KvScale.PAGE
        )

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copies pages of all layers, int64 [copies], and the scales that belong to them."""
        elements = self.elements
        if elements.dtype is torch.float8_e4m3fn:
            # Not every version of torch indexes 8-bit floats.
            elements = elements.view(torch.uint8)
        elements[:, targets] = elements[:, sources]
        if self.kind is KvScale.PAGE and self.scales is not None:
            self.scales[:, targets] = self.scales[:, sources]


def read_device(device: torch.device | str | None) -> torch.device:
    """Returns the device of a cache, torch's default one where none is given.

    Raises:
        ProblemError: There is no such device.
    """
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
    """Keys and values of zeros: kernels that weigh unwritten rows by zero meet no NaN in them.

    Raises:
        ProblemError: The type or the scales are not supported.
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
        names = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        given = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise ProblemError(f"a cache of {given} is not supported: make it one of {names}")
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
            # Torch's sentences are many lines.
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"a cache of {size / 2**30:.3g} GiB cannot be allocated on {device}: {reason}"
            ) from error
    raise UsageError(f"a cache of 2^{size.bit_length() - 1} bytes is too large: make it of fewer pages")


def _as_tensor(scale: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        require_dense("a scale", scale)
    elif not isinstance(scale, numbers.Real) or isinstance(scale, bool) or not abs(scale) <= MOST_FLOAT32:
        raise ProblemError(f"a scale cannot be {shown(scale)}: pass a positive number or a float32 tensor")
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


def _read_scales(
    extents: Extents, device: torch.device, given: Tensor | float | None, page_scales: bool
) -> tuple[Tensor, KvScale]:
    """Scales as kernels take them, and what shares one."""
    shape = (extents.layers, extents.pages, extents.kv_heads)
    if read_flag("page_scales", page_scales):
        if given is not None:
            raise ProblemError("scales of pages follow what is appended: leave k_scale and v_scale out")
        return torch.full(shape, LEAST_SCALE, dtype=torch.float32, device=device), KvScale.PAGE
    scale = _as_tensor(1.0 if given is None else given, device)
    if not scale.dim():
        scale = scale[None]
    allowed = [(1,), (extents.kv_heads,), (extents.layers, 1), (extents.layers, extents.kv_heads)]
    if tuple(scale.shape) not in allowed:
        shapes = ", ".join(str(list(one)) for one in dict.fromkeys(allowed))
        raise ProblemError(f"a scale of shape {list(scale.shape)} does not fit: pass one of {shapes}")
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ProblemError("a scale is not a positive number: quotients by it mean nothing")
    kind = KvScale.TENSOR if scale.shape[-1] == 1 else KvScale.HEAD
    # A copy, so that what a caller does to its tensor changes no rows that were written.
    return scale.clone().reshape(-1, 1, scale.shape[-1]).expand(shape), kind
