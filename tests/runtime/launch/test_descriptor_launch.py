"""Tests of launches: arguments and their order, with tensor descriptors and workspaces."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.launch import workspaces
from flashtune.launch.launch import MIN_SCALE, launch_of
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.launch.tma_descriptors import DescriptorArguments, makers_of, typed
from flashtune.launch.workspaces import Memory, Workspaces
from flashtune.request.quantization import E4M3
from tests.emulator.tensor_maps import NOTES, Driver, Noted, a_tensor, found, pattern, queued

pytestmark = pytest.mark.tritons

CPU = torch.device("cpu")
FORWARD = ForwardTensors._fields
DESCRIBED = ("q", "k", "v", "out")


@pytest.fixture(autouse=True)
def on_a_device(no_device: None) -> None:
    """Launches run without a GPU."""


def keeping(kept: list[Tensor]) -> Callable[[tuple[int, ...], torch.device], Tensor]:
    def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
        kept.append(torch.empty(shape, device=device))
        return kept[-1]

    return allocate


def test_descriptors_precede_other_arguments(gpu: Driver) -> None:
    q, k, v, out = (a_tensor() for _ in range(4))
    lse = torch.empty(2, 4, 128)
    arguments = DescriptorArguments(makers_of([[pattern(q)] for _ in range(4)], [NOTES] * 4))
    kernel = Noted()
    stages = queued((kernel, "described lse scale"))
    launch = launch_of(stages, FORWARD, CPU, described=DESCRIBED, arguments=arguments)
    launch((q, k, v, out, lse), 0.25)
    launch((q, k, v, out, lse), 0.0)
    described = found(arguments, q, k, v, out)
    assert kernel.values == [
        (*described, lse.data_ptr(), 0.25),
        # Plain averages have a scale that is no zero.
        (*described, lse.data_ptr(), MIN_SCALE),
    ]
    assert len(gpu.filled) == 4


def test_epilogue_receives_the_workspaces_of_the_kernel(gpu: Driver) -> None:
    q, k, v, out = (a_tensor() for _ in range(4))
    lse, lengths = torch.empty(2, 4, 128), torch.zeros(2, dtype=torch.int32)
    # Tensors that are not passed as descriptors have none.
    arguments = DescriptorArguments(makers_of([[pattern(q)], [pattern(k)] * 2, [], []], [NOTES] * 3))
    kernel, epilogue = Noted(), Noted()
    kept: list[Tensor] = []
    scratch = Workspaces({"partial_out": (3, 8, 64), "partial_lse": (3, 8)}, CPU, keeping(kept))
    stages = queued(
        (kernel, "described lse seqlens_kv partial_out partial_lse scale"),
        (epilogue, "out lse partial_out partial_lse"),
    )
    launch = launch_of(stages, FORWARD, CPU, scratch, DESCRIBED, arguments)
    launch((q, k, v, out, lse), 0.5, ExtraInputs(seqlens_kv=lengths))
    assert [tuple(tensor.shape) for tensor in kept] == [(3, 8, 64), (3, 8)]
    pointers = [tensor.data_ptr() for tensor in kept]
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
    arguments = DescriptorArguments(makers_of(patterns, [NOTES] * 4))
    kernel, prologue = Noted(), Noted()
    stages = queued((prologue, "v values"), (kernel, "described out q_scale k_scale v_scale scale"))
    scratch = Workspaces({"values": (2, 4, 64, 32)}, CPU, allocate)
    launch = launch_of(stages, FORWARD, CPU, scratch, ("q", "k", "values", "out"), arguments, ones)
    k_scale = torch.ones(2, 4)
    launch((q, k, v, out, None), 0.5, ExtraInputs(k_scale=k_scale))
    (workspace,) = kept
    assert prologue.values == [(v.data_ptr(), workspace.data_ptr())]
    assert [made.address for made in gpu.filled] == [t.data_ptr() for t in (q, k, workspace, out)]
    assert gpu.filled[2].shape == [2, 4, 64, 128]
    (values,) = kernel.values
    scales = (ones.data_ptr(), k_scale.data_ptr(), ones.data_ptr())
    assert values[-5:] == (out.data_ptr(), *scales, 0.5)
    assert len(values) == 4 * 9 + 5
    launch((q, k, v, out, None), 0.5, ExtraInputs(k_scale=k_scale))
    assert kernel.values == [values, values]
    assert len(gpu.filled) == 4


class Described:
    """Makes descriptors that name their addresses, and notes the addresses."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, ...]] = []
        self._known: dict[tuple[int, ...], tuple[str, ...]] = {}
        self.at = self._known.get

    def made(self, addresses: tuple[int, ...], device: torch.device) -> tuple[str, ...]:
        assert device == CPU
        self.noted.append(addresses)
        self._known[addresses] = tuple(f"descriptor of {address}" for address in addresses)
        return self._known[addresses]


PROLOGUE, MAIN = "out workspace_0 scale", "described lse dlse workspace_1 scale softcap"


def test_backward_kernel_has_descriptors_before_addresses() -> None:
    """Tensors and workspaces by name, of its own stage alone."""
    made = {name: torch.empty(4) for name in BackwardTensors._fields}
    kept: list[Tensor] = []
    first, main = Noted(), Noted()
    launch_of(
        queued((first, PROLOGUE), (main, MAIN)),
        BackwardTensors._fields,
        CPU,
        Workspaces({"workspace_0": (2,), "workspace_1": (3,)}, CPU, keeping(kept)),
        ("dout", "q", "workspace_1"),
        Described(),  # type: ignore[arg-type]  # a driver's part
    )(BackwardTensors(**made), 0.5, ExtraInputs(softcap=3.0))
    at = {name: tensor.data_ptr() for name, tensor in made.items()}
    scratch = [tensor.data_ptr() for tensor in kept]
    assert first.values == [(at["out"], scratch[0], 0.5)]
    assert main.values == [
        (
            *(f"descriptor of {address}" for address in (at["dout"], at["q"], scratch[1])),
            *(at["lse"], at["dlse"], scratch[1], 0.5, 3.0),
        )
    ]


def test_workspaces_of_a_pass_share_one_piece_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuple(torch.empty(4) for _ in BackwardTensors._fields)
    memory = torch.empty(1024)
    monkeypatch.setattr(
        workspaces, "_made", lambda size, device, stream: Memory(memory, memory.data_ptr(), 4096)
    )
    prologue, main = Noted(), Noted()
    described = Described()
    launch = launch_of(
        queued((prologue, PROLOGUE), (main, MAIN)),
        BackwardTensors._fields,
        CPU,
        Workspaces({"workspace_0": (1, 200), "workspace_1": (3, 5)}, CPU),
        ("workspace_0", "workspace_1"),
        described,  # type: ignore[arg-type]  # a driver's part
    )
    for _ in range(2):
        launch(made, 0.5, ExtraInputs(softcap=3.0))
    first, second = memory.data_ptr(), memory.data_ptr() + 1024
    # Each begins on a border of its own.
    assert [values[1] for values in prologue.values] == [first] * 2
    assert main.values[0][:2] == (f"descriptor of {first}", f"descriptor of {second}")
    assert main.values[0][4] == second
    assert main.values[1] == main.values[0]
    assert described.noted == [(first, second)], "made where they come together for the first time"
