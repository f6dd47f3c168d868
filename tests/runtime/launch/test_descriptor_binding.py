"""Tests of binding kernels with tensor descriptors: arguments and references."""

import gc
import weakref
from typing import Any

import pytest
import torch

from flashtune.core.problem import Dtype
from flashtune.launch import binding
from flashtune.launch.binding import bind
from flashtune.launch.launcher import Queue
from flashtune.launch.tensors import ForwardTensors
from flashtune.request.quantization import E4M3, unit_scales
from flashtune.templates.rendering import render
from tests.emulator.tensor_maps import Driver, Map, Noted
from tests.problems.hopper import FAMILY, H200, PLAIN, a_config, a_problem


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch, no_device: None) -> list[Noted]:
    """The launches that `bind` makes of binaries, the kernel's last; nothing is loaded."""
    made: list[Noted] = []

    def queue(*made_of: Any) -> Queue:
        made.append(Noted(*made_of))
        return made[-1].queue

    monkeypatch.setattr(binding, "queue_of", queue)
    return made


@pytest.mark.slow
@pytest.mark.tritons
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
def test_bound_kernel_has_expected_arguments(gpu: Driver, queues: list[Noted], dtype: Dtype) -> None:
    problem = a_problem(96, 80, dtype=dtype, kv_heads=2, seqlen_q=100, seqlen_kv=300)
    kernel = render(FAMILY, problem, a_config(problem, head_swizzle=4), PLAIN)
    element = E4M3 if dtype.is_quantized else torch.bfloat16
    # As [batch, seqlen, heads, head_dim], seen heads first.
    q = torch.zeros(2, 100, 8, 96).to(element).transpose(1, 2)
    k = torch.zeros(2, 300, 2, 96).to(element).transpose(1, 2)
    v = torch.zeros(2, 300, 2, 80).to(element).transpose(1, 2)
    out = torch.zeros(2, 8, 100, 80, dtype=torch.bfloat16)
    launch = bind(kernel, H200, ForwardTensors(q, k, v, out))
    launch((q, k, v, out, None), 0.1)
    *first, main = queues
    _, grid, integers, _ = main.made_of
    assert grid == (1,), "one program for the only multiprocessor of a machine without a GPU"
    assert integers == (8, 4, 16, 100, 300, 4)
    # A map, sides and strides of each: five of queries and outputs, by groups, and four of the others.
    assert len(main.values[0]) == 4 * 11 + 4 * 9 + 2 + (3 if dtype.is_quantized else 0)
    described = [value for value in main.values[0] if isinstance(value, Map)]
    # Two tiles of each: 64 and 32 columns, 64 and 16.
    assert [made.address for made in described[:4]] == [q.data_ptr()] * 2 + [k.data_ptr()] * 2
    assert [made.address for made in described[6:]] == [out.data_ptr()] * 2
    assert described[0].strides == [*q.unflatten(1, (2, 4)).stride()]
    assert described[2].strides == [*k.stride()]
    if dtype.is_quantized:
        (prologue,) = first
        assert prologue.values[0][0] == v.data_ptr()
        assert [made.address for made in described[4:6]] == [prologue.values[0][1]] * 2
        assert described[4].shape == [2, 2, 80, 304]
    else:
        assert first == []
        assert [made.address for made in described[4:6]] == [v.data_ptr()] * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
def test_binding_holds_no_reference_to_tensors(gpu: Driver, queues: list[Noted], dtype: Dtype) -> None:
    problem = a_problem(64, 64, dtype=dtype, kv_heads=8, seqlen_q=128, seqlen_kv=128)
    kernel = render(FAMILY, problem, a_config(problem), PLAIN)
    element = E4M3 if dtype.is_quantized else torch.bfloat16
    q, k, v = (torch.zeros(2, 8, 128, 64).to(element) for _ in range(3))
    out = torch.zeros(2, 8, 128, 64, dtype=torch.bfloat16)
    seen = [weakref.ref(tensor) for tensor in (q, k, v, out)]
    launch = bind(kernel, H200, ForwardTensors(q, k, v, out))
    launch((q, k, v, out, None), 0.1)
    del q, k, v, out
    gc.collect()
    assert [tensor() for tensor in seen] == [None] * 4
    assert callable(launch)


@pytest.mark.slow
def test_tensor_of_ones_outlives_its_launches(gpu: Driver, queues: list[Noted]) -> None:
    problem = a_problem(64, 64, dtype=Dtype.E4M3, heads=6, kv_heads=6, seqlen_q=128, seqlen_kv=128)
    kernel = render(FAMILY, problem, a_config(problem), PLAIN)
    q, k, v = (torch.zeros(2, 6, 128, 64).to(E4M3) for _ in range(3))
    out = torch.zeros(2, 6, 128, 64, dtype=torch.bfloat16)
    addresses = []
    for _ in range(2):
        queues.clear()
        bind(kernel, H200, ForwardTensors(q, k, v, out))((q, k, v, out, None), 0.1)
        gc.collect()
        addresses.append(queues[-1].values[0][-4:-1])
    assert addresses[0] == addresses[1]
    ones = unit_scales(q)
    assert set(addresses[0]) == {ones.data_ptr()}
    assert (ones == 1).all()
