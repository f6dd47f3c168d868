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
from flashtune.core.session import SESSION
from flashtune.core.target import find_target
from flashtune.dispatch import decision, masked_sdpa, sdpa
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.versions import current_versions
from flashtune.launch import launch, workspaces
from flashtune.launch.workspaces import Memory
from flashtune.runtime import backward_executors, deferred, kernel_fallback, passes
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.emulator.tensor_maps import Driver
from tests.support.machine import Machine

TARGET = find_target("h200")


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    """Every test meets shapes, kernels and matters for the first time."""

    def forget() -> None:
        deferred.wait()
        SESSION.reset()

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
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    monkeypatch.setattr(BoundRequest, "target", TARGET)
    monkeypatch.setattr(deferred, "device_target", lambda index: TARGET)
    for module in (decision, deferred):
        monkeypatch.setattr(module, "tuned_records", lambda name: fake.tables)
    monkeypatch.setattr(decision, "check_device", lambda request: None)
    # Tests use float32, and SDPA would serve without timed kernels.
    monkeypatch.setattr(decision, "is_untrusted", lambda *_: False)
    for module in (sdpa, masked_sdpa):
        monkeypatch.setattr(module, "chosen_backend", lambda *_: fake.usual)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernel_fallback, "binary_of", fake.binary_of)
    monkeypatch.setattr(passes, "bind", fake.bind)
    monkeypatch.setattr(kernel_fallback, "preloading", fake.preloading)
    monkeypatch.setattr(kernel_fallback, "passes_self_check", fake.passes)
    monkeypatch.setattr(backward_executors, "bind", fake.bind)
    monkeypatch.setattr(deferred._compiler, "prepare", lambda *_: None)
    return fake
