"""Tests of allocation: prototypes of outputs, and one allocation for all workspaces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtune.launch.workspaces import BORDER, Workspaces, empty_like, prototype

CPU = torch.device("cpu")
Q = torch.empty(1)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 1, 5, 8), (2, 0, 3), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prototype_is_meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = prototype(shape, dtype, CPU)
    assert like.untyped_storage().nbytes() == 0
    made, plain = empty_like(like), torch.empty(shape, dtype=dtype)
    assert (made.shape, made.dtype, made.stride()) == (plain.shape, plain.dtype, plain.stride())
    made.fill_(3.0)
    assert (made == 3).all()
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


@pytest.mark.parametrize("inference", [True, False])
def test_prototypes_work_in_and_out_of_inference_mode(inference: bool) -> None:
    with torch.inference_mode(inference):
        like = prototype((2, 3), torch.float32, CPU)
    with torch.inference_mode(not inference):
        assert empty_like(like).is_inference() is not inference


def test_workspaces_are_disjoint_and_aligned() -> None:
    shapes = ((3, 50), (1,), (2, 64))
    workspaces = Workspaces(shapes)
    held, addresses = workspaces(Q)
    assert [address - addresses[0] for address in addresses] == [0, 2 * BORDER, 3 * BORDER]
    tensors = workspaces.tensors(held)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert [tuple(tensor.shape) for tensor in tensors] == [*shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [1.0], [2.0]]
    again, others = workspaces(Q)
    assert len(held) == len(again) == 1
    assert others[0] != addresses[0], "each call has its own"


def test_no_workspaces_need_no_allocation() -> None:
    assert Workspaces()(Q) == ((), [])


def test_custom_allocator_is_called_for_each_workspace() -> None:
    kept: list[Tensor] = []

    def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
        assert device == CPU
        kept.append(torch.empty(shape))
        return kept[-1]

    workspaces = Workspaces(((2, 3), (4,)), allocate)
    held, addresses = workspaces(Q)
    assert [tuple(one.shape) for one in kept] == [(2, 3), (4,)]
    assert addresses == [one.data_ptr() for one in kept]
    assert all(one is other for one, other in zip(workspaces.tensors(held), kept, strict=True))
