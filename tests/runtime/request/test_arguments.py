"""Tests that each API function refuses arguments of wrong types in one sentence."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashtune
from flashtune.core.arguments import read_count, shown
from flashtune.core.errors import ProblemError, UsageError
from flashtune.runtime.session import SESSION
from tests.runtime.request.arguments import paged_arguments, varlen_arguments

HUGE = 10**5000
TOO_LARGE = 2**31 - 1, 256, 1, 1024
FAR_TOO_LARGE = 2**31 - 1, 256, 2**20, 1024
TEXT: Any = "9"
EIGHT_BITS = torch.ones(1).to(torch.float8_e4m3fn)
DENSE = torch.randn(2, 4, 5, 32, dtype=torch.float64)


def dense(**changes: Any) -> Any:
    return flashtune.attention(**{"q": DENSE, "k": DENSE, "v": DENSE} | changes)


def planned(**changes: Any) -> object:
    return flashtune.plan(**{"q": DENSE, "k": DENSE, "v": DENSE} | changes)


def explained(**changes: Any) -> object:
    return flashtune.explain(**{"q": DENSE, "k": DENSE, "v": DENSE} | changes)


def varlen(**changes: Any) -> object:
    return flashtune.attention_varlen(**varlen_arguments(**changes))


def pages(**changes: Any) -> object:
    return flashtune.attention_paged(**paged_arguments(**changes))


def masked(**changes: Any) -> object:
    return dense(attn_mask=torch.ones(5, 5, dtype=torch.bool), **changes)


class Watching(TorchDispatchMode):
    """A mode that runs each operator: with one, calls go through flashtune's operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watched(**changes: Any) -> object:
    with Watching():  # type: ignore[no-untyped-call]
        return dense(**changes)


def sparse_rows() -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.ones(4, 4).to_sparse_csr()


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


SCALE = ": pass a finite number, or None for 1 / sqrt"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"k_scale": 1.0}, "k_scale is a float: pass a"),
    ({"scale": "1"}, "scale cannot be '1'" + SCALE),
    ({"scale": 10**400}, "scale cannot be an integer of 1329 bits" + SCALE),
    ({"scale": -HUGE}, "scale cannot be an integer of 16610 bits" + SCALE),
    ({"scale": float("nan")}, "scale cannot be nan" + SCALE),
    ({"scale": 1e39}, r"scale cannot be 1e\+39" + SCALE),
    ({"scale": torch.ones(2)}, "scale cannot be a Tensor" + SCALE),
    ({"q": torch.ones(4, 4).to_sparse()}, r"q has layout torch.sparse_coo: pass q.to_dense\(\)"),
    ({"q": sparse_rows()}, "q has layout torch.sparse_csr: pass"),
    ({"q": nested(torch.strided)}, "q is a nested tensor: pass a dense one"),
    ({"q": nested(torch.jagged)}, "q is a nested tensor: pass a dense one"),
    ({"q": np.ones(3)}, "q is a ndarray: pass a torch tensor"),
    ({"causal": []}, "causal cannot be a list: pass False, True"),
    ({"causal": HUGE}, "causal cannot be an integer of 16610 bits: pass"),
    ({"return_lse": torch.ones(2)}, "return_lse cannot be a Tensor: pass True or False"),
    ({"prefer": {}}, "prefer cannot be a dict: pass 'fastest' or 'generated'"),
    ({"window": "x" * 10**6}, "window cannot be a string of 1000000 characters: pass"),
    ({"softcap": 1e-40}, "softcap cannot be 1e-40: pass a positive number"),
    ({"softcap": torch.ones(2)}, "softcap cannot be a Tensor: pass a positive number"),
    ({"chunk": np.ones(2)}, "chunk cannot be a ndarray: pass how many keys"),
    ({"sinks": [0.0] * 4}, "sinks is a list: pass a torch tensor"),
    ({"sinks": torch.ones(4).to_sparse()}, "sinks has layout torch.sparse_coo"),
]


@pytest.mark.slow
@pytest.mark.parametrize("call", [dense, varlen, pages, planned, explained])
@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[text[:24] for _, text in REFUSED])
def test_a_wrong_argument_is_refused(
    call: Callable[..., object], changes: dict[str, Any], sentence: str
) -> None:
    if call is pages and "return_lse" in changes:
        sentence = "return_lse cannot be"
    with pytest.raises(ProblemError, match=sentence):
        call(**changes)


@pytest.mark.parametrize("value", [torch.ones(2), -16, "16", None])
def test_a_wrong_shared_prefix_is_refused(value: Any) -> None:
    with pytest.raises(ProblemError, match=r"shared_prefix cannot be .*: pass how many first tokens"):
        pages(shared_prefix=value)


def test_wrong_scale_is_refused_after_a_valid_call() -> None:
    right = dense(scale=0.5)
    for call in (dense, varlen, pages):
        call(scale=0.5)
        with pytest.raises(ProblemError, match="scale cannot be"):
            call(scale="0.5")
    assert torch.equal(dense(scale=np.float32(0.5)), right)


FLAGS: list[tuple[str, bool, Any]] = [
    ("return_lse", True, 1),
    ("return_lse", False, 0.0),
    ("causal", True, 1),
    ("causal", False, 0),
    ("deterministic", True, 1),
    ("deterministic", False, np.False_),
    ("deterministic", False, None),
]
TAKE_FLAGS = [
    *itertools.product([dense, masked, varlen, planned, explained, watched], FLAGS),
    *((pages, flag) for flag in FLAGS if flag[0] != "deterministic"),
]


