"""`PagedKVCache`: keys and values of many growing sequences, in shared pages."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashtune.core.arguments import read_count, shown
from flashtune.core.errors import ProblemError
from flashtune.core.problem import KvScale
from flashtune.kv_cache.append import append_rows, check_rows, check_slots
from flashtune.kv_cache.block_manager import Ledger, check_counts
from flashtune.kv_cache.layout import (
    Extents,
    PageLayout,
    check_out,
    delivered,
    lengths_of,
    listed,
    make_pools,
    read_device,
    slots_of,
    table_of,
)
from flashtune.request.autocast import any_autocast, autocast, autocast_dtype
from flashtune.request.tensor_checks import require_dense
from flashtune.runtime.value_checks import check_slot_values, values_are_checked


class PagedKVCache:
    """Keys and values of many growing sequences, in pages that are allocated as they grow.

    A page number means the same page in every layer. A step of continuous batching::

        slots = cache.extend(sequences, tokens)  # makes room, once for all layers
        for layer in range(layers):
            cache.append(k, v, slots, layer=layer)  # [all tokens, kv_heads, head_dim]
            ...  # attends to cache.layer(layer) by the two tensors below
        table, lengths = cache.block_table(sequences), cache.lengths(sequences)

    All work is queued on the current stream: use one stream, or synchronise between two. Not thread-safe.

    Attributes:
        keys: [layers, pages, page_size, kv_heads, head_dim], or [layers, pages, kv_heads, page_size,
            head_dim] in layout "hnd".
        values: Likewise, with `value_head_dim`.
        k_scales: Float32 [layers, pages, kv_heads] of a quantised cache, at any granularity. Elements times
            their scale are the keys. None for other caches.
        v_scales: Likewise for values; the keys' scales if values are columns of the keys.
        kv_scale: The granularity of the scales; None for a cache that is not quantised.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        layout: str = "nhd",
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        page_scales: bool = False,
    ) -> None:
        """Allocates all pages, filled with zeros.

        Args:
            pages: Number of pages for all sequences.
            page_size: Tokens per page: a power of two up to 256.
            kv_heads: Number of key and value heads.
            head_dim: Width of keys.
            value_head_dim: Width of values if it differs; 0 if values are columns of the keys (MLA).
            layers: Number of layers of the model.
            dtype: bfloat16, float16, float32; or float8_e4m3fn or int8, with scales.
            device: The device of the pages; by default torch's default device.
            layout: The order of a page's dimensions: "nhd" (rows, heads) or "hnd".
            k_scale: The divisor of keys in a quantised cache, 1 by default: a number or float32 of shape
                [1] or [kv_heads], or for each layer [layers, 1] or [layers, kv_heads]. Quotients beyond the
                type's range (448, or 127 of int8) are clamped.
            v_scale: Likewise for values; invalid if they are columns of the keys.
            page_scales: Whether each head has a scale per page instead, which follows the appended rows. The
                page's first rows determine its first value, and it grows by powers of two.

        Raises:
            ProblemError: The arguments are invalid.
        """
        width = head_dim if value_head_dim is None else value_head_dim
        self._extents = Extents(pages, page_size, kv_heads, head_dim, width, layers).checked()
        if not isinstance(layout, str) or layout not in tuple(PageLayout):
            raise ProblemError(f"layout cannot be {shown(layout)}: pass 'nhd' or 'hnd'")
        where = read_device(device)
        common = (dtype, where, PageLayout(layout))
        self._keys, self._values = make_pools(self._extents, *common, k_scale, v_scale, page_scales)
        # Create the ledger after the tensors: a ledger for more pages than memory has would take minutes.
        self._ledger = Ledger(self._extents.pages, page_size)
        self.keys, self.values = self._keys.elements, self._values.elements
        self.k_scales, self.v_scales = self._keys.scales, self._values.scales
        kinds = self._keys.kind, self._values.kind
        # A scale for all heads is a scale per head with equal values.
        self.kv_scale = KvScale.HEAD if KvScale.HEAD in kinds else kinds[0]
        self.device, self.dtype = self.keys.device, dtype
        self._checks_slots = values_are_checked(self.device)
        self._pools = [(self._keys.layer(number), self._values.layer(number)) for number in range(layers)]

    def add(self) -> int:
        """Returns the number of a new, empty sequence. Numbers are never reused."""
        return self._ledger.add()

    def fork(self, sequence: int) -> int:
        """Returns a new sequence with the same tokens and pages. Shared pages are copied on write."""
        return self._ledger.fork(sequence)

    def free(self, sequence: int) -> None:
        """Removes a sequence. Pages that no other sequence uses become free at once."""
        self._ledger.free(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Removes all tokens after the first `length`, such as rejected draft tokens, and frees pages."""
        self._ledger.truncate(sequence, length)

    def extend(
        self, sequences: int | Sequence[int], tokens: int | Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        """Makes room for more tokens, which count as stored from now on. Append them to every layer.

        A last page that another sequence shares is copied first.

        Args:
            sequences: One sequence or several, without duplicates.
            tokens: Number of additional tokens: one number for all, or one for each sequence.
            out: A tensor for the slots, as in `slots`.

        Returns:
            The slots of these tokens, sequence by sequence, as `append` takes them.

        Raises:
            CacheFullError: There are too few free pages. The cache is unchanged.
            UsageError: The arguments are invalid. The cache is unchanged.
        """
        numbers, counts = listed(sequences, tokens)
        growths = self._ledger.plan(numbers, counts)
        check_out(out, (sum(counts),), torch.int64, self.device)
        copies = [(growth.shared, growth.fresh[0]) for growth in growths if growth.shared is not None]
        if copies:
            # The targets are free until the commit: if the copy fails, the cache is unchanged.
            pages = delivered(np.array(copies, dtype=np.int64), self.device, None, 0)
            for pool in (self._keys, self._values):
                pool.copy_pages(*pages.unbind(1))
        self._ledger.commit(growths)
        return self.slots(numbers, counts, out=out)

    def slots(
        self, sequences: int | Sequence[int], tokens: int | Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        """Returns the slots of the last tokens of sequences, page · page_size + row: int64 [all tokens].

        Args:
            sequences: One sequence or several, without duplicates.
            tokens: Number of tokens of each sequence.
            out: A tensor to fill and return: int64 of at least that many elements. The rest is -1.

        Raises:
            UsageError: A sequence has fewer tokens, or the arguments are invalid.
        """
        numbers, counts = listed(sequences, tokens)
        check_counts(numbers, counts)
        return delivered(slots_of(self._ledger, numbers, counts), self.device, out, -1)

    def append(self, k: Tensor, v: Tensor | None, slots: Tensor, *, layer: int = 0) -> None:
        """Writes keys and values of one layer.

        A CUDA graph can capture it after a first call. Each replay reads the current values of `slots`.

        Args:
            k: [tokens, kv_heads, head_dim], the last dimension contiguous. It has the cache's type, or any
                floating type if the cache is quantised, or under autocast to the cache's type.
            v: [tokens, kv_heads, value_head_dim], likewise; None if `value_head_dim` is 0.
            slots: Int64 [tokens] from `extend`. Rows of negative slots are skipped. With page scales, append
                the tokens of a sequence in order. On a GPU their values are checked only with
                `FLASHTUNE_CHECK=1`.
            layer: The number of the layer.

        Raises:
            ProblemError: The tensors do not match the cache.
        """
        pools = self._pools[self._number_of(layer)]
        if any_autocast() and autocast_dtype(self.device) is self.dtype:
            k, v = autocast(k, self.dtype), None if v is None else autocast(v, self.dtype)
        if v is None:
            require_dense("k", k)
        values = k[..., :0] if v is None else v
        check_slots(slots, self.device)
        for name, rows, pool in zip(("k", "v"), (k, values), pools, strict=True):
            check_rows(name, rows, pool, len(slots))
        if self._checks_slots:
            check_slot_values(slots, self._extents.pages * self._extents.page_size)
        append_rows(k, values, *pools, slots)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns one layer's keys and values as views [pages, kv_heads, page_size, head_dim]."""
        keys, values = self._pools[self._number_of(layer)]
        return keys.elements, values.elements

    def length(self, sequence: int) -> int:
        """Returns the number of tokens of a sequence."""
        return self._ledger.holding(sequence).length

    def lengths(self, sequences: Sequence[int], *, out: Tensor | None = None) -> Tensor:
        """Returns the numbers of tokens of sequences: int32 [batch].

        `out`, int32 of at least that many elements, is filled and returned. The rest is 0.
        """
        return delivered(lengths_of(self._ledger, sequences), self.device, out, 0)

    def block_table(self, sequences: Sequence[int], *, out: Tensor | None = None) -> Tensor:
        """Returns the pages of sequences, in order: int32 [batch, pages of the longest, at least 1].

        Entries after the last page of a sequence are 0. `out`, int32 of at least that many rows and columns,
        is filled and returned. The rest is 0.
        """
        return delivered(table_of(self._ledger, sequences), self.device, out, 0)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The live sequences, oldest first."""
        return self._ledger.sequences

    @property
    def pages_free(self) -> int:
        """Number of free pages."""
        return self._ledger.free_pages

    @property
    def pages_used(self) -> int:
        """Number of pages in use; shared ones count once."""
        return self._extents.pages - self.pages_free

    @property
    def utilisation(self) -> float:
        """Stored tokens over the capacity of the pages in use, shared ones once; 1 without pages in use."""
        room = self.pages_used * self._extents.page_size
        return self._ledger.rows_stored / room if room else 1.0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        width = self._extents.head_dim + self._extents.value_head_dim
        return self._extents.layers * self._extents.kv_heads * width * self.dtype.itemsize

    @property
    def bytes_used(self) -> int:
        """Bytes of keys and values in the used pages, including unwritten rows."""
        return self.pages_used * self._extents.page_size * self.token_bytes

    def contiguous_bytes(self, max_length: int) -> int:
        """Returns the bytes of the live sequences if each had `max_length` tokens allocated in advance."""
        length = read_count("max_length", max_length, "the tokens of the longest sequence")
        return len(self.sequences) * length * self.token_bytes

    def _number_of(self, layer: int) -> int:
        """Returns the number of a layer after a check."""
        if not isinstance(layer, int) or not 0 <= layer < len(self._pools):
            raise ProblemError(f"there is no layer {shown(layer)}: the cache has {len(self._pools)}")
        return layer
