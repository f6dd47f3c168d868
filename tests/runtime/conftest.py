"""Problems and records as dispatch meets them, and a runtime that remembers nothing between tests."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from triton.runtime import driver

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Measurement, Outcome, PeerTime, Provenance, Record, Verdict
from flashtune.dispatch import decision
from flashtune.dispatch.versions import current_versions
from flashtune.launch import launch, workspaces
from flashtune.launch.workspaces import Memory
from flashtune.runtime.session import SESSION
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.emulator.tensor_maps import Driver
from tests.support.machine import TARGET, Machine
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
def problem() -> Problem:
    return Problem(
        dtype=Dtype.BF16,
        head_dim=64,
        value_head_dim=64,
        heads=8,
        kv_heads=2,
        batch=2,
        seqlen_q=512,
        seqlen_kv=512,
        causal=Causal.BOTTOM_RIGHT,
    )


MakeRecord = Callable[..., Record]


@pytest.fixture
def make_record() -> MakeRecord:
    """Records as a search on this machine would have stored them."""

    def make(
        problem: Problem, ms: float = 1.0, peers: dict[str, float] | None = None, **changes: object
    ) -> Record:
        family = find_family("forward_q_outer")
        config = family.default(problem, TARGET)
        record = Record(
            problem=problem,
            target=TARGET.name,
            family=family.name,
            config=config,
            specialization=Specialization(),
            kernel=render(family, problem, config, Specialization()).digest,
            outcome=Outcome.OK,
            provenance=Provenance.MEASURED,
            versions=current_versions(family.name),
            verdict=Verdict(True, 0.4, 100, "", "NVIDIA H200"),
            measurement=Measurement(
                ms,
                ms * 0.99,
                ms * 1.01,
                11,
                peers=tuple(PeerTime(name, time) for name, time in (peers or {}).items()),
            ),
        )
        return msgspec.structs.replace(record, **changes)

    return make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where calls are recorded; nothing is there yet."""
    return tmp_path / "recorded.jsonl"


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches for tensors on the CPU, whose device has no index and no streams."""

    def memory(size: int, device: torch.device, stream: int) -> Memory:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        return Memory(tensor, tensor.data_ptr(), size)

    monkeypatch.setattr(launch, "current_device", lambda: None)
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(workspaces, "capturing", lambda: False)
    monkeypatch.setattr(workspaces, "_kept", defaultdict(lambda: defaultdict(list)))
    monkeypatch.setattr(workspaces, "_made", memory)


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
    monkeypatch.setattr(decision, "is_untrusted", lambda *_: False)
    with using(fake, fake, fake.compiler):
        yield fake
