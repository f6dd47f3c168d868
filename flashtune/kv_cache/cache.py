"""`PagedKVCache`: keys and values of many growing sequences, in pages that any of them may use."""

from __future__ import annotations

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
from flashtune.request.tensor_checks import require_dense
from flashtune.runtime.value_checks import check_slot_values, values_are_checked


class PagedKVCache:
    """Keys and values of many growing sequences, in pages that are given out as they grow.

    A page number means the same page in every layer. A step of continuous batching:

        slots = cache.extend(sequences, tokens)  # makes room, once for all layers
        for layer in range(layers):
            cache.append(k, v, slots, layer=layer)  # [all tokens, kv_heads, head_dim]
            ...  # attends to cache.layer(layer) by the two tensors below
        table, lengths = cache.block_table(sequences), cache.lengths(sequences)

    Everything is queued on the current stream: use one, or wait between two. Not safe with threads.

    Attributes:
        keys: [layers, pages, page_size, kv_heads, head_dim], or [layers, pages, kv_heads, page_size,
            head_dim] in layout "hnd".
        values: Likewise, of `value_head_dim`.
        k_scales: Float32 [layers, pages, kv_heads] of a quantised cache, whatever shares a scale: elements
            times their scale are the keys. None of others.
        v_scales: Likewise; the keys' own where values are columns of them.
        kv_scale: What shares a scale; None where nothing is quantised.
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
            pages: How many pages all sequences share.
            page_size: Tokens of a page: 16, 32, 64, 128 or 256.
            kv_heads: Key and value heads.
            head_dim: Width of keys.
            value_head_dim: Width of values, if another; 0 where values are columns of the keys (MLA).
            layers: Layers of the model.
            dtype: bfloat16, float16, float32; or float8_e4m3fn or int8, with scales.
            device: Where the pages lie; torch's default device if not given.
            layout: The order of a page's dimensions: "nhd" (rows, heads) or "hnd".
            k_scale: What keys of a quantised cache are divided by, 1 if not given: a number or float32 of
                shape [1] or [kv_heads], or for each layer [layers, 1] or [layers, kv_heads]. Quotients
                beyond the type's range (448, or 127 of int8) are clamped.
            v_scale: Likewise of values; not where they are columns of the keys.
            page_scales: Whether each head has a scale in each page instead, which follows the rows that are
                appended: it begins with what the page's first rows ask for and grows by powers of two.

        Raises:
            ProblemError: There cannot be such a cache.
        """
        width = head_dim if value_head_dim is None else value_head_dim
        self._extents = Extents(pages, page_size, kv_heads, head_dim, width, layers).checked()
        if not isinstance(layout, str) or layout not in tuple(PageLayout):
            raise ProblemError(f"layout cannot be {shown(layout)}: pass 'nhd' or 'hnd'")
        place = read_device(device)
        common = (dtype, place, PageLayout(layout))
        self._keys, self._values = make_pools(self._extents, *common, k_scale, v_scale, page_scales)
        # The ledger of pages that cannot be allocated would take minutes to make.
        self._ledger = Ledger(self._extents.pages, page_size)
        self.keys, self.values = self._keys.elements, self._values.elements
        self.k_scales, self.v_scales = self._keys.scales, self._values.scales
        kinds = self._keys.kind, self._values.kind
        # A scale for all heads is one for each of them.
        self.kv_scale = KvScale.HEAD if KvScale.HEAD in kinds else kinds[0]
        self.device, self.dtype = self.keys.device, dtype
        self._checks_slots = values_are_checked(self.device)
        self._pools = [(self._keys.layer(one), self._values.layer(one)) for one in range(layers)]

    def add(self) -> int:
        """A new sequence without tokens: its number, which is never given twice."""
        return self._ledger.add()

    def fork(self, sequence: int) -> int:
        """A new sequence of the same tokens, in the same pages: the first to write to one copies it."""
        return self._ledger.fork(sequence)

    def free(self, sequence: int) -> None:
        """Ends a sequence; pages that no other holds are free at once."""
        self._ledger.free(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all tokens but the first `length`, and frees pages: what was guessed and not accepted."""
        self._ledger.truncate(sequence, length)

    def extend(
        self, sequences: int | Sequence[int], tokens: int | Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        """Makes room for more tokens, which count as stored from now on: every layer is to append them.

        A last page that is shared with another sequence is copied first.

        Args:
            sequences: One sequence or several, none twice.
            tokens: How many tokens each will have more: a number for all, or one for each.
            out: Where the slots go, as `slots` takes it.

        Returns:
            The slots of these tokens, sequence by sequence, as `append` takes them.

        Raises:
            CacheFullError: There are too few free pages; nothing was changed.
            UsageError: The arguments do not fit; nothing was changed.
        """
        numbers, counts = listed(sequences, tokens)
        growths = self._ledger.plan(numbers, counts)
        check_out(out, (sum(counts),), torch.int64, self.device)
        copies = [(growth.shared, growth.fresh[0]) for growth in growths if growth.shared is not None]
        if copies:
            # To pages that are free until it is done: should it fail, nothing has changed.
            pages = delivered(np.array(copies, dtype=np.int64), self.device, None, 0)
            for pool in (self._keys, self._values):
                pool.copy_pages(*pages.unbind(1))
        self._ledger.commit(growths)
        return self.slots(numbers, counts, out=out)

    def slots(
        self, sequences: int | Sequence[int], tokens: int | Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        """Where the last tokens of sequences lie, page · page_size + row: int64 [all tokens].

        Args:
            sequences: One sequence or several, none twice.
            tokens: How many tokens of each.
            out: Int64 of at least so many elements, which is filled and returned; the rest is -1.

        Raises:
            UsageError: A sequence has fewer tokens, or the arguments do not fit.
        """
        numbers, counts = listed(sequences, tokens)
        check_counts(numbers, counts)
        return delivered(slots_of(self._ledger, numbers, counts), self.device, out, -1)

    def append(self, k: Tensor, v: Tensor | None, slots: Tensor, *, layer: int = 0) -> None:
        """Writes keys and values of one layer.

        CUDA graphs capture it, if it ran once before: what is replayed reads `slots` anew.

        Args:
            k: [tokens, kv_heads, head_dim] of the cache's type, or of any floating type where the cache is
                quantised; the last dimension contiguous.
            v: [tokens, kv_heads, value_head_dim], likewise; None where that is 0.
            slots: Int64 [tokens], as `extend` gave them; rows of negative slots go nowhere. With scales of
                pages, the tokens of a sequence are to be appended in order. On a GPU their values are checked
                only with `FLASHTUNE_CHECK=1`.
            layer: Which layer's they are.

        Raises:
            ProblemError: The tensors do not fit.
        """
        pools = self._pools[self._number_of(layer)]
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
        """One layer's keys and values as views [pages, kv_heads, page_size, head_dim], in any layout."""
        keys, values = self._pools[self._number_of(layer)]
        return keys.elements, values.elements

    def length(self, sequence: int) -> int:
        """The tokens of a sequence."""
        return self._ledger.holding(sequence).length

    def lengths(self, sequences: Sequence[int], *, out: Tensor | None = None) -> Tensor:
        """The tokens of sequences: int32 [batch].

        `out`, int32 of at least so many elements, is filled and returned; the rest is 0.
        """
        return delivered(lengths_of(self._ledger, sequences), self.device, out, 0)

    def block_table(self, sequences: Sequence[int], *, out: Tensor | None = None) -> Tensor:
        """The pages of sequences, in order: int32 [batch, pages of the longest, and 1 at least].

        Entries behind the last page of a sequence are 0. `out`, int32 of at least so many rows and
        columns, is filled and returned; the rest is 0.
        """
        return delivered(table_of(self._ledger, sequences), self.device, out, 0)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The live sequences, oldest first."""
        return self._ledger.sequences

    @property
    def pages_free(self) -> int:
        """Pages that nobody holds."""
        return self._ledger.free_pages

    @property
    def pages_used(self) -> int:
        """Pages that sequences hold; shared ones count once."""
        return self._extents.pages - self.pages_free

    @property
    def utilisation(self) -> float:
        """Tokens stored over tokens that the used pages could hold, shared ones once; 1 if none is used."""
        room = self.pages_used * self._extents.page_size
        return self._ledger.rows_stored / room if room else 1.0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        width = self._extents.head_dim + self._extents.value_head_dim
        return self._extents.layers * self._extents.kv_heads * width * self.dtype.itemsize

    @property
    def bytes_used(self) -> int:
        """Bytes of keys and values in the used pages, unwritten rows among them."""
        return self.pages_used * self._extents.page_size * self.token_bytes

    def contiguous_bytes(self, max_length: int) -> int:
        """Bytes that the live sequences would take if each were given `max_length` tokens beforehand."""
        length = read_count("max_length", max_length, "the tokens of the longest sequence")
        return len(self.sequences) * length * self.token_bytes

    def _number_of(self, layer: int) -> int:
        """Returns the number of a layer, which the cache has."""
        if not isinstance(layer, int) or not 0 <= layer < len(self._pools):
            raise ProblemError(f"there is no layer {shown(layer)}: the cache has {len(self._pools)}")
        return layer
