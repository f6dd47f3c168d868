"""Tests of backend selection on a GPU."""

import subprocess
import sys
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.problem import Causal
from flashtune.core.record import Measurement, Outcome, PeerTime, Provenance, Record, Verdict
from flashtune.core.target import device_target
from flashtune.db.store import open_store
from flashtune.dispatch.lookup import default_selection
from flashtune.dispatch.sdpa import PEERS, default_backend, sdpa_attention
from flashtune.launch.kernel_cache import kernel_of
from flashtune.request.call import CausalOption
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.self_check import SelfChecks
from tests.gpu.calls import forget, generated, reference, request_of, tensors
from tests.gpu.marks import SERVED
from tests.support.runtime import using

pytestmark = SERVED

# A length near 512, and the attempts to find the config that dispatch selects for it.
NEAR, ATTEMPTS = 500, 4
# Less than the estimates of other families, in ms.
SHORT_MS = 1e-3


def timed_record(q: Tensor, k: Tensor, v: Tensor, peers: dict[str, float], ms: float = 1.0) -> Record:
    """The default config as if a search had verified it here and measured `ms`."""
    target = device_target()
    record = default_selection(request_of(q, k, v).problem, target, Specialization()).record
    return msgspec.structs.replace(
        record,
        kernel=kernel_of(record, Specialization()).digest,
        outcome=Outcome.OK,
        provenance=Provenance.MEASURED,
        verdict=Verdict(True, 0.5, 10, "", torch.cuda.get_device_name()),
        measurement=Measurement(
            ms, 0.99 * ms, 1.01 * ms, 11, peers=tuple(PeerTime(name, ms) for name, ms in peers.items())
        ),
    )


def pin(record: Record) -> None:
    with open_store() as store:
        store.pin(store.add(record))
    forget()


def pin_selected(record: Record, length: int) -> None:
    """Pins a record with the kernel that dispatch selects at a length near the record's."""
    others = tensors(length, length)
    for _ in range(ATTEMPTS):
        pin(record)
        told = flashtune.explain(*others, causal=True, prefer="generated")
        if told.kernel == record.kernel:
            return
        # Dispatch expects less time from another kernel.
        assert told.selection is not None
        other = told.selection.record
        record = msgspec.structs.replace(
            record, family=other.family, config=other.config, kernel=told.kernel, versions=other.versions
        )
    raise AssertionError(f"dispatch selects another kernel than {record.config}")


@pytest.mark.usefixtures("own_tables")
def test_timed_kernel_serves_without_check() -> None:
    q, k, v = tensors(512, 512)
    pin_selected(timed_record(q, k, v, {}, SHORT_MS), NEAR)

    def refuse(*_: object, **__: object) -> Verdict:
        raise AssertionError("a timed kernel was checked")

    with using(loader=KernelLoader(SelfChecks(refuse))), warnings.catch_warnings():
        warnings.simplefilter("error", FlashtuneWarning)
        testing.close(generated(q, k, v), reference(q, k, v, True).out)
        others = tensors(NEAR, NEAR)
        testing.close(generated(*others), reference(*others, True).out)
    told = flashtune.explain(q, k, v, causal=True, prefer="generated")
    assert (told.backend, told.standing) == ("generated", "timed")


@pytest.mark.usefixtures("own_tables")
def test_fastest_measured_backend_is_selected() -> None:
    q, k, v = tensors(512, 512)
    pin(timed_record(q, k, v, dict.fromkeys(PEERS.values(), 0.5)))
    assert default_backend(q, k, v, request_of(q, k, v).problem.causal) in PEERS.values()
    assert flashtune.explain(q, k, v, causal=True).backend == "sdpa"
    testing.close(flashtune.attention(q, k, v, causal=True), reference(q, k, v, True).out)
    assert flashtune.explain(q, k, v, causal=True, prefer="generated").backend == "generated"


@pytest.mark.usefixtures("own_tables")
def test_new_process_on_a_tuned_shape_loads_few_modules(own_database: Path) -> None:
    q, k, v = tensors(512, 512)
    pin(timed_record(q, k, v, {}))
    generated(q, k, v)
    program = (
        "import sys, torch, flashtune\n"
        "q = torch.randn(2, 8, 512, 64, dtype=torch.bfloat16, device='cuda'); k = v = q[:, :2]\n"
        "k = v = k.contiguous()\n"
        "flashtune.attention(q, k, v, causal=True, prefer='generated')\n"
        "print(*{'jinja2', 'sqlalchemy', 'alembic', 'optuna', 'click'} & set(sys.modules))"
    )
    # This process may have loaded the kernel before, into another test's cache: then the first renders it.
    for _ in range(2):
        answer = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr
        assert "FlashtuneWarning" not in answer.stderr
    assert answer.stdout.strip() == ""


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("lengths", [(128, 128), (100, 300), (300, 100), (1, 77), (77, 1)])
def test_sdpa_has_the_same_semantics(causal: Causal, lengths: tuple[int, int]) -> None:
    q, k, v = tensors(*lengths)
    options: dict[Causal, CausalOption] = {Causal.NONE: False, Causal.TOP_LEFT: "top_left"}
    expected = reference(q, k, v, options.get(causal, True)).out.exact
    # SDPA need not meet the tolerance of verification.
    out = sdpa_attention(q, k, v, 0.125, causal)
    torch.testing.assert_close(out.double(), expected, atol=1.6e-2, rtol=1.6e-2)


def test_gradients_match_those_of_sdpa() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors(256, 256, dtype=torch.float16))
    out = flashtune.attention(q, k, v, causal=True)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().square().sum(), (q, k, v)))
