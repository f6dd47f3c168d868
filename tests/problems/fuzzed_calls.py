"""Random calls of the public API: valid calls with some replaced arguments."""

import random
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import FlashtuneError
from tests.problems.features import KEYS, QUERIES, paged, starts


class Unprintable:
    """An object whose `__repr__` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class FuzzedCall(NamedTuple):
    """One call: a function of the API, its arguments by name, and which of them were replaced."""

    name: str
    function: Callable[..., object]
    arguments: dict[str, Any]
    replaced: tuple[str, ...]


HUGE = 10**5000
VALUES: tuple[Callable[[], object], ...] = (
    lambda: None,
    lambda: True,
    lambda: False,
    *((lambda number=number: number) for number in (-1, 0, 1, 3, 7, 2**31 - 1, 2**31, 2**63, 2**64)),
    *((lambda number=number: number) for number in (10**400, -(10**400), HUGE, -HUGE)),
    *((lambda number=number: number) for number in (0.0, -0.0, 0.5, -0.5, 1e-320, 1e308, -1e308)),
    *((lambda number=number: number) for number in (float("nan"), float("inf"), float("-inf"))),
    *((lambda text=text: text) for text in ("", "1", "bhsd", "thd", "bhd", "fastest", "top_left", "\udc80")),
    lambda: "x" * 10_000_000,
    lambda: b"1",
    list,
    dict,
    lambda: (),
    lambda: (1,),
    lambda: (1, -1),
    lambda: (None, None),
    lambda: (HUGE, "1"),
    lambda: (1, 2, 3),
    lambda: [1.0, 2.0],
    lambda: 1j,
    lambda: np.float64(0.5),
    lambda: np.int64(3),
    lambda: np.ones((2, 4, 8, 32)),
    object,
    Unprintable,
    lambda: len,
    lambda: Tensor,
    lambda: torch.tensor(0.5),
    lambda: torch.tensor(3),
    lambda: torch.ones(2),
    lambda: torch.ones(0),
    lambda: torch.zeros(4, dtype=torch.int32),
    lambda: torch.zeros(6, dtype=torch.int32),
    lambda: torch.ones(1, device="meta"),
)

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip


def sparse(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape).to_sparse()


def sparse_rows(tensor: Tensor) -> Tensor:
    return (
        torch.ones(tensor.shape).flatten(end_dim=-2).to_sparse_csr() if tensor.dim() > 1 else sparse(tensor)
    )


def nested(tensor: Tensor) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])


def jagged(tensor: Tensor) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


def exchanged(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1) if tensor.dim() > 1 else tensor.flip(0)


def heads_exchanged(tensor: Tensor) -> Tensor:
    return tensor.transpose(-3, -2) if tensor.dim() > 2 else tensor


def numbers(tensor: Tensor, number: int) -> Tensor:
    """A copy in which some elements are another number; of floats as well."""
    if tensor.dtype is torch.bool or not tensor.numel():
        return tensor
    copy = tensor.clone()
    copy.view(-1)[:: max(1, tensor.numel() // 2)] = number
    return copy


def plus(tensor: Tensor, number: int) -> Tensor:
    return tensor if tensor.dtype in (torch.bool, torch.float8_e4m3fn) else tensor + number


CHANGES: tuple[Callable[[Tensor], object], ...] = (
    *((lambda tensor, dtype=dtype: tensor.to(dtype)) for dtype in DTYPES),
    *((lambda tensor, dtype=dtype: tensor.to(dtype)) for dtype in DTYPES),
    *((lambda tensor, number=number: numbers(tensor, number)) for number in (-1, 5, 10**6, -(10**6))),
    *((lambda tensor, number=number: plus(tensor, number)) for number in (-1, 1, 16, 2**20, 2**31 - 50)),
    sparse,
    sparse_rows,
    nested,
    jagged,
    exchanged,
    heads_exchanged,
    lambda tensor: tensor[:0],
    lambda tensor: tensor[..., :0],
    lambda tensor: tensor[:1],
    lambda tensor: tensor[..., :1],
    lambda tensor: tensor[None],
    lambda tensor: tensor.sum() if tensor.dtype is not torch.float8_e4m3fn else tensor,
    lambda tensor: tensor.flatten(),
    lambda tensor: torch.cat([tensor, tensor], -1) if tensor.dim() else tensor,
    lambda tensor: torch.cat([tensor, tensor], 0) if tensor.dim() else tensor,
    lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else tensor,
    lambda tensor: tensor.new_zeros(1).expand(2**33, *tensor.shape[1:]),
    lambda tensor: tensor.new_zeros(1).expand(*tensor.shape[:-1], 2**33),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor,
    lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    lambda tensor: tensor.tolist(),
    lambda tensor: tensor.float().numpy(force=True),
)


def dense(chance: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    heads, kv_heads = chance.choice(((4, 2), (2, 2), (3, 1)))
    q = torch.randn(2, heads, chance.choice((1, 5, 20)), 32).to(dtype)
    k = torch.randn(2, kv_heads, chance.choice((7, 20)), 32).to(dtype)
    arguments = {"q": q, "k": k, "v": torch.randn(*k.shape[:3], 16).to(dtype)}
    scores = (2, heads, q.shape[2], k.shape[2])
    options = {
        "causal": lambda: chance.choice((True, "top_left")),
        "window": lambda: (3, 0),
        "softcap": lambda: 2.0,
        "alibi_slopes": lambda: torch.rand(heads),
        "attn_bias": lambda: torch.randn(scores).to(dtype),
        "attn_mask": lambda: torch.rand(scores) > 0.3,
        "sinks": lambda: torch.randn(heads),
        "sink_tokens": lambda: 2,
        "prefix_lengths": lambda: torch.tensor([3, 0], dtype=torch.int32),
        "chunk": lambda: 4,
        "kv_lengths": lambda: torch.tensor([7, 2], dtype=torch.int32),
        "scale": lambda: chance.choice((0.3, -0.3, 1, 0)),
        "layout": lambda: "bhsd",
        "return_lse": lambda: True,
        "prefer": lambda: "generated" if dtype is not torch.float64 else "fastest",
        "dropout_p": lambda: 0.2,
        "deterministic": lambda: True,
        "q_scale": lambda: None,
        "k_scale": lambda: None,
        "v_scale": lambda: None,
    }
    return arguments | _some(chance, options)


def varlen(chance: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    arguments = {
        "q": torch.randn(sum(QUERIES), 4, 32).to(dtype),
        "k": torch.randn(sum(KEYS), 2, 32).to(dtype),
        "v": torch.randn(sum(KEYS), 2, 16).to(dtype),
        "cu_seqlens_q": starts(QUERIES),
        "cu_seqlens_k": starts(KEYS),
        "max_seqlen_q": max(QUERIES),
        "max_seqlen_k": max(KEYS),
    }
    return arguments | _some(chance, _ragged(chance, 5))


def pages(chance: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    layout = chance.choice(("nhd", "hnd"))
    k, v, table, lengths = paged(layout=layout)
    arguments: dict[str, Any] = {
        "k_cache": k.to(dtype),
        "v_cache": v.to(dtype),
        "block_table": table,
        "kv_lengths": lengths,
    }
    form = chance.choice(((5, 4, 32), (5, 2, 4, 32), (sum(QUERIES), 4, 32)))
    arguments["q"] = torch.randn(form).to(dtype)
    if form[0] == sum(QUERIES):
        arguments |= {"cu_seqlens_q": starts(QUERIES), "max_seqlen_q": max(QUERIES)}
    if chance.random() < 0.2:
        arguments |= {"v_cache": None, "value_head_dim": 16}
    options = _ragged(chance, 5) | {"shared_prefix": lambda: chance.choice((0, 16))}
    for absent in ("dropout_p", "deterministic"):
        options.pop(absent)
    return arguments | {"layout": layout} | _some(chance, options)


def _ragged(chance: random.Random, batch: int) -> dict[str, Callable[[], Any]]:
    return {
        "causal": lambda: chance.choice((True, False)),
        "window": lambda: (5, -1),
        "softcap": lambda: 2.0,
        "alibi_slopes": lambda: torch.rand(4),
        "sinks": lambda: torch.randn(4),
        "sink_tokens": lambda: 2,
        "prefix_lengths": lambda: torch.arange(batch, dtype=torch.int32),
        "chunk": lambda: 8,
        "scale": lambda: -0.3,
        "return_lse": lambda: True,
        "prefer": lambda: "fastest",
        "k_scale": lambda: None,
        "v_scale": lambda: None,
        "dropout_p": lambda: 0.2,
        "deterministic": lambda: True,
    }


def _some(chance: random.Random, options: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: make() for name, make in options.items() if chance.random() < 0.12}


def cache_step(**arguments: Any) -> object:
    """Makes a cache, grows two sequences by turns, appends and reads: every method of a cache once."""
    made = {name: arguments[name] for name in CACHE if name in arguments}
    cache = flashtune.PagedKVCache(**made)
    first, second = cache.add(), cache.add()
    slots = cache.extend(arguments.get("sequences", [first, second]), arguments["tokens"])
    slots = arguments.get("slots", slots)
    cache.append(arguments["k"], arguments["v"], slots, layer=arguments["layer"])
    other = cache.fork(arguments.get("sequence", first))
    cache.truncate(other, arguments["length"])
    cache.lengths(arguments.get("sequences", [first, other]), out=arguments.get("out"))
    cache.block_table(arguments.get("sequences", [first, other]))
    cache.slots(arguments.get("sequence", second), arguments["tokens"])
    cache.free(other)
    cache.layer(arguments["layer"])
    return cache.contiguous_bytes(arguments["max_length"]), cache.utilisation, cache.bytes_used


CACHE = (
    "pages", "page_size", "kv_heads", "head_dim", "value_head_dim", "layers", "dtype", "device", "layout",
    "k_scale", "v_scale", "page_scales",
)  # fmt: skip


def steps(chance: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    tokens = chance.choice((1, 5, 20))
    arguments: dict[str, Any] = {"pages": 9, "page_size": 16, "kv_heads": 2, "head_dim": 8, "device": "cpu"}
    arguments |= {"dtype": chance.choice((torch.float32, torch.int8, torch.float8_e4m3fn))}
    arguments |= {"k": torch.randn(2 * tokens, 2, 8), "v": torch.randn(2 * tokens, 2, 8)}
    arguments |= {"tokens": tokens, "layer": 0, "length": 1, "max_length": 64}
    options: dict[str, Callable[[], Any]] = {
        "layers": lambda: 2,
        "value_head_dim": lambda: 8,
        "layout": lambda: "hnd",
        "page_scales": lambda: arguments["dtype"] is not torch.float32,
        "k_scale": lambda: None,
        "v_scale": lambda: None,
        "slots": lambda: torch.arange(2 * tokens),
        "sequences": lambda: [0, 1],
        "sequence": lambda: 0,
        "out": lambda: torch.zeros(4, dtype=torch.int32),
    }
    return arguments | _some(chance, options)


def quantities(chance: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    return {"tensor": torch.randn(2, 3, 5, 8).to(dtype), "layout": chance.choice(("bhsd", "bshd"))}


def parts(chance: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    arguments = {f"out_{part}": torch.randn(2, 3, 5, 8).to(dtype) for part in "ab"}
    return arguments | {f"lse_{part}": torch.randn(2, 3, 5) for part in "ab"} | {"layout": "bhsd"}


MAKERS: dict[
    str, tuple[Callable[..., object], Callable[[random.Random, torch.dtype], dict[str, Any]], int]
] = {
    "attention": (flashtune.attention, dense, 6),
    "attention_varlen": (flashtune.attention_varlen, varlen, 4),
    "attention_paged": (flashtune.attention_paged, pages, 5),
    "plan": (flashtune.plan, dense, 1),
    "plan_varlen": (flashtune.plan_varlen, varlen, 1),
    "plan_paged": (flashtune.plan_paged, pages, 1),
    "explain": (flashtune.explain, dense, 1),
    "explain_varlen": (flashtune.explain_varlen, varlen, 1),
    "PagedKVCache": (cache_step, steps, 3),
    "quantize": (flashtune.quantize, quantities, 1),
    "merge_attention": (flashtune.merge_attention, parts, 1),
}


def fuzzed_call(seed: int, dtypes: tuple[torch.dtype, ...]) -> FuzzedCall:
    """Returns a call that the seed decides.

    Args:
        seed: Of Python's generator and of torch's.
        dtypes: Element types that right calls have.
    """
    chance = random.Random(seed)
    torch.manual_seed(seed)
    name = chance.choices(list(MAKERS), [weight for *_, weight in MAKERS.values()])[0]
    function, make, _ = MAKERS[name]
    arguments = make(chance, chance.choice(dtypes))
    replaced = chance.sample(sorted(arguments), min(len(arguments), chance.choice((0, 1, 1, 1, 1, 2, 3))))
    for argument in replaced:
        value = arguments[argument]
        if isinstance(value, Tensor) and chance.random() < 0.75:
            arguments[argument] = chance.choice(CHANGES)(value)
        else:
            arguments[argument] = chance.choice(VALUES)()
    return FuzzedCall(name, function, arguments, tuple(replaced))


# Limits of one call on the CPU: processor time in s, and bytes.
# Waiting is not counted: other processes may fill the machine.
MAX_SECONDS = 5.0
MAX_BYTES = 2**30


def check_fuzzed_calls(count: int, dtypes: tuple[torch.dtype, ...]) -> int:
    """Makes calls, and returns how many were served.

    Raises:
        AssertionError: A call raised anything but an error of flashtune of one sentence, or took more than
            five seconds or, with those before it, more than 1 GiB.
    """
    served = 0
    before = _most_memory()
    for seed in range(count):
        call = fuzzed_call(seed, dtypes)
        label = f"fuzzed_call({seed}, ...) of {call.name} with another {' and '.join(call.replaced)}"
        start = time.process_time()
        try:
            call.function(**call.arguments)
            served += 1
        except FlashtuneError as error:
            text = str(error)
            assert 10 < len(text) <= 600, (label, text[:600])
            assert "\n" not in text, (label, text)
        except Exception as error:
            raise AssertionError(f"{label} raised {type(error).__name__}") from error
        assert time.process_time() - start < MAX_SECONDS, label
        assert _most_memory() - before < MAX_BYTES, label
    return served


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
