"""Tests of calls that each integration records, for `flashtune warm` and `flashtune search`."""

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashtune.core.record import Outcome, Resources
from flashtune.dispatch import decision
from flashtune.dispatch.tables import tuned_records
from flashtune.integrations import torch as torch_integration
from flashtune.integrations import transformers as transformers_integration
from flashtune.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flashtune.recording.recorder import read_counts
from flashtune.runtime.session import SESSION, record_calls
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.cli import main
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool
from tests.problems import sglang_objects, vllm_objects
from tests.problems.serving_batches import CASES, DECODING, MIXED, make_batch
from tests.support import attention_operators, host_stubs
from tests.support.machine import TARGET, Machine

pytestmark = pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")
# A length that no table has. Kernels of its bucket are others.
LENGTH = 300
Call = Callable[[], object]


class Starting:
    """A call of one integration, made by the fixture `start`."""

    def __init__(self, patch: pytest.MonkeyPatch, exits: ExitStack) -> None:
        self.patch, self.exits = patch, exits

    def torch(self) -> Call:
        self.patch.setattr(torch_integration, "KEY", "CPU")
        self.exits.enter_context(attention_operators.registered())
        self.exits.enter_context(torch_integration.activate())
        q = torch.randn(1, 32, LENGTH, 64, dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(1, 8, LENGTH, 64, dtype=torch.bfloat16)
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention
        return lambda: operator(q, k, k, None, True, 0.0, True)

    def transformers(self) -> Call:
        transformers = pytest.importorskip("transformers", minversion="5.17")
        self.patch.setattr(transformers_integration, "DEVICES", {"cpu"})
        name = transformers_integration.register()
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=8, num_hidden_layers=1, head_dim=64
        )
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name)
        model = model.bfloat16()
        return torch.no_grad()(lambda: model(input_ids=torch.ones(1, LENGTH, dtype=torch.long)))

    def flash_attn(self) -> Call:
        q = torch.randn(1, LENGTH, 32, 64, dtype=torch.bfloat16)
        cache = torch.randn(9, 64, 8, 64, dtype=torch.bfloat16)
        table = torch.arange(9, dtype=torch.int32)[None]

        def call() -> None:
            flash_attn_func(q, q, q, causal=True)
            lengths = torch.tensor([LENGTH], dtype=torch.int32)
            flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=lengths, block_table=table)

        return call

    def vllm(self) -> Call:
        host_stubs.install("vllm", self.patch)
        vllm = importlib.import_module("flashtune.integrations.vllm_backend")
        batch, case = make_batch(MIXED, torch.bfloat16, width=64), CASES["window"]
        metadata = vllm_objects.builder(vllm).build(0, vllm_objects.common(batch))
        cache = vllm_objects.packed_cache(batch, torch.bfloat16)
        layer, scales = vllm_objects.layer_of(vllm, batch, case), vllm_objects.scales_of(case)
        output = torch.empty_like(batch.q)
        return lambda: layer.forward(scales, batch.q, batch.k, batch.v, cache, metadata, output)

    def sglang(self) -> Call:
        host_stubs.install("sglang", self.patch)
        sglang = importlib.import_module("flashtune.integrations.sglang_backend")
        batch, case = make_batch((*DECODING[:-1], (1, 1)), torch.bfloat16, width=64), CASES["plain"]
        pool = sglang_objects.KVPool(batch, torch.bfloat16)
        backend = sglang.backend_class()(sglang_objects.runner_of(batch, pool, dtype=torch.bfloat16))
        info, layer = sglang_objects.forward_batch(batch), sglang_objects.layer_of(batch, case)
        backend.init_forward_metadata(info)
        q = batch.q.flatten(1)
        return lambda: backend.forward_decode(q, batch.k, batch.v, layer, info, False)


INTEGRATIONS = ("torch", "transformers", "flash_attn", "vllm", "sglang")


@pytest.fixture
def start(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    """Calls on a fake H200 with its shipped table. Launches compute nothing."""
    machine.tables = tuned_records(TARGET.name)
    machine.launch = lambda *_, **__: lambda *_, **__: None
    monkeypatch.setattr(decision, "beats", lambda *_: True)
    with ExitStack() as exits:
        yield Starting(monkeypatch, exits)
        SESSION.wait()


def first_calls(call: Call) -> None:
    """Calls until the kernels of deferred calls are bound, in a process that knows no call."""
    SESSION.forget()
    for _ in range(4):
        call()
        SESSION.wait()


def invoke(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_recorded_calls_can_be_searched_and_warmed(
    machine: Machine, start: Starting, integration: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Call = getattr(start, integration)()
    with record_calls(file):
        first_calls(call)
    recorded = {count.problem for count in read_counts(file)}
    planned = invoke("search", "--target", "h200", "--from", file, "--dry-run")
    assert f"{len(recorded)} of {len(recorded)} recorded problems are searched" in planned.stderr

    warmed: set[str] = set()

    def submit(_: CompilePool, task: SearchTask, candidate: Candidate) -> Future[Compiled]:
        family = find_family(candidate.family)
        warmed.add(render(family, task.problem, candidate.config, task.specialization).digest)
        done: Future[Compiled] = Future()
        done.set_result(Compiled(Outcome.OK, None, Resources(1024, compile_seconds=1.5)))
        return done

    monkeypatch.setattr(CompilePool, "submit", submit)
    invoke("warm", "--target", "h200", "--from", file)

    loaded: set[str] = set()

    machine.loading = lambda kernel: loaded.add(kernel.digest)
    first_calls(call)
    assert {SESSION.callers.get(problem) for problem in recorded if not problem.is_backward} == {integration}
    assert loaded
    assert loaded <= warmed
