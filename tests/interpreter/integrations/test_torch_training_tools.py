"""Tests of torch's tools for training over operators served by flashtune, in the interpreter."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flashtune.integrations import operator_overrides
from flashtune.runtime.session import SESSION
from tests.support.attention_operators import CUDNN, EFFICIENT, Originals, by_definition, close

pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
Triple = tuple[Tensor, Tensor, Tensor]
aten = torch.ops.aten
# Processes among which heads are divided.
PROCESSES = 2


@pytest.fixture
def processes() -> Iterator[None]:
    """A group of processes of which only this one runs."""
    dist.init_process_group("fake", rank=0, world_size=PROCESSES, store=FakeStore())
    yield
    dist.destroy_process_group()


def tensors(heads: int = 4) -> Triple:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 20, heads, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, *, name: str = CUDNN) -> Tensor:
    out: Tensor = getattr(aten, name)(q, k, v, None, True, 0.0, True)[0]
    return out


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.usefixtures("processes")
def test_distributed_tensors(originals: Originals, name: str) -> None:
    """Each process computes its heads, as with tensor parallelism."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    inputs = tensors()

    def call() -> tuple[Tensor, ...]:
        parts = [DTensor.from_local(tensor, mesh, [Shard(1)]) for tensor in inputs]
        out = attend(*parts, name=name)
        assert isinstance(out, DTensor)
        assert out.shape == (2, PROCESSES * 4, 20, 16)
        assert out.placements == (Shard(1),)
        local = out.to_local()
        return (local, *torch.autograd.grad(local, inputs, torch.ones_like(local)))

    for _ in range(2):
        call()
        SESSION.wait()
    originals.calls.clear()
    results = call()
    assert not originals.calls
    want = by_definition(*(tensor.double() for tensor in inputs), causal=True)[0]
    close(results, (want, *torch.autograd.grad(want, inputs, torch.ones_like(want))))


def policy(
    wanted: CheckpointPolicy, _: SelectiveCheckpointContext, op: object, *__: object, **___: object
) -> CheckpointPolicy:
    is_attention = op is aten._scaled_dot_product_cudnn_attention.default
    return wanted if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("wanted", "times"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)]
)
def test_selective_checkpoints(
    originals: Originals, monkeypatch: pytest.MonkeyPatch, wanted: CheckpointPolicy, times: int
) -> None:
    """Saved outputs keep the mark of calls that flashtune served, by which their backward pass is served."""
    served: list[object] = []
    states = operator_overrides.random_states

    def counted(*args: Any) -> Any:
        served.append(args)
        return states(*args)

    monkeypatch.setattr("flashtune.integrations.sdpa_operators.random_states", counted)
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, wanted))
    inputs = tensors()

    def call() -> tuple[Tensor, ...]:
        out = checkpoint(
            lambda q, k, v: attend(q * 2, k, v) + 1, *inputs, use_reentrant=False, context_fn=contexts
        )
        assert isinstance(out, Tensor)
        return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))

    for _ in range(2):
        call()
        SESSION.wait()
    originals.calls.clear()
    served.clear()
    results = call()
    assert not originals.calls
    assert len(served) == times
    q, k, v = (tensor.double() for tensor in inputs)
    want = by_definition(q * 2, k, v, causal=True)[0] + 1
    close(results, (want, *torch.autograd.grad(want, inputs, torch.ones_like(want))))
