"""Masks of transformers' models for the attention function of flashtune.

A model gets its mask once per forward pass, and passes it to the attention function of each layer. The mask
is one of these:

- None: only the causal mask of the module, if it has one, hides keys.
- bool [batch, 1, seqlen_q, seqlen_kv]: True where a query sees a key. Dimensions may be 1.
- int32 [batch, 2, 1, seqlen_kv], called spans: the first and the last query that see each key. The last query
  is -1 and the one before it -2, because Gemma 4 drops all but the last queries. Further keys are hidden. An
  attribute of the tensor has the pattern on the host. A copy of the tensor lacks it, and is still complete.

No function here waits for the GPU.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.runtime.torch_modes import is_compiling

MODULE = "transformers.masking_utils"
# The attributes of spans with their pattern, and with the boolean mask that was made from them.
PATTERN = "flashtune_pattern"
BOOLEAN = "flashtune_boolean"

MaskFunction = Callable[..., Any]

# The module above and its function that merges masks into a bias, set by
# `flashtune.integrations.transformers.register`.
host: Any = None
bias_mask: Callable[..., Tensor] | None = None


class Structure(NamedTuple):
    """The keys that a query sees, by their positions."""

    causal: bool = False  # Whether keys after the query's position are hidden.
    left: int | None = None  # Number of visible keys before the query's position; None means all.
    # Number of visible keys after it, without a causal mask; None means all.
    right: int | None = None
    # The number of each token's sequence, int [batch, seqlen], if sequences are packed.
    segments: Tensor | None = None

    @property
    def has_window(self) -> bool:
        """Whether one side has a limit."""
        return self.left is not None or self.right is not None

    @property
    def hides_more(self) -> bool:
        """Whether other keys than those after the query's position are hidden."""
        return self.has_window or self.segments is not None


class Pattern:
    """The description of a mask that is available on the host.

    Attributes:
        structure: The visible keys by their positions.
        valid: Which keys are no padding, bool [batch, seqlen_kv]. None if all are valid.
        lengths: Number of keys up to the last query, int32 [batch], if k and v have room for more.
        is_own: Whether queries and keys are the same tokens.
    """

    def __init__(
        self, structure: Structure, valid: Tensor | None, lengths: Tensor | None, is_own: bool
    ) -> None:
        self.structure = structure
        self.valid = valid
        self.lengths = lengths
        self.is_own = is_own

    @property
    def is_causal_alone(self) -> bool:
        """Whether only keys after the query's position are hidden."""
        return self.structure == Structure(causal=True) and self.valid is None and self.lengths is None

    @functools.cached_property
    def orders(self) -> tuple[Tensor, Tensor]:
        """The order of tokens with padding last in each sequence, and its inverse, int64 [batch * seqlen]."""
        assert self.valid is not None
        batch, seqlen = self.valid.shape
        count = self.valid.cumsum(1)
        places = torch.arange(seqlen, device=count.device)
        inverse = torch.where(self.valid, count - 1, count[:, -1:] + places - count)
        starts = torch.arange(0, batch * seqlen, seqlen, device=count.device).unsqueeze(1)
        inverse = (inverse + starts).flatten()
        order = torch.empty_like(inverse)
        return order.scatter_(0, inverse, torch.arange(batch * seqlen, device=count.device)), inverse


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """Returns the mask of a forward pass. The arguments are those of transformers' `sdpa_mask`.

    Returns:
        None, a boolean mask or spans, as the description of this module says.
    """
    complete = functools.partial(
        complete_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        use_vmap=use_vmap,
        device=device,
    )
    structure = None if use_vmap or is_compiling() else structure_of(mask_function)
    if structure is None or type(kv_offset) is not int:
        return complete()
    # Keys up to the last query. An offset on the device is not read.
    keys = q_offset + q_length - kv_offset
    if structure.causal and q_length > 1 and isinstance(keys, int):
        kv_length = min(keys, kv_length)  # the rest of a static cache is hidden
    structure = _needed(structure, kv_length)
    valid = None if attention_mask is None else _valid(attention_mask, kv_length, kv_offset)
    is_aligned = isinstance(keys, int) and keys == kv_length
    is_own = is_aligned and q_length == kv_length
    may_skip = allow_is_causal_skip if structure.causal else allow_is_bidirectional_skip
    if q_length == 1 and structure.causal and (structure.hides_more or not is_aligned):
        return complete()
    if not structure.hides_more and (q_length == 1 or not structure.causal):
        # All queries see the same keys.
        if valid is not None:
            return valid[:, None, None].expand(-1, -1, q_length, -1)
        return None if may_skip else complete()
    config = others.get("config")
    # Layers with the keys of another layer may get only the last queries. These need a mask.
    may_skip = may_skip and not getattr(config, "num_kv_shared_layers", 0)
    if may_skip and is_own and structure.causal and not structure.hides_more and valid is None:
        return None
    # Models that select keys read their mask.
    is_read = structure.segments is None or getattr(config, "index_topk", None)
    if (is_read and not allow_is_causal_skip) if structure.causal else not is_aligned:
        return complete()
    lengths = None
    if not is_aligned:
        lengths = torch.full((batch_size,), 0, dtype=torch.int32, device=device) + keys
    spans = _spans(structure, valid, q_length, kv_length, kv_offset - q_offset, device)
    setattr(spans, PATTERN, Pattern(structure, valid, lengths, is_own))
    return spans


