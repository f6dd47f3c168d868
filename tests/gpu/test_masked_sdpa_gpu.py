"""Tests of SDPA backends with masks on a GPU: rows without keys, unaligned lengths, shared masks."""

import contextlib

import msgspec
import pytest
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_efficient_attention
from torch.nn.attention import sdpa_kernel

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, Causal
from flashtune.dispatch.masked_sdpa import MaskTrials, masked_attention
from flashtune.dispatch.sdpa import chosen_backend
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.request.side_inputs import side_views
from flashtune.runtime.unfused import unfused_attention
from flashtune.tuner.execution.sdpa import BACKENDS
from tests.support.unfused import problem_of

pytestmark = pytest.mark.gpu

# The backends that take masks, and SDPA's own checks of whether they take a call.
MASKED = {"sdpa-cudnn": can_use_cudnn_attention, "sdpa-efficient": can_use_efficient_attention}
# Lengths of queries and keys: tiles, parts of tiles, and strides of rows that are no multiple of 16 bytes.
LENGTHS = [(512, 512), (1000, 1000), (333, 1001), (1, 777)]
# Dimensions of masks: [batch, heads, seqlen_q, seqlen_kv] with 1 for shared.
SHARED = [(2, 4, 1, 1), (2, 1, 1, 1), (1, 4, 1, 1), (2, 1, 0, 1)]
ERROR = 2.0**-5


def given(lengths: tuple[int, int], kv_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(sum(lengths))

    def random(heads: int, rows: int) -> Tensor:
        shape = (2, heads, rows, width)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return random(4, lengths[0]), random(kv_heads, lengths[1]), random(kv_heads, lengths[1])


def mask_of(lengths: tuple[int, int], shared: tuple[int, ...]) -> Tensor:
    """Random masks, with rows without keys, hidden first key tiles, and a single key."""
    batch, heads, many, _ = shared
    generator = torch.Generator("cuda").manual_seed(7)
    shape = (batch, heads, lengths[0] if many else 1, lengths[1])
    mask = torch.rand(shape, generator=generator, device="cuda") < 0.5
    mask[:, :, ::5] = False
    mask[:, :, 1::5, : lengths[1] // 2] = False
    mask[:, :, 2::5, :-1] = False
    mask[:, :, 2::5, -1] = True
    if not many:
        # Of one sequence alone, so that another has keys.
        mask[1:] = True
    return mask


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("kind", [Bias.BOOLEAN, Bias.ADDITIVE])
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("width", [64, 128])
def test_backends_have_the_same_mask_semantics(
    name: str, kind: Bias, causal: Causal, shared: tuple[int, ...], kv_heads: int, width: int
) -> None:
    trials = MaskTrials(chosen_backend)
    scale = float(width**-0.5)
    refused = []
    for lengths in LENGTHS:
        q, k, v = given(lengths, kv_heads, width)
        mask = mask_of(lengths, shared)
        bias = mask
        if kind is Bias.ADDITIVE:
            bias = torch.randn(mask.shape, device="cuda").masked_fill(~mask, -torch.inf).bfloat16()
        with sdpa_kernel(BACKENDS[name]):
            admitted = MASKED[name](SDPAParams(q, k, v, bias, 0.0, False, kv_heads != 4))
            out = None
            with contextlib.suppress(RuntimeError):
                out = masked_attention(q, k, v, bias, scale, causal)
            if out is None:
                # SDPA's checks or dispatch's trial must have refused the call.
                request = read_call(dense_call(q, k, v, causal=causal.value))
                assert not admitted or trials.refusal(request, name, q, k, v, bias), lengths
                refused.append(lengths)
                continue
        problem = msgspec.structs.replace(problem_of(q, k, v, causal), bias=kind)
        side = side_views(problem, ExtraInputs(bias=bias), 2)
        expected, lse = unfused_attention(
            problem, q.float(), k.float(), v.float(), side, scale=scale, return_lse=True
        )
        assert lse is not None
        assert (out[lse == -torch.inf] == 0).all(), f"{lengths}: a row that sees no key is not zero"
        assert float((out.float() - expected).abs().max()) <= ERROR, lengths
    # Both backends take whole tiles; the efficient one takes no grouped heads in some versions of torch.
    assert LENGTHS[0] not in refused or (kv_heads != 4 and name == "sdpa-efficient")


@pytest.mark.parametrize("seqlen_q", [1, 300])
@pytest.mark.parametrize("name", MASKED)
def test_check_passes_for_backends_with_masks(seqlen_q: int, name: str) -> None:
    trials = MaskTrials(chosen_backend)
    q, k, v = given((seqlen_q, 512), 4, 128)
    request = read_call(dense_call(q, k, v))
    mask = torch.ones(2, 1, 1, 512, dtype=torch.bool, device="cuda")
    with sdpa_kernel(BACKENDS[name]):
        assert trials.refusal(request, name, q, k, v, mask) is None
