"""Tests of `PagedKVCache` under random sequences of calls."""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from flashtune.core.errors import CacheFullError
from tests.runtime.kv_cache.kv_caches import E4M3, HEADS, LAYERS, VALUE_WIDTH, WIDTH, make, read, rows

PAGES, PAGE = 12, 16
CASES: list[dict[str, Any]] = [
    {"dtype": torch.float32, "layout": "hnd"},
    {"dtype": torch.bfloat16},
    {"dtype": E4M3, "k_scale": 0.5, "v_scale": torch.tensor([0.25, 2.0])},
    {"dtype": torch.int8, "page_scales": True, "layout": "hnd"},
    {"dtype": E4M3, "page_scales": True},
]


class AgainstRows(RuleBasedStateMachine):
    """Every sequence must read its own rows back from every layer, whatever others do."""

    case: dict[str, Any]

    @initialize()
    def begin(self) -> None:
        case = self.case
        self.cache = make(PAGES, PAGE, **case)
        self.given = torch.float32 if self.cache.kv_scale else case["dtype"]
        self.expected: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.seed = 0

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.expected)))

    @rule()
    def add(self) -> None:
        sequence = self.cache.add()
        self.expected[sequence] = [
            (torch.empty(0, HEADS, WIDTH), torch.empty(0, HEADS, VALUE_WIDTH)) for _ in range(LAYERS)
        ]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.some(data)
        self.expected[self.cache.fork(parent)] = list(self.expected[parent])

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        self.cache.free(sequence)
        del self.expected[sequence]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        length = data.draw(st.integers(0, self.cache.length(sequence)))
        self.cache.truncate(sequence, length)
        self.expected[sequence] = [(k[:length], v[:length]) for k, v in self.expected[sequence]]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.expected)), unique=True, min_size=1))
        counts = [data.draw(st.integers(0, 20)) for _ in sequences]
        before = self.state()
        try:
            slots = self.cache.extend(sequences, counts)
        except CacheFullError:
            assert self.state() == before
            return
        for layer in range(LAYERS):
            self.seed += 2
            k, v = (rows(sum(counts), width, self.given, self.seed + width) for width in (WIDTH, VALUE_WIDTH))
            self.cache.append(k, v, slots, layer=layer)
            parts = zip(sequences, k.float().split(counts), v.float().split(counts), strict=True)
            for sequence, *more in parts:
                old = self.expected[sequence][layer]
                self.expected[sequence] = list(self.expected[sequence])
                self.expected[sequence][layer] = (torch.cat((old[0], more[0])), torch.cat((old[1], more[1])))

    def state(self) -> object:
        return [
            self.cache.pages_free,
            self.cache.sequences,
            self.cache.block_table(self.cache.sequences).tolist(),
            self.cache.lengths(self.cache.sequences).tolist(),
        ]

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def sequences_read_their_own_rows(self) -> None:
        for sequence, layers in self.expected.items():
            for layer, expected in enumerate(layers):
                for name, stored, right in zip(
                    "kv", read(self.cache, sequence, layer), expected, strict=True
                ):
                    assert stored.shape == right.shape
                    assert bool(((stored - right).abs() <= self.allowed(name, sequence, layer, right)).all())

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def pages_and_rows_are_counted(self) -> None:
        pages: set[int] = set()
        rows: set[int] = set()
        for sequence, (first, *_) in self.expected.items():
            length = len(first[0])
            assert self.cache.length(sequence) == length
            own = self.cache.block_table([sequence])[0].tolist()[: -(-length // PAGE)]
            assert len(set(own)) == len(own)
            pages.update(own)
            rows.update(self.cache.slots(sequence, length).tolist())
        assert self.cache.pages_used == len(pages)
        assert self.cache.pages_free == PAGES - len(pages)
        assert self.cache.utilisation == (len(rows) / (PAGE * len(pages)) if pages else 1.0)

    def allowed(self, name: str, sequence: int, layer: int, right: Tensor) -> Tensor:
        """How far a stored row may be off: [length, kv_heads, width]."""
        scales = self.cache.k_scales if name == "k" else self.cache.v_scales
        if scales is None:
            return torch.zeros_like(right)
        length = right.shape[0]
        pages = self.cache.block_table([sequence])[0].long()
        scale = scales[layer][pages].repeat_interleave(PAGE, 0)[:length, :, None]
        if self.case["dtype"] is torch.int8:
            return 1.001 * scale
        clamped = (right.abs() - 448 * scale).clamp(min=0)
        # Half a unit in the last place, or two roundings below the normal numbers.
        return clamped + 1.001 * torch.maximum(right.abs() * 2**-4, scale * 2**-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_random_operations_match_reference_rows(case: dict[str, Any]) -> None:
    machine = type("AgainstRowsOfOneCase", (AgainstRows,), {"case": case})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=25))
