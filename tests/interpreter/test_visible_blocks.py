"""Lists of blocks of mask functions, by bounds of their values, against all values."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.evaluation import Values, evaluate
from flashtune.core.expressions.nodes import Functions
from flashtune.core.features.functions import integers_of
from flashtune.core.features.masks import seen_blocks
from flashtune.core.features.records import NO_EXTRA_INPUTS, TABLES
from flashtune.core.target import device_target
from flashtune.launch import interval_arithmetic
from flashtune.launch.binding import compile_binary
from flashtune.launch.visible_blocks import listing_kernel, listing_of
from flashtune.request.functions.block_lists import block_lists, unwritten_lists
from flashtune.request.functions.built_in import Extents
from flashtune.request.functions.call import flex_call
from flashtune.request.functions.tracing import trace
from flashtune.runtime.visible_lists import _listing, visible_lists
from tests.problems.random_masks import BATCH, FLOATS, HEADS, KEYS, QUERIES, random_mask
from tests.support.fuzzing import fuzz_count

CPU = torch.device("cpu")
IMPORT = "from flashtune.launch.interval_arithmetic import *"
SIZE = 4


@pytest.fixture(autouse=True)
def computed_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels of functions compute those that are features too."""
    monkeypatch.setattr("flashtune.request.functions.call.built_in", lambda *_, **__: None)


class Blocks(NamedTuple):
    """Blocks that are listed, and in full, and pairs that are visible: [batch, heads, queries, keys]."""

    listed: Tensor
    full: Tensor
    visible: Tensor

    @property
    def are_sound(self) -> bool:
        """Whether blocks that are not listed hide all pairs, and full ones show all."""
        listed, full = (
            blocks.repeat_interleave(SIZE, -1).repeat_interleave(SIZE, -2)[..., :QUERIES, :KEYS]
            for blocks in (self.listed, self.full)
        )
        return not bool((self.visible & ~listed).any() or (~self.visible & full).any())


