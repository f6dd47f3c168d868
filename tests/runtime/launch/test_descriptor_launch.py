"""Tests of launches with tensor descriptors: arguments and their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtune.core.extra_inputs import ExtraInputs
from flashtune.launch import workspaces
from flashtune.launch.backward import BackwardLaunch, BackwardTensors, Stage
from flashtune.launch.forward import MIN_SCALE, DescriptorLaunch, QuantizedLaunch
from flashtune.launch.tma_descriptors import DescriptorArguments, typed
from flashtune.launch.workspaces import allocate_workspace
from flashtune.request.quantization import E4M3
from tests.emulator.tensor_maps import NOTES, Driver, Noted, a_tensor, found, pattern

pytestmark = pytest.mark.tritons


def test_descriptors_precede_other_arguments(gpu: Driver) -> None:
    q, k, v, out = (a_tensor() for _ in range(4))
    lse = torch.empty(2, 4, 128)
    arguments = DescriptorArguments([[pattern(q)] for _ in range(4)], [NOTES] * 4)
    queue = Noted()
    launch = DescriptorLaunch(queue, arguments)
    launch(q, k, v, out, lse, 0.25)
    launch(q, k, v, out, None, 0.0)
    described = found(arguments, q, k, v, out)
    assert queue.values == [
        (*described, lse.data_ptr(), 0.25),
        # Without a log-sum-exp something else stands there; plain averages have a scale that is no zero.
        (*described, out.data_ptr(), MIN_SCALE),
    ]
    assert len(gpu.filled) == 4


def test_side_inputs_follow_the_log_sum_exp(gpu: Driver) -> None:
    q, k, v, out = (a_tensor() for _ in range(4))
    starts, kv_starts = (torch.zeros(3, dtype=torch.int32) for _ in range(2))
    arguments = DescriptorArguments([[pattern(q)] for _ in range(4)], [NOTES] * 4)
    queue = Noted()
    launch = DescriptorLaunch(queue, arguments, ("cu_seqlens_q", "cu_seqlens_kv"))
    launch(q, k, v, out, None, 0.5, ExtraInputs(cu_seqlens_q=starts, cu_seqlens_kv=kv_starts))
    described = found(arguments, q, k, v, out)
    addresses = (out.data_ptr(), starts.data_ptr(), kv_starts.data_ptr())
    assert queue.values == [(*described, *addresses, 0.5)]
    assert len(gpu.filled) == 4


def test_scalars_follow_the_scale(gpu: Driver) -> None:
    q, k, v, out = (a_tensor() for _ in range(4))
    seed = torch.tensor([1])
    arguments = DescriptorArguments([[pattern(q)] for _ in range(4)], [NOTES] * 4)
    queue = Noted()
    launch = DescriptorLaunch(queue, arguments, ("seed", "dropout"))
    launch(q, k, v, out, None, 0.5, ExtraInputs(seed=seed, dropout=0.25))
    described = found(arguments, q, k, v, out)
    assert queue.values == [(*described, out.data_ptr(), seed.data_ptr(), 0.5, 0.25)]
    assert len(gpu.filled) == 4


def test_epilogue_receives_the_workspaces_of_the_kernel(gpu: Driver) -> None:
    q, k, v, out = (a_tensor() for _ in range(4))
    lse, lengths = torch.empty(2, 4, 128), torch.zeros(2, dtype=torch.int32)
    # Of what is not passed as a descriptor there is none.
    arguments = DescriptorArguments([[pattern(q)], [pattern(k)] * 2, [], []], [NOTES] * 3)
    kernel, epilogue = Noted(), Noted()
    kept: list[Tensor] = []

    def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
        kept.append(torch.empty(shape, device=device))
        return kept[-1]

    launch = DescriptorLaunch(kernel, arguments, ("seqlens_kv",), epilogue, ((3, 8, 64), (3, 8)), allocate)
    launch(q, k, v, out, lse, 0.5, ExtraInputs(seqlens_kv=lengths))
    assert [tuple(one.shape) for one in kept] == [(3, 8, 64), (3, 8)]
    pointers = [one.data_ptr() for one in kept]
    described = found(arguments, q, k, v, out)
    assert kernel.values == [(*described, lse.data_ptr(), lengths.data_ptr(), *pointers, 0.5)]
    assert epilogue.values == [(out.data_ptr(), lse.data_ptr(), *pointers)]
    assert len(gpu.filled) == 3


def test_quantised_launch_has_descriptors_of_the_prologue_output(gpu: Driver) -> None:
    q, k, v = (torch.zeros(2, 4, 128, 64).to(E4M3) for _ in range(3))
    out, ones = a_tensor(2, 4, 128, 64), torch.ones(8)
    kept: list[Tensor] = []

    def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
        # Allocators hand out the same addresses again.
        kept[:] = kept or [torch.empty(shape, device=device)]
        return kept[0]

    transposed = typed(torch.empty(2, 4, 64, 32), v)
    assert transposed.dtype is E4M3
    assert transposed.shape == (2, 4, 64, 128)
    patterns = [[pattern(tensor)] for tensor in (q, k, transposed, out)]
    arguments = DescriptorArguments(patterns, [NOTES] * 4)
    kernel, prologue = Noted(), Noted()
    launch = QuantizedLaunch(kernel, prologue, ones, ((2, 4, 64, 32),), allocate, arguments)
    k_scale = torch.ones(2, 4)
    launch(q, k, v, out, None, 0.5, ExtraInputs(k_scale=k_scale))
    (workspace,) = kept
    assert prologue.values == [(v.data_ptr(), workspace.data_ptr())]
    assert [made.address for made in gpu.filled] == [t.data_ptr() for t in (q, k, workspace, out)]
    assert gpu.filled[2].shape == [2, 4, 64, 128]
    (values,) = kernel.values
    scales = (ones.data_ptr(), k_scale.data_ptr(), ones.data_ptr())
    assert values[-5:] == (out.data_ptr(), *scales, 0.5)
    assert len(values) == 4 * 9 + 5
    launch(q, k, v, out, None, 0.5, ExtraInputs(k_scale=k_scale))
    assert kernel.values == [values, values]
    assert len(gpu.filled) == 4


class Described:
    """Descriptors that say of which address they are; it notes of what they are made."""

    def __init__(self) -> None:
        self.noted: list[list[tuple[int, ...]]] = []
        self._known: dict[tuple[int, ...], list[str]] = {}
        self.at = self._known.get

    def made(self, addresses: tuple[int, ...], tensor_of: Callable[[int], Tensor]) -> list[str]:
        tensors = [tensor_of(place) for place in range(len(addresses))]
        assert addresses == tuple(tensor.data_ptr() for tensor in tensors)
        self.noted.append([tuple(tensor.shape) for tensor in tensors])
        self._known[addresses] = [f"descriptor of {address}" for address in addresses]
        return self._known[addresses]


STAGES = (("out", "workspace_0", "scale"), ("lse", "dlse", "workspace_1", "scale", "softcap"))


def test_backward_kernel_has_descriptors_before_addresses() -> None:
    """Tensors and workspaces by name, of its own stage alone."""
    made = {name: torch.empty(4) for name in BackwardTensors._fields}
    scratch = [torch.empty(2), torch.empty(3)]
    rest = iter(scratch)
    queue = Noted()
    BackwardLaunch(
        tuple(Stage(queue, names) for names in STAGES),
        ((2,), (3,)),
        lambda shape, device: next(rest),
        ("dout", "q", "workspace_1"),
        Described(),  # type: ignore[arg-type]  # a driver's part
        main=1,
    )(BackwardTensors(**made), 0.5, ExtraInputs(softcap=3.0))
    at = {name: tensor.data_ptr() for name, tensor in made.items()}
    first, second = (tensor.data_ptr() for tensor in scratch)
    assert queue.values[0] == (at["out"], first, 0.5)
    assert queue.values[1] == (
        *(f"descriptor of {address}" for address in (at["dout"], at["q"], second)),
        *(at["lse"], at["dlse"], second, 0.5, 3.0),
    )


def test_workspaces_of_a_pass_share_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuple(torch.empty(4) for _ in BackwardTensors._fields)
    memory = torch.empty(1024)
    monkeypatch.setattr(workspaces, "empty_like", lambda like: memory if like.shape == (384,) else None)
    queue = Noted()
    described = Described()
    launch = BackwardLaunch(
        tuple(Stage(queue, names) for names in STAGES),
        ((1, 200), (3, 5)),
        allocate_workspace,
        ("workspace_0", "workspace_1"),
        described,  # type: ignore[arg-type]  # a driver's part
    )
    for _ in range(2):
        launch(made, 0.5, ExtraInputs(softcap=3.0))
    first, second = memory.data_ptr(), memory.data_ptr() + 1024
    # Each begins on a border of its own.
    assert queue.values[0][:2] == (f"descriptor of {first}", f"descriptor of {second}")
    assert queue.values[0][3] == first
    assert queue.values[1][2] == second
    assert queue.values[2:] == queue.values[:2]
    assert described.noted == [[(1, 200), (3, 5)]], "made where they come together for the first time"
