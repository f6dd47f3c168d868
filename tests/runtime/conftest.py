"""Problems and records as dispatch meets them, and a runtime that remembers nothing between tests."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime import driver

from flashtune.core.kernel import Kernel
from flashtune.dispatch import decision, sdpa
from flashtune.launch import launch, workspaces
from flashtune.launch.workspaces import Memory
from flashtune.runtime import backward_executors, executors
from flashtune.runtime.session import SESSION
from tests.emulator.tensor_maps import Driver
from tests.support.fakes import install
from tests.support.machine import Machine
from tests.support.runtime import forget_all, using


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    """Every test meets shapes, kernels and matters for the first time."""

    def forget() -> None:
        SESSION.wait()
        forget_all()

    forget()
    yield
    forget()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where calls are recorded; nothing is there yet."""
    return tmp_path / "recorded.jsonl"


class Pool:
    """Memory of streams, in place of a GPU's: the size and the stream of each allocation."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.is_capturing = False

    def capturing(self) -> bool:
        return self.is_capturing

    def _made(self, size: int, device: torch.device, stream: int) -> Memory:
        self.made.append((size, stream))
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        return Memory(tensor, tensor.data_ptr(), size)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    fake = Pool()
    install(monkeypatch, fake, workspaces)
    return fake


class Devices:
    """The current device, and those that were entered."""

    def __init__(self) -> None:
        self.current: int | None = 0
        self.entered: list[int] = []

    @contextlib.contextmanager
    def device(self, index: torch.device | int) -> Iterator[None]:
        index = index if isinstance(index, int) else index.index
        before, self.current = self.current, index
        self.entered.append(index)
        yield
        self.current = before


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    fake = Devices()
    install(monkeypatch, fake, torch.cuda)
    for module in (launch, executors, backward_executors):
        monkeypatch.setattr(module, "current_device", lambda: fake.current)
    return fake


@pytest.fixture
def no_device(pool: Pool, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches for tensors on the CPU, whose device has no index and no streams."""
    devices.current = None
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)


@pytest.fixture
def copy_ms(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the least time of calls that copy unaligned tensors. At infinity none do."""
    return lambda ms: monkeypatch.setattr(sdpa, "COPY_MS", ms)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver in place of the GPU's, which notes its calls."""
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    return fake


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    fake = Machine()
    # Tests use float32, and SDPA would serve without timed kernels.
    monkeypatch.setattr(decision, "is_untrusted", lambda *_: fake.is_untrusted)
    with using(fake, fake, fake.compiler):
        try:
            yield fake
        finally:
            fake.compiler.release.set()  # or the worker would wait for it after a failure


@pytest.fixture
def launches(machine: Machine) -> list[str]:
    """The families of launched kernels, which write ones."""
    families: list[str] = []

    def bind(kernel: Kernel, target: object, *arguments: object, compiled: object) -> Callable[..., None]:
        def launch(tensors: tuple[Tensor, ...], *rest: object) -> None:
            families.append(kernel.family)
            tensors[3].fill_(1.0)

        return launch

    machine.launch = bind
    return families
