"""The runtime on a GPU: every kind of tensor, compiled, captured, threaded, and safe when a kernel is not."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import decision
from flashtune.api import CausalOption
from flashtune.calls import forget_servers
from flashtune.db.store import open_store
from flashtune.delegation import PEERS, sdpa_attention, usual_backend
from flashtune.dispatch import default_selection
from flashtune.errors import KernelError, VerificationError
from flashtune.kernel import Alignment, Specialization
from flashtune.notices import FlashtuneWarning, forget_told
from flashtune.problem import Causal
from flashtune.proof import check
from flashtune.record import Measurement, Outcome, PeerTime, Provenance, Record, Verdict
from flashtune.rendered import kernel_of
from flashtune.request import read_request
from flashtune.self_check import forget_verdicts
from flashtune.tables import Tables, tuned_records
from flashtune.target import device_target

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::flashtune.notices.FlashtuneWarning")]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Triple = tuple[Tensor, Tensor, Tensor]


def forget() -> None:
    forget_servers()
    forget_told()
    forget_verdicts()
    tuned_records.cache_clear()


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is tuned, whatever ships for this GPU, and nothing is remembered."""
    forget()
    monkeypatch.setattr(decision, "tuned_records", lambda _: Tables({}, {}))
    yield
    forget()


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's database is read after all."""
    monkeypatch.setattr(decision, "tuned_records", tuned_records)


def tensors(
    seqlen_q: int = 300,
    seqlen_kv: int = 400,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
) -> Triple:
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_kv)

    def normal(count: int, length: int) -> Tensor:
        shape = (batch, count, length, head_dim)
        return torch.randn(shape, dtype=dtype, device="cuda", generator=generator)

    return normal(heads, seqlen_q), normal(kv_heads, seqlen_kv), normal(kv_heads, seqlen_kv)


