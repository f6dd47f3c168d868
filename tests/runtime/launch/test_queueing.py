"""Tests of direct launches against Triton's own launcher."""

import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.amd import driver as amd
from triton.backends.nvidia import driver as nvidia

from flashtune.core.errors import KernelError
from flashtune.launch import launch, launcher
from flashtune.launch.launch import Stage, launch_of
from flashtune.launch.launcher import direct_launch, queue_of
from tests.emulator.tensor_maps import NOTES, Driver
from tests.runtime.conftest import Devices
from tests.support.fakes import install

pytestmark = pytest.mark.tritons

DEVICE = torch.device("cuda", 3)
SIGNATURE = {"q_desc": "tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout(128, 16, 4)>", "scale": "fp32"}
# Triton's launcher finds these in what the compiler says of a binary.
SAID = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": True,
    "arg_annotations": ["an annotation"],
    "kernel_signature": b"a signature",
    "gsan_enabled": False,
}


class Launching:
    """A launch with numbers in place of tensors, on the stream of a driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def address_of(self, value: int) -> int:
        return value

    def current_stream(self, device: int) -> int:
        return self.driver.get_current_stream(device)


@pytest.fixture(autouse=True)
def device(gpu: Driver, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.current = 3
    install(monkeypatch, Launching(gpu), launch)


def a_launcher(passed: list[Any], described: bool = False, **said: Any) -> Any:
    """This Triton's own, less what it compiles or asks a GPU for."""

    def to_the_driver(*values: Any) -> None:
        passed.append(values)

    run = object.__new__(nvidia.CudaLauncher)
    signature = SIGNATURE if described else {"scale": "fp32"}
    vars(run).update({**SAID, **said})
    run.launch = nvidia.wrap_handle_tensordesc(to_the_driver, signature, [NOTES])
    return run


class Compiled(SimpleNamespace):
    """A binary that may be referred to weakly."""


def compiled(run: Any, described: bool = False, function: Any = "function") -> Any:
    metadata = SimpleNamespace(tensordesc_meta=[NOTES] if described else None)
    return Compiled(run=run, function=function, packed_metadata="packed", metadata=metadata)


def flat(values: Any) -> list[Any]:
    """Arguments in order: later releases pass a kernel's own as one sequence."""
    *first, last = values
    return [*first, *(last if isinstance(last, tuple | list) else (last,))]


def queued(
    binary: Any, grid: tuple[int, ...], integers: tuple[int, ...]
) -> Callable[[tuple[Any, ...], tuple[Any, ...]], None]:
    """A launch of a binary as a function of the kernel's own arguments and of its descriptors."""
    queue = queue_of(binary, grid, integers, DEVICE)

    def run(values: tuple[Any, ...], described: tuple[Any, ...]) -> None:
        names = tuple(map(str, range(len(values))))
        arguments: Any = SimpleNamespace(at=lambda addresses: described) if described else None
        stages = (Stage(queue, names, bool(described)),)
        launch_of(stages, names, DEVICE, described=names[:1], arguments=arguments)(values, 0.5)

    return run


@pytest.mark.parametrize("described", [True, False])
def test_direct_launch_passes_the_arguments_of_tritons_launcher(devices: Devices, described: bool) -> None:
    ours: list[Any] = []
    theirs: list[Any] = []
    queue = queued(compiled(a_launcher(ours, described), described), (5,), (8, 9))
    queue((0, 0.5), ())
    queue((0.5,), (1,))
    run = a_launcher(theirs)
    for number in range(2):
        run(5, 1, 1, 73, "function", "packed", None, None, None, number, 0.5, 8, 9)
    assert ours == theirs
    assert flat(ours[1])[-4:] == [1, 0.5, 8, 9]


def test_direct_launch_supports_amd_launcher(devices: Devices) -> None:
    ours: list[Any] = []
    theirs: list[Any] = []

    def a_launcher_of_amds(passed: list[Any]) -> Any:
        run = object.__new__(amd.HIPLauncher)
        vars(run).update({**SAID, "warp_size": 64}, launch=lambda *values: passed.append(values))
        return run

    run = a_launcher_of_amds(ours)
    assert direct_launch(run, (1, 1, 1), ("function",) * 5) is not None
    queued(compiled(run), (5,), (8, 9))((0, 0.5), ())
    a_launcher_of_amds(theirs)(5, 1, 1, 73, "function", "packed", None, None, None, 0, 0.5, 8, 9)
    assert ours == theirs


