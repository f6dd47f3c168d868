"""Tests that invalid input is refused in one sentence with the tensor and the remedy."""

from typing import Any

import pytest
import torch

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.problem import Causal, Dtype
from flashtune.request.arguments import read_causal
from flashtune.request.call import dense_call, varlen_call
from flashtune.request.read_call import read_call


def tensors(
    q: tuple[int, ...] = (2, 8, 16, 64),
    k: tuple[int, ...] = (2, 2, 24, 64),
    v: tuple[int, ...] = (2, 2, 24, 32),
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(q, dtype=dtype), torch.zeros(k, dtype=dtype), torch.zeros(v, dtype=dtype)


def test_request_describes_the_tensors() -> None:
    q, k, v = tensors()
    request = read_call(dense_call(q, k, v, causal=True, return_lse=True, prefer="generated"))
    problem = request.problem
    assert (problem.dtype, problem.causal) == (Dtype.FP16, Causal.BOTTOM_RIGHT)
    assert (problem.heads, problem.kv_heads, problem.head_dim, problem.value_head_dim) == (8, 2, 64, 32)
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv) == (2, 16, 24)
    assert request.out_shape == (2, 8, 16, 32)
    assert request.lse_shape == (2, 8, 16)
    assert request.default_scale == 0.125


def test_both_layouts_have_the_same_problem() -> None:
    q, k, v = tensors()
    first = read_call(dense_call(q, k, v))
    moved = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    second = read_call(dense_call(*moved, layout="bshd"))
    assert first.problem == second.problem
    assert second.out_shape == (2, 16, 8, 32)
    assert second.views(*moved)[0].shape == q.shape


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (False, Causal.NONE),
        (True, Causal.BOTTOM_RIGHT),
        ("top_left", Causal.TOP_LEFT),
        ("bottom_right", Causal.BOTTOM_RIGHT),
        ("none", Causal.NONE),
    ],
)
def test_causal_options(value: bool | str, meaning: Causal) -> None:
    assert Causal(read_causal(value)) is meaning


@pytest.mark.parametrize("value", ["diagonal", 1, None])
def test_other_causal_options_are_refused(value: object) -> None:
    with pytest.raises(ProblemError, match="'top_left' or 'bottom_right'"):
        read_causal(value)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (8, 16, 64)}, "q has 3 dimensions"),
        ({"q": (3, 8, 16, 64)}, "q has 3 sequences and k has 2"),
        ({"q": (2, 7, 16, 64)}, "7 query heads do not divide among 2 KV heads"),
        ({"q": (2, 0, 16, 64)}, "0 query heads"),
        ({"q": (2, 8, 16, 32)}, "q has head dim 32 and k has 64"),
        ({"v": (2, 2, 23, 64)}, r"k is \[2, 2, 24, 64\] and v \[2, 2, 23, 64\]: make all but widths equal"),
        ({"q": (2, 8, 16, 257), "k": (2, 2, 24, 257)}, "kernels take 1 to 256"),
        ({"v": (2, 2, 24, 0)}, "v has head dim 0"),
    ],
)
def test_mismatched_shapes_are_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        read_call(dense_call(*tensors(**shapes)))  # type: ignore[arg-type]


def test_mixed_and_unsupported_tensors() -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match="give them one dtype"):
        read_call(dense_call(q, k.float(), v))
    with pytest.raises(ProblemError, match="move them to one device"):
        read_call(dense_call(q, k.to("meta"), v))
    with pytest.raises(ProblemError, match="float64: no kernel takes it"):
        read_call(dense_call(q.double(), k.double(), v.double(), prefer="generated"))
    with pytest.raises(ProblemError, match="q is a list"):
        flashtune.attention([[1.0]], k, v)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_keys_require_scales(dtype: torch.dtype) -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match="pass k_scale and v_scale"):
        flashtune.explain(q, k.to(dtype), v.to(dtype))


@pytest.mark.parametrize("missing", [0, 1])
def test_varlen_calls_require_cu_seqlens(missing: int) -> None:
    q, starts = torch.zeros(4, 2, 32), [torch.tensor([0, 4], dtype=torch.int32)] * 2
    starts[missing] = None  # type: ignore[call-overload]
    with pytest.raises(ProblemError, match=r"cu_seqlens_[qk] is None: pass where sequences begin"):
        flashtune.attention_varlen(q, q, q, *starts, 4, 4)  # type: ignore[call-overload]


def test_packed_sequences_without_keys_are_empty() -> None:
    q, starts = torch.zeros(4, 2, 32), torch.tensor([0, 4], dtype=torch.int32)
    call = varlen_call(q, q[:0], q[:0], starts, torch.zeros_like(starts), 4, 0, return_lse=True)
    assert read_call(call).is_empty
    assert not read_call(varlen_call(q, q, q, starts, starts, 4, 4, return_lse=True)).is_empty


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"window": (-1, -1)}, True),
        ({"softcap": 0.0}, True),
        ({"window": (None, -1), "chunk": 0, "sink_tokens": 4}, True),
        ({"window": (8, -1)}, False),
        ({"softcap": 2.0}, False),
        ({"chunk": 8}, False),
        ({"sinks": torch.zeros(8)}, False),
    ],
)
def test_call_without_features_is_a_plain_call(options: dict[str, Any], plain: bool) -> None:
    q, k, v = (tensor.to(torch.float8_e4m3fn) for tensor in tensors())
    scales: dict[str, Any] = {"k_scale": torch.ones(2, 2)}
    assert dense_call(q, k, v, **options, **scales).is_plain is plain
    # A plain call comes as far as asking for a GPU; 8-bit queries take no features.
    message = "is computed on a GPU alone" if plain else "with masks, packed sequences, pages"
    for call in (flashtune.attention, flashtune.plan, flashtune.explain):
        with pytest.raises(ProblemError, match=message):
            call(q, k, v, **options, **scales)


def test_strided_last_dimension_error_suggests_contiguous() -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match=r"k's last dimension has stride 24: pass k\.contiguous\(\)"):
        read_call(dense_call(q, k.mT.contiguous().mT, v))


def test_unknown_options() -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match="layout cannot be 'sbhd'"):
        read_call(dense_call(q, k, v, layout="sbhd"))
    with pytest.raises(ProblemError, match="prefer cannot be 'quick'"):
        read_call(dense_call(q, k, v, prefer="quick"))


def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(ProblemError, match="TRITON_INTERPRET=1"):
        flashtune.attention(*tensors())
    with pytest.raises(ProblemError, match="TRITON_INTERPRET=1"):
        flashtune.plan(*tensors())
    with pytest.raises(ProblemError, match="TRITON_INTERPRET=1"):
        flashtune.explain(*tensors())