def blocks_of(
    functions: Functions,
    ints: tuple[int, ...] = (),
    tables: tuple[Tensor, ...] = (),
    text: str = "",
    wrong: str = "",
    device: torch.device = CPU,
) -> Blocks:
    """The blocks of a mask function. `wrong` replaces a text of the kernel or of its operations."""
    extents = BATCH, HEADS, QUERIES, KEYS
    kernel = listing_kernel(functions, SIZE)
    if text:
        source = kernel.source.replace(IMPORT, inspect.getsource(interval_arithmetic))
        assert text in source
        kernel = msgspec.structs.replace(kernel, source=source.replace(text, wrong))
    tables = tuple(table.to(device) for table in tables)
    captured: dict[str, Any] = dict(zip(TABLES, tables, strict=False))
    inputs = NO_EXTRA_INPUTS._replace(
        function_ints=torch.tensor([*integers_of(ints, tables), 0], dtype=torch.int32, device=device),
        function_floats=torch.tensor(FLOATS, device=device),
        **captured,
    )
    shape = unwritten_lists(functions, Extents(*extents), inputs, device).mask.counts.shape[:2]
    rows, columns = (-(-extent // SIZE) for extent in extents[2:])
    counts, full = (torch.full((*shape, rows), -1, dtype=torch.int32, device=device) for _ in range(2))
    indices = torch.full((*shape, rows, columns), -1, dtype=torch.int32, device=device)
    inputs = inputs._replace(block_counts=counts, block_indices=indices, full_counts=full)
    binary = None if device is CPU else compile_binary(kernel, device_target())
    listing_of(kernel, binary, device)(inputs, (shape[1], QUERIES, KEYS))
    b, h, q, k = (
        torch.arange(extent, device=device).view(-1, *[1] * axis)
        for extent, axis in zip(extents, (3, 2, 1, 0), strict=True)
    )
    numbers = torch.tensor(ints, device=device), torch.tensor(FLOATS, device=device).double()
    visible = evaluate(functions, Values(b, h, q, k, *numbers, tables), functions.mask).expand(extents)
    listed, in_full = (seen_blocks(own, indices, indices.shape[-1]) for own in (counts, full))
    return Blocks(listed, in_full, visible)


@pytest.mark.parametrize("seed", range(fuzz_count(60, 3000)))
def test_no_listed_block_is_wrong(seed: int) -> None:
    functions, ints, tables = random_mask(seed)
    assert blocks_of(functions, ints, tables).are_sound


IDS = torch.arange(KEYS) // 7
NUMBERS = torch.arange(KEYS) * 1.0
NUMBERS[6] = torch.nan
MINIMUM = "known(tl.minimum(a, c), tl.minimum(b, d), (a <= b) & (c <= d))"
PATCHES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "swapped bounds": (lambda b, h, q, k: q - k > 4, "within(a - d, b - c, ", "within(a - c, b - d, "),
    "a comparison off by one": (
        lambda b, h, q, k: k - 3 < q, "return (b < c) == 0", "return (b <= c) == 0",
    ),
    "a query less": (lambda b, h, q, k: k < q, "seqlen_q).to(tl.int64)", "seqlen_q - 1).to(tl.int64)"),
    "NaN ignored": (
        lambda b, h, q, k: NUMBERS[k].clamp(max=5.0) <= 5.0, MINIMUM,
        "(tl.where(a == a, tl.minimum(a, c), c), tl.where(b == b, tl.minimum(b, d), d))",
    ),
    "an element less": (lambda b, h, q, k: IDS[k] == IDS[q], "(place < count)", "(place + 1 < count)"),
    "a negative index": (
        lambda b, h, q, k: IDS[k - 40] > 5,
        "tl.where(a < 0, a + size, a), tl.where(b < 0, b + size, b)", "a, b",
    ),
    "all blocks in full": (
        lambda b, h, q, k: k <= q,
        "n_full = tl.where(step < steps, n_listed, n_full)", "n_full = n_listed",
    ),
    "a choice of one side": (
        lambda b, h, q, k: torch.where(q > k, q, -k) > 5,
        "tl.where(is_single & yes, b, greatest)", "greatest",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
def test_wrong_bounds_are_found(name: str) -> None:
    mask, text, wrong = PATCHES[name]
    traced = trace(None, mask)
    assert blocks_of(traced.functions, traced.ints, traced.tables).are_sound
    assert not blocks_of(traced.functions, traced.ints, traced.tables, text, wrong).are_sound


def test_products_that_wrap_are_unknown() -> None:
    blocks = blocks_of(trace(None, lambda b, h, q, k: k * 2**29 >= 0).functions)
    # The products of the first four keys do not wrap.
    assert blocks.full[..., 0].all()
    assert not blocks.full[..., 1:].any()
    assert blocks.listed.all()


DOCUMENTS, TALL = torch.arange(700) // 230, torch.tensor([300, 60])
REACH = torch.tensor([50, 400, 1000])


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + 100 >= k) & (q - k < 350)


MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": window,
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "causal documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
    "prefix": lambda b, h, q, k: (k < TALL[b]) | (q >= k),
    "windows of heads": lambda b, h, q, k: abs(q - k) < REACH[h],
    "distances in floats": lambda b, h, q, k: (q - k) * 0.5 <= 60.25,
    "tiles": lambda b, h, q, k: q // 200 == k // 200,
}


@pytest.mark.parametrize("length", [200, 512, 640])
@pytest.mark.parametrize("name", MASKS)
def test_listed_blocks_are_those_of_torch(name: str, length: int) -> None:
    """Bounds of these masks are exact, so that the blocks are those that torch finds by all values."""
    mask = MASKS[name]
    q, k = torch.empty(2, 3, length, 16), torch.empty(2, 3, 640, 16)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(mask(b, h, i, j), s, -float("inf"))

    side = flex_call(q, k, k, score, None, None, False, False, visible_lists).side
    assert side.block_counts is not None
    assert side.block_indices is not None
    assert side.full_counts is not None
    expected = block_lists(
        flex.create_block_mask(mask, 2, 3, length, 640, device="cpu"), length, 640, full_first=True
    )
    # Torch counts no block of the last queries as full if some of them do not exist.
    for counts, of_torch, rows in (
        (side.block_counts, expected.mask.counts, None),
        (side.full_counts, expected.full_counts, length // 128),
    ):
        found = seen_blocks(counts, side.block_indices, 5)[..., :rows, :]
        exact = seen_blocks(of_torch, expected.mask.indices, 5)[..., :rows, :]
        assert torch.equal(found.expand_as(exact), exact)
    assert side.block_counts.shape[:2] == (
        2 if name == "prefix" else 1,
        3 if name == "windows of heads" else 1,
    )


def hiding(mask: Callable[..., Any]) -> Callable[..., Any]:
    """A score function that hides keys."""
    return lambda s, b, h, q, k: torch.where(mask(b, h, q, k), s, -float("inf"))


def error_of(mask: Callable[..., Any], tensors: tuple[Tensor, ...]) -> float:
    """The largest error of outputs and gradients against SDPA in float64. Each query sees itself."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    _, heads, length, _ = inputs[0].shape
    place = torch.arange(length, device=inputs[0].device)
    head = torch.arange(heads, device=place.device)[:, None, None]
    visible = mask(torch.zeros_like(place[:1]), head, place[:, None], place)
    out = flashtune.flex_attention(inputs[0], inputs[1], inputs[2], hiding(mask))
    exact = torch.nn.functional.scaled_dot_product_attention(wide[0], wide[1], wide[2], visible)
    factors = torch.linspace(0.0, 1.0, out.numel(), device=place.device).view_as(out)
    for result in (out, exact):
        (result * factors).sum().backward()
    pairs = [(out, exact)]
    for own, other in zip(inputs, wide, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        pairs.append((own.grad, other.grad))
    return max(float((own.double() - other).abs().max()) for own, other in pairs)


def test_calls_list_blocks_anew() -> None:
    """New captured numbers, lengths, and elements of captured tensors need no other kernel."""
    documents, size = torch.arange(300) // 100, 60

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q - k < size) & (k <= q + h)

    _listing.cache_clear()
    torch.manual_seed(0)
    for length in (300, 270):
        tensors = tuple(torch.randn(1, 1, length, 16) for _ in range(3))
        assert error_of(mask, tensors) < 1e-5
        documents.copy_(torch.arange(300) // 150)
        assert error_of(mask, tensors) < 1e-5
        size += 100
        assert error_of(mask, tensors) < 1e-5
    assert _listing.cache_info().misses == 1


def test_tensors_of_another_device_are_refused() -> None:
    table = torch.zeros(256, dtype=torch.int32, device="meta")
    q = torch.zeros(1, 1, 256, 16)
    with pytest.raises(ProblemError, match="is on meta and q on cpu"):
        flashtune.flex_attention(q, q, q, hiding(lambda b, h, i, j: table[i] == table[j]))