@pytest.mark.parametrize(("call", "flag"), TAKE_FLAGS)
def test_numbers_are_refused_as_flags_in_first_and_later_calls(
    call: Callable[..., object], flag: tuple[str, bool, Any]
) -> None:
    name, right, wrong = flag
    SESSION.forget()
    for _ in range(2):
        with pytest.raises(ProblemError, match=f"{name} cannot be .*: pass "):
            call(**{name: wrong})
        call(**{name: right})


def test_numpy_integers_are_accepted() -> None:
    assert read_count("count", np.int64(3), "a number") == 3
    assert type(read_count("count", np.int64(3), "a number")) is int
    for wrong in (True, 3.0, np.float64(3), "3", -1, 2**31, None):
        with pytest.raises(ProblemError, match=r"count cannot be .*: pass a number"):
            read_count("count", wrong, "a number")


def test_messages_are_short_and_call_no_methods_of_values() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise RuntimeError("asked for its text")

    values = (
        HUGE,
        -HUGE,
        "x" * 10**7,
        Loud(),
        (Loud(), HUGE),
        [1] * 10**6,
        torch.ones(10**6),
        type("y" * 500, (), {})(),
    )
    assert max(len(shown(value)) for value in values) < 100
    assert shown((1, None, "a")) == "(1, None, 'a')"
    assert shown((1,)) == "(1,)"


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda cache, seq: cache.truncate(seq, "1"), "length cannot be '1': pass how many of the 3 tokens"),
        (lambda cache, seq: cache.truncate(seq, 4), "length cannot be 4: pass how many of the 3 tokens"),
        (lambda cache, seq: cache.extend(seq, -1), "a count of tokens cannot be -1"),
        (lambda cache, seq: cache.extend(seq, 2.0), "tokens cannot be 2.0: pass a list of numbers"),
        (lambda cache, seq: cache.extend([seq], [HUGE]), "a count of tokens cannot be an integer"),
        (lambda cache, seq: cache.extend([[seq]], 1), "a sequence cannot be a list: pass its number"),
        (lambda cache, seq: cache.extend([seq, seq], [1, 1]), "a sequence is named twice: pass one count"),
        (lambda cache, seq: cache.extend([seq], [1, 2]), "1 sequences and 2 counts of tokens: pass one for"),
        (lambda cache, seq: cache.slots(seq, 4), "has 3 tokens and not 4: extend it first"),
        (lambda cache, seq: cache.fork(7), "sequence 7 is not in this cache"),
        (lambda cache, seq: cache.lengths(seq), "sequences cannot be 0: pass a list of numbers"),
        (lambda cache, seq: cache.block_table([seq], out=3), "out is a int: pass a torch tensor"),
        (lambda cache, seq: cache.layer("0"), "there is no layer '0': the cache has 1"),
        (lambda cache, seq: cache.free({}), "sequence a dict is not in this cache"),
        (lambda cache, seq: cache.append("k", None, torch.arange(3)), "k is a str: pass a torch tensor"),
        (lambda cache, seq: cache.append(torch.ones(3, 1, 8), None, [0, 1, 2]), "slots is a list: pass"),
        (lambda cache, seq: cache.contiguous_bytes(-1), "max_length cannot be -1: pass the tokens"),
        (lambda cache, seq: flashtune.PagedKVCache(TEXT, 16, 1, 8), "pages cannot be '9': pass a number"),
        (lambda cache, seq: flashtune.PagedKVCache(9, 16, HUGE, 8), "kv_heads cannot be an integer of"),
        (lambda cache, seq: flashtune.PagedKVCache(9, 16, 1, 8, device="gpu"), "device cannot be 'gpu'"),
        (lambda cache, seq: flashtune.PagedKVCache(*TOO_LARGE, device="cpu"), "cannot be allocated on cpu"),
        (lambda cache, seq: flashtune.PagedKVCache(*FAR_TOO_LARGE), "a cache of 2\\^69 bytes is too large"),
        (lambda cache, seq: flashtune.merge_attention(*[EIGHT_BITS] * 4), "out_a is torch.float8_e4m3fn"),
        (lambda cache, seq: flashtune.quantize(EIGHT_BITS[None, None, None]), "pass four of a floating type"),
        (lambda cache, seq: flashtune.quantize(TEXT), "the tensor to quantise is a str"),
        (lambda cache, seq: flashtune.merge_attention(TEXT, *[torch.ones(1)] * 3), "out_a is a str: pass"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_a_cache_is_refused(
    step: Callable[[flashtune.PagedKVCache, int], object], sentence: str
) -> None:
    cache = flashtune.PagedKVCache(9, 16, 1, 8, value_head_dim=0, dtype=torch.float32, device="cpu")
    sequence = cache.add()
    cache.extend(sequence, 3)
    with pytest.raises(UsageError, match=sentence):
        step(cache, sequence)
    assert cache.length(sequence) == 3


def test_unknown_arguments_are_named_with_the_function_and_close_names() -> None:
    with pytest.raises(TypeError, match=r"^attention has no argument 'is_causal': did you mean 'causal'\?$"):
        dense(is_causal=True)
    with pytest.raises(TypeError, match=r"^attention_varlen has no argument 'attn_bias': choose one"):
        varlen(attn_bias=DENSE)


def test_inputs_without_heads_are_refused_with_a_remedy() -> None:
    rows = DENSE[:, 0]
    with pytest.raises(ProblemError, match=r"q\.unsqueeze\(1\) makes one head of"):
        flashtune.attention(rows, rows, rows)
    with pytest.raises(ProblemError, match=r"q\.unsqueeze\(2\) makes one head"):
        flashtune.attention(rows, rows, rows, layout="bshd")