def complete_mask(*arguments: Any, **options: Any) -> Tensor:
    """Returns the boolean mask of transformers' `sdpa_mask`, which hides all that must be hidden."""
    mask: Tensor = host.sdpa_mask(
        *arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **options
    )
    return mask


def is_spans(mask: Tensor) -> bool:
    """Whether a mask has the form of spans."""
    return mask.dtype is torch.int32 and mask.dim() == 4 and mask.shape[1:3] == (2, 1)


def pattern_of(mask: Tensor, seqlen_q: int, seqlen_kv: int) -> Pattern | None:
    """Returns the pattern of spans, or None if it is not known for these lengths, and in compilers."""
    pattern: Pattern | None = None if is_compiling() else getattr(mask, PATTERN, None)
    if pattern is None or mask.shape[-1] != seqlen_kv or (pattern.is_own and seqlen_q != seqlen_kv):
        return None
    return pattern


def boolean_mask(mask: Tensor, seqlen_q: int) -> Tensor:
    """Returns spans as a boolean mask [batch, 1, seqlen_q, seqlen_kv]. Other masks are returned unchanged."""
    if not is_spans(mask):
        return mask
    boolean: Tensor | None = None if is_compiling() else getattr(mask, BOOLEAN, None)
    if boolean is None or boolean.shape[2] != seqlen_q:
        rows = torch.arange(-seqlen_q, 0, device=mask.device, dtype=torch.int32)[:, None]
        boolean = (rows >= mask[:, :1]) & (rows <= mask[:, 1:])
        if not is_compiling():
            setattr(mask, BOOLEAN, boolean)
    return boolean