@pytest.mark.slow
def test_queue_holds_a_reference_to_the_binary(devices: Devices) -> None:
    for run in (a_launcher([]), a_launcher([], global_scratch_size=64)):
        binary = compiled(run)
        held = weakref.ref(binary)
        queue = queue_of(binary, (5,), (), DEVICE)
        del binary
        gc.collect()
        assert held() is not None
        del queue
        gc.collect()
        assert held() is None


@pytest.mark.parametrize("described", [True, False])
def test_binary_that_does_not_load_is_refused(devices: Devices, described: bool) -> None:
    def refused() -> None:
        raise OSError("out of resources")

    for run, function in ((functools.partial(refused), "function"), (a_launcher([], described), None)):
        with pytest.raises(KernelError, match="did not load"):
            queue_of(compiled(run, described, function), (5,), (), DEVICE)


def test_call_runs_no_python_code_of_triton(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Any] = []
    queue = queued(compiled(a_launcher(passed)), (5, 2), ())
    monkeypatch.setattr(nvidia.CudaLauncher, "__call__", None)
    queue((1, 2), ())
    assert len(passed) == 1
    assert passed[0][:4] == (5, 2, 1, 73)


def test_kernel_is_queued_on_its_own_device(devices: Devices) -> None:
    passed: list[Any] = []
    queue = queued(compiled(a_launcher(passed)), (5,), ())
    devices.entered.clear()
    queue((1, 2), ())
    assert devices.entered == []
    devices.current = 0
    queue((2,), (1,))
    assert devices.entered == [3]
    assert devices.current == 0
    assert passed[0] == passed[1]


def test_scratch_memory_is_allocated_by_tritons_launcher(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []
    monkeypatch.setattr(launcher, "_allocate_scratch", lambda size, alignment, stream: ("scratch", size))
    run = a_launcher(passed, global_scratch_size=64)
    queue = queued(compiled(run), (5,), (7,))
    devices.current = 0
    queue((2,), (1,))
    assert ("scratch", 5 * 64) in passed[0]
    assert flat(passed[0])[-3:] == [1, 2, 7]
    assert devices.entered == [3, 3]


@pytest.mark.parametrize(
    "said", [{"global_scratch_size": 1}, {"profile_scratch_size": 1}, {"gsan_enabled": True}]
)
def test_unsupported_launch_options_use_tritons_launcher(said: dict[str, Any]) -> None:
    assert direct_launch(a_launcher([], **said), (1, 1, 1), ("function",) * 5) is None


def test_unknown_launcher_is_called_unchanged(devices: Devices) -> None:
    class Counting:
        """One that adds something to the values."""

        def __init__(self) -> None:
            self.passed: list[Any] = []
            self.launch = self.passed.append

        def __call__(self, *values: Any) -> None:
            self.launch((*values, len(self.passed)))

    run = Counting()
    assert direct_launch(run, (1, 1, 1), ()) is None
    queue = queued(compiled(run), (5,), (8,))
    queue((1,), ())
    queue((2,), ())
    assert [values[-3:] for values in run.passed] == [(1, 8, 0), (2, 8, 1)]


class Curious:
    """One that asks for the stream's number."""

    def __init__(self) -> None:
        self.passed: list[Any] = []
        self.launch: Callable[..., None] = lambda *values: self.passed.append(values)

    def __call__(self, *values: Any) -> None:
        self.launch(*values[:3], int(values[3]), *values[4:])


class Silent(Curious):
    """One that launches nothing on grids of one program."""

    def __call__(self, *values: Any) -> None:
        if values[0] > 1:
            self.launch(*values)


@pytest.mark.parametrize("kind", [Curious, Silent])
def test_launcher_that_cannot_be_intercepted_is_called_unchanged(
    devices: Devices, kind: type[Curious]
) -> None:
    run = kind()
    assert direct_launch(run, (1, 1, 1), ()) is None
    queued(compiled(run), (1,), (8,))((1,), ())
    assert [values[-2:] for values in run.passed] == ([(1, 8)] if kind is Curious else [])


def test_function_without_launcher_is_called_unchanged(devices: Devices) -> None:
    passed: list[Any] = []
    queue = queued(compiled(lambda *values: passed.append(values)), (5,), (8,))
    queue((1,), ())
    assert passed == [(5, 1, 1, 73, "function", "packed", None, None, None, 1, 8)]