def reference(q: Tensor, k: Tensor, v: Tensor, causal: CausalOption = False) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, from the definition, heads first."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5
    if causal:
        diagonal = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device="cuda").tril(diagonal)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def close(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def generated(q: Tensor, k: Tensor, v: Tensor, causal: CausalOption = True, **options: Any) -> Any:
    return flashtune.attention(q, k, v, causal=causal, prefer="generated", **options)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes_and_layouts(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    expected, _ = reference(q, k, v, True)
    close(generated(q, k, v), expected)
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    out = generated(q, k, v, layout="bshd")
    assert out.is_contiguous()
    close(out.transpose(1, 2), expected)
    close(generated(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), expected)


@pytest.mark.parametrize(
    ("causal", "lengths"),
    [
        (False, (1, 129)),
        (False, (257, 63)),
        ("top_left", (100, 300)),
        ("top_left", (300, 100)),
        (True, (300, 100)),
        (True, (1, 1000)),
        (True, (1000, 1)),
    ],
)
def test_masks_and_lengths(causal: CausalOption, lengths: tuple[int, int]) -> None:
    q, k, v = tensors(*lengths)
    close(generated(q, k, v, causal), reference(q, k, v, causal)[0])


@pytest.mark.parametrize("head_dim", [40, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    q, k, v = tensors(head_dim=head_dim)
    close(generated(q, k, v), reference(q, k, v, True)[0])


def test_the_log_sum_exp() -> None:
    q, k, v = tensors(400, 300)
    out, lse = generated(q, k, v, return_lse=True)
    expected, expected_lse = reference(q, k, v, True)
    close(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


def padded(tensor: Tensor, spare: int, offset: int = 0) -> Tensor:
    """The same values in rows that are wider, from an offset on."""
    batch, heads, length, width = tensor.shape
    room = torch.full((batch * heads * length * (width + spare) + offset,), torch.nan, device="cuda")
    rows = room.to(tensor.dtype)[offset:].view(batch, heads, length, width + spare)
    return rows[..., :width].copy_(tensor)


@pytest.mark.parametrize(
    ("spare", "offset", "alignment"),
    [
        (0, 0, Alignment.SIXTEEN),
        (8, 0, Alignment.EIGHT),
        (3, 0, Alignment.ANY),
        (0, 1, Alignment.ANY),
        (16, 8, Alignment.SIXTEEN),
    ],
)
def test_alignments(spare: int, offset: int, alignment: Alignment) -> None:
    q, k, v = tensors()
    expected, _ = reference(q, k, v, True)
    for views in (
        (padded(q, spare, offset), k, v),
        (q, padded(k, spare, offset), v),
        (q, k, padded(v, spare, offset)),
    ):
        assert decision.needed_specialization(_request(*views), *views).alignment is alignment
        close(generated(*views), expected)


def _request(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return read_request(q, k, v, True, "bhsd", False, "generated")


def test_expanded_tensors() -> None:
    q, k, v = tensors(kv_heads=1)
    shared = k.expand(-1, 8, -1, -1), v.expand(-1, 8, -1, -1)
    close(generated(q, *shared), reference(q, *shared, True)[0])
    repeated = k[:, :, :1].expand(-1, -1, 400, -1), v
    close(generated(q, *repeated), reference(q, *repeated, True)[0])


def test_more_than_two_to_the_31_elements() -> None:
    """A query tensor of 4.3 GB, its output alike; the last rows lie beyond 32-bit offsets."""
    heads, length = 33, 2**20
    q = torch.empty(1, heads, length, 64, dtype=torch.bfloat16, device="cuda").normal_()
    k, v = (torch.randn(1, 1, 48, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert q.numel() > 2**31
    out = generated(q, k, v, False)
    for rows in (slice(0, 300), slice(length // 2, length // 2 + 300), slice(length - 300, length)):
        close(out[:, :, rows], reference(q[:, :, rows], k, v)[0])
    assert decision.needed_specialization(_request(q, k, v), q, k, v).index_bits == 64


def test_strides_beyond_two_to_the_31_elements() -> None:
    q, k, v = tensors()
    room = torch.empty(2**31 + k.numel(), dtype=k.dtype, device="cuda")
    far = room.as_strided(k.shape, (2**31, *k.stride()[1:])).copy_(k)
    close(generated(q, far, v), reference(q, k, v, True)[0])


def test_compilers_see_one_node() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    q, k, v = tensors()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtune.attention(q * 2, k, v, causal=True, prefer="generated") + 1

    eager = model(q, k, v)
    torch.testing.assert_close(torch.compile(model, backend=keep, fullgraph=True)(q, k, v), eager)
    [graph] = graphs
    assert sum("flashtune" in str(node.target) for node in graph.graph.nodes) == 1
    torch._dynamo.reset()
    inductor = torch.compile(model, fullgraph=True)(q, k, v)
    torch.testing.assert_close(inductor, eager, atol=2e-2, rtol=2e-2)


def test_a_plan_is_captured_and_replayed() -> None:
    q, k, v = tensors()
    planned = flashtune.plan(q, k, v, causal=True, prefer="generated")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = planned(q, k, v)
    for step in range(3):
        q.copy_(torch.randn_like(q) * (step + 1))
        graph.replay()
        close(out, reference(q, k, v, True)[0])


def test_a_new_shape_in_a_capture_names_plan() -> None:
    q, k, v = tensors(77, 78)
    flashtune.attention(*tensors(), causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(KernelError, match=r"flashtune\.plan"):
        flashtune.attention(q, k, v, causal=True)


def test_threads_on_their_own_streams() -> None:
    q, k, v = tensors()
    expected, _ = reference(q, k, v, True)
    torch.cuda.synchronize()
    outs: list[Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            repeated = [generated(q, k, v) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
            outs.append(repeated[-1])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 8
    for out in outs:
        close(out, expected)


class Refusing:
    """A check that finds every kernel wrong, and counts how often it was asked."""

    calls = 0

    def __call__(self, *_: object) -> Verdict:
        self.calls += 1
        return Verdict(False, 9.0, 1, "forced", "test")


def test_a_kernel_that_fails_its_self_check_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing()
    monkeypatch.setattr(check, "check_rendered", refusing)
    q, k, v = tensors()
    with pytest.warns(FlashtuneWarning, match="failed its self-check"):
        close(flashtune.attention(q, k, v, causal=True), reference(q, k, v, True)[0])
    assert flashtune.explain(q, k, v, causal=True).server == "sdpa"
    out, lse = flashtune.attention(q, k, v, causal=True, return_lse=True)
    close(out, reference(q, k, v, True)[0])
    assert lse.isfinite().all()
    with pytest.raises(VerificationError, match="failed its self-check"):
        generated(q, k, v)


def test_a_passed_self_check_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    assert flashtune.explain(q, k, v, causal=True, prefer="generated").standing == "unproven"
    generated(q, k, v)
    forget()
    assert flashtune.explain(q, k, v, causal=True, prefer="generated").standing == "verified"
    refusing = Refusing()
    monkeypatch.setattr(check, "check_rendered", refusing)
    close(generated(q, k, v), reference(q, k, v, True)[0])
    assert refusing.calls == 0


def timed_record(q: Tensor, k: Tensor, v: Tensor, peers: dict[str, float]) -> Record:
    """The default config as if a search had verified and measured it here."""
    target = device_target()
    record = default_selection(_request(q, k, v).problem, target, Specialization()).record
    return msgspec.structs.replace(
        record,
        kernel=kernel_of(record, Specialization()).digest,
        outcome=Outcome.OK,
        provenance=Provenance.MEASURED,
        verdict=Verdict(True, 0.5, 10, "", torch.cuda.get_device_name()),
        measurement=Measurement(
            1.0, 0.99, 1.01, 11, peers=tuple(PeerTime(name, ms) for name, ms in peers.items())
        ),
    )


def pin(record: Record) -> None:
    with open_store() as store:
        store.pin(store.add(record))
    forget()


@pytest.mark.usefixtures("own_tables")
def test_a_timed_kernel_serves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(512, 512)
    pin(timed_record(q, k, v, {}))
    refusing = Refusing()
    monkeypatch.setattr(check, "check_rendered", refusing)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlashtuneWarning)
        close(flashtune.attention(q, k, v, causal=True), reference(q, k, v, True)[0])
        near = tensors(500, 500)
        close(flashtune.attention(*near, causal=True), reference(*near, True)[0])
    assert refusing.calls == 0
    told = flashtune.explain(q, k, v, causal=True)
    assert (told.server, told.standing) == ("generated", "timed")


@pytest.mark.usefixtures("own_tables")
def test_the_fastest_is_chosen_by_what_was_measured() -> None:
    q, k, v = tensors(512, 512)
    pin(timed_record(q, k, v, dict.fromkeys(PEERS.values(), 0.5)))
    assert usual_backend(q, k, v, _request(q, k, v).problem) in PEERS.values()
    assert flashtune.explain(q, k, v, causal=True).server == "sdpa"
    close(flashtune.attention(q, k, v, causal=True), reference(q, k, v, True)[0])
    assert flashtune.explain(q, k, v, causal=True, prefer="generated").server == "generated"


@pytest.mark.usefixtures("own_tables")
def test_a_fresh_process_on_a_tuned_shape_stays_light(own_database: Path) -> None:
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
    answer = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == ""
    assert "FlashtuneWarning" not in answer.stderr


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("lengths", [(128, 128), (100, 300), (300, 100), (1, 77), (77, 1)])
def test_sdpa_serves_with_the_same_meaning(causal: Causal, lengths: tuple[int, int]) -> None:
    q, k, v = tensors(*lengths)
    options: dict[Causal, CausalOption] = {Causal.NONE: False, Causal.TOP_LEFT: "top_left"}
    expected, _ = reference(q, k, v, options.get(causal, True))
    close(sdpa_attention(q, k, v, 0.125, causal), expected)


def test_gradients_match_sdpas() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors(256, 256, dtype=torch.float16))
    out = flashtune.attention(q, k, v, causal=True)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().square().sum(), (q, k, v)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_device_that_is_not_current() -> None:
    q, k, v = tensors()
    expected, _ = reference(q, k, v, True)
    close(generated(q.cuda(1), k.cuda(1), v.cuda(1)).to("cuda:0"), expected)
    close(generated(q, k, v), expected)