def selected_mask(mask: Tensor, indices: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
    """Returns a mask that hides all keys but the selected ones too.

    Args:
        mask: A boolean mask, spans or an additive mask.
        indices: The keys that each query sees, integers [batch, seqlen_q, keys].
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys.
    """
    shape = *indices.shape[:2], seqlen_kv
    others = torch.ones(shape, dtype=torch.bool, device=indices.device).scatter(-1, indices.long(), False)
    mask, others = boolean_mask(mask, seqlen_q), others.unsqueeze(1)
    if mask.dtype is torch.bool:
        return mask & ~others
    return mask.masked_fill(others, torch.finfo(mask.dtype).min)


def packed_mask(starts_q: Tensor, starts_k: Tensor, seqlen_q: int, seqlen_kv: int, causal: bool) -> Tensor:
    """Returns the boolean mask of packed sequences, [1, 1, seqlen_q, seqlen_kv].

    Args:
        starts_q: Where the queries of sequences begin and the last ones end, int [sequences + 1].
        starts_k: Likewise for keys.
        seqlen_q: Number of all queries.
        seqlen_kv: Number of all keys.
        causal: Whether the last query of a sequence sees all its keys, and earlier ones fewer.
    """
    queries, keys = (
        torch.arange(count, device=starts_q.device, dtype=starts_q.dtype) for count in (seqlen_q, seqlen_kv)
    )
    of_query = torch.searchsorted(starts_q, queries, right=True)[:, None]
    seen = of_query == torch.searchsorted(starts_k, keys, right=True)
    if causal:
        # Positions are counted from the ends of sequences.
        end = of_query.clamp(max=len(starts_q) - 1)
        seen = seen & (keys - starts_k[end] <= queries[:, None] - starts_q[end])
    return seen[None, None]


def structure_of(function: MaskFunction | None) -> Structure | None:
    """Returns the structure of one of transformers' mask functions, or None if it is another function."""
    if function is None or function is host.causal_mask_function:
        return Structure(causal=True)
    if function is host.bidirectional_mask_function:
        return Structure()
    cells = getattr(function, "__closure__", None)
    if getattr(function, "__module__", None) != MODULE or cells is None:
        return None
    kind = function.__qualname__.partition(".")[0]
    variables = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    match kind:
        case "and_masks":
            return _intersection([structure_of(part) for part in variables["mask_functions"]])
        case "sliding_window_overlay":
            return Structure(left=variables["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Structure(left=variables["sliding_window"], right=variables["sliding_window"])
        case "packed_sequence_mask_function":
            return Structure(segments=variables["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            # Positions within a sequence are consecutive, so that their differences are those of indices.
            return structure_of(variables["mask_function"])
        case _:
            return None


def _intersection(parts: list[Structure | None]) -> Structure | None:
    """Returns the structure of all parts together, or None if one is unknown or two are of one kind."""
    merged = Structure()
    for part in parts:
        if part is None:
            return None
        for name, value in part._asdict().items():
            if value is None or value is False:
                continue
            if name != "causal" and getattr(merged, name) is not None:
                return None
            merged = merged._replace(**{name: value})
    return merged


def _needed(structure: Structure, keys: int) -> Structure:
    """Returns a structure without the limits that hide none of so many keys."""
    left, right = (
        None if bound is None or bound >= keys - 1 else bound for bound in (structure.left, structure.right)
    )
    return structure._replace(left=left, right=right)


def _valid(mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """Returns which of the keys are valid. Keys that the mask lacks are not."""
    missing = kv_offset + kv_length - mask.shape[-1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing))
    return mask[:, kv_offset : kv_offset + kv_length]


def _spans(
    structure: Structure,
    valid: Tensor | None,
    q_length: int,
    kv_length: int,
    offset: int | Tensor,
    device: torch.device | str,
) -> Tensor:
    """Returns the first and the last query that see each key, int32 [batch or 1, 2, 1, kv_length].

    `offset` is the index of the first key's query, counted from the first query.
    """
    own = (torch.arange(kv_length, device=device) + offset).unsqueeze(0)
    if structure.causal:
        first = own
    else:
        first = torch.zeros_like(own) if structure.right is None else own - structure.right
    last = torch.full_like(own, q_length) if structure.left is None else own + structure.left
    if structure.segments is not None:
        segments = structure.segments.contiguous()
        last = torch.minimum(last, torch.searchsorted(segments, segments, right=True) - 1)
        first = torch.maximum(first, torch.searchsorted(segments, segments))
    if valid is not None:
        first = torch.where(valid, first, q_length)
        last = last.expand_as(first)
    first, last = torch.broadcast_tensors(first, last)
    return (torch.stack((first, last), 1).unsqueeze(2) - q_length).to(torch.int32)
