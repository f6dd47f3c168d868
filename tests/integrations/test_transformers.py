"""Tests of transformers' models with flashtune's attention function on the CPU, in float64 and unfused."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.errors import UsageError
from flashtune.integrations import transformers as integration
from flashtune.integrations import transformers_masks as masks
from flashtune.integrations.transformers_jobs import Job, layer_of
from flashtune.request.call import Call
from flashtune.runtime.call_cache import run_call
from tests.support.models.served import serve_on_cpu
from tests.support.models.transformers_models import (
    ARCHITECTURES,
    BATCH,
    LENGTH,
    VOCABULARY,
    distance,
    error,
    exact_softmax,
    generated,
    inputs_of,
    model_of,
    passes_of,
    reference,
)
from tests.support.values import present

transformers = pytest.importorskip("transformers", minversion="5.17")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")]
DOUBLE = torch.float64
# Norms compute in float32 in models of any type.
BOUND = 1e-5


class Served:
    """The calls that flashtune serves, and the names of the replaced operators. It may have no kernels."""

    def __init__(self) -> None:
        self.has_kernels = True
        self.calls: list[Call] = []
        self.usual: list[str | None] = []

    def prepared(self, job: Job) -> Any:
        if not self.has_kernels:
            return None
        self.calls.append(job.call)
        self.usual.append(job.usual)
        return lambda *_: run_call(job.call)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Flashtune serves on the CPU, and at once. Float64 counts as a type of 16 bits."""
    calls = Served()
    monkeypatch.setattr(integration, "prepared", calls.prepared)
    serve_on_cpu(monkeypatch, DOUBLE)
    integration.register()
    return calls


def sides(name: str) -> tuple[str, ...]:
    kind = ARCHITECTURES[name].kind
    return {"images": ("none",), "audio to text": ("none", "right")}.get(
        kind, ("none", "left", "right", "hole")
    )


CASES = [(name, side) for name in ARCHITECTURES for side in sides(name)]


def test_starts_are_converted_once_under_autocast() -> None:
    q, starts = torch.randn(1, 2, 8, 16), torch.tensor([0, 3, 8])
    with torch.autocast("cpu", torch.bfloat16):
        layer = layer_of(
            (q, q, q), None, None, True, None, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        )
        casted = layer.casted().with_features(30.0, None, 0.0)
    assert (casted.q.dtype, casted.side.softcap) == (torch.bfloat16, 30.0)
    assert casted.starts is layer.starts


@pytest.mark.parametrize(("name", "side"), CASES)
def test_logits_and_gradients(served: Served, name: str, side: str) -> None:
    model = model_of(transformers, name, "tuned_attention", dtype=DOUBLE)
    inputs = inputs_of(name, side, dtype=DOUBLE)
    want = reference(model_of(transformers, name, "eager", dtype=DOUBLE), inputs)
    results = passes_of(model, inputs)
    assert served.calls
    assert all(difference < BOUND for difference in error(results, want))


@pytest.mark.parametrize(
    ("name", "side"), [("llama", "none"), *((name, sides(name)[-1]) for name in ARCHITECTURES)]
)
def test_without_kernels_transformers_serves(served: Served, name: str, side: str) -> None:
    served.has_kernels = False
    model = model_of(transformers, name, "tuned_attention", dtype=DOUBLE)
    inputs = inputs_of(name, side, dtype=DOUBLE)
    want = reference(model_of(transformers, name, "eager", dtype=DOUBLE), inputs)
    with exact_softmax():
        results = passes_of(model, inputs)
    assert all(difference < BOUND for difference in error(results, want))


@pytest.mark.parametrize("side", ["left", "hole", "none"])
@pytest.mark.parametrize("name", [name for name, model in ARCHITECTURES.items() if model.generates])
def test_generated_tokens(served: Served, name: str, side: str) -> None:
    inputs = inputs_of(name, side if side in sides(name) else "none")
    with exact_softmax():
        model = model_of(transformers, name, ARCHITECTURES[name].usual, dtype=DOUBLE)
        want = generated(model, double(inputs), 8)
    tokens = generated(model_of(transformers, name, "tuned_attention", dtype=DOUBLE), double(inputs), 8)
    assert served.calls
    assert torch.equal(tokens, want)


def double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


@pytest.mark.parametrize("cache", ["dynamic", "static", "quantized"])
@pytest.mark.parametrize("side", ["left", "none"])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_caches(served: Served, name: str, side: str, cache: str) -> None:
    inputs = inputs_of(name, side)

    def tokens(implementation: str) -> Tensor:
        model = model_of(transformers, name, implementation, dtype=DOUBLE)
        if cache == "static":
            return generated(model, inputs, 10, cache_implementation="static", disable_compile=True)
        past = transformers.DynamicCache(config=model.config)
        if cache == "quantized":
            past.layers = [rounding_layer(transformers) for _ in past.layers]
        return generated(model, inputs, 10, past_key_values=past)

    want = tokens(ARCHITECTURES[name].usual)
    served.calls.clear()
    assert torch.equal(tokens("tuned_attention"), want)
    assert len(served.calls) == 20


def test_static_cache_of_text_to_text(served: Served) -> None:
    inputs = inputs_of("t5", "left")
    prompt = {"decoder_input_ids": torch.tensor([[1, 5, 7], [1, 9, 3]])}
    options = {"cache_implementation": "static", "disable_compile": True, **prompt}
    want = generated(model_of(transformers, "t5", "sdpa", dtype=DOUBLE), inputs, 8, **options)
    served.calls.clear()
    tokens = generated(model_of(transformers, "t5", "tuned_attention", dtype=DOUBLE), inputs, 8, **options)
    assert torch.equal(tokens, want)
    assert served.calls


def rounding_layer(transformers: Any) -> Any:
    """A layer of a quantised cache that rounds."""

    class Rounding(transformers.cache_utils.QuantizedLayer):  # type: ignore[misc]
        def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
            return (tensor * 8).round().to(torch.int8)

        def _dequantize(self, tensor: Tensor) -> Tensor:
            return tensor.double() / 8

    return Rounding(residual_length=4)


@pytest.mark.parametrize(
    ("name", "is_given"),
    # Without starts, transformers ignores the positions of gpt-oss.
    [("llama", False), ("mistral", False), ("llama", True), ("mistral", True), ("gpt_oss", True)],
)
def test_packed_sequences(served: Served, name: str, is_given: bool) -> None:
    lengths = (3, 7, 2, 8)
    ids = torch.randint(2, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    options: dict[str, Any] = {"use_cache": False}
    if is_given:
        options |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8, "max_length_k": 8}
    model = model_of(transformers, name, "tuned_attention", dtype=DOUBLE)
    other = model_of(transformers, name, "eager", dtype=DOUBLE)
    want = torch.cat([reference_logits(other, part) for part in ids.split(lengths, 1)], 1)
    served.calls.clear()
    logits = model(ids, position_ids=places, **options).logits
    assert [call.side.cu_seqlens_q is not None for call in served.calls] == [is_given] * 2
    assert distance([logits.detach()], [want]) < BOUND


@pytest.mark.parametrize("is_served", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_given_starts_with_windows(served: Served, window: int | None, is_served: bool) -> None:
    served.has_kernels = is_served
    host = transformers.masking_utils
    function = host.causal_mask_function
    if window is not None:
        function = host.sliding_window_causal_mask_function(window)
    starts = torch.tensor([0, 3, 10, 12], dtype=torch.int32)
    numbers = torch.tensor([[0] * 3 + [1] * 7 + [2] * 2])
    complete = host.and_masks(function, host.packed_sequence_mask_function(numbers))
    q, k, v = torch.randn(3, 1, 4, 12, 16, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    mask = masks.attention_mask(1, 12, 12, mask_function=function)
    options: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    options |= {"max_length_q": 7, "max_length_k": 7}
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, **options)
    seen = host.sdpa_mask(1, 12, 12, mask_function=complete, allow_is_causal_skip=False)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "additive", "spans"])
@pytest.mark.parametrize("is_served", [False, True])
def test_selected_keys(served: Served, kind: str, is_served: bool) -> None:
    served.has_kernels = is_served
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, BATCH, 4, LENGTH, 16, generator=generator, dtype=DOUBLE)
    indices = torch.rand(BATCH, LENGTH, LENGTH, generator=generator).topk(5, -1).indices
    indices[..., 0] = torch.arange(LENGTH)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].expand(BATCH, 1, -1, -1)
    wanted = seen & torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    mask: Tensor | None = seen
    if kind == "additive":
        mask = torch.zeros_like(seen, dtype=DOUBLE).masked_fill(~seen, torch.finfo(DOUBLE).min)
    elif kind == "spans":
        padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        mask = masks.attention_mask(BATCH, LENGTH, LENGTH, attention_mask=padding)
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, indices=indices)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, wanted).transpose(1, 2)
    assert bool(served.calls) is is_served
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("given", ["indices", "block_indices"])
def test_selections_that_cannot_be_masked_raise_one_sentence(served: Served, given: str) -> None:
    q, k, v = torch.zeros(3, 1, 1, 2, 16)
    others: dict[str, Any] = {given: torch.zeros(1, 2, 1)}
    with pytest.raises(UsageError, match=r"^Module selects blocks of keys: use another implementation$"):
        integration.attention(torch.nn.Module(), q, k, v, None, **others)


def test_layers_that_drop_queries_get_a_mask(served: Served) -> None:
    config = SimpleNamespace(num_kv_shared_layers=2)
    assert masks.attention_mask(BATCH, LENGTH, LENGTH) is None
    spans = present(masks.attention_mask(BATCH, LENGTH, LENGTH, config=config))
    assert masks.is_spans(spans)
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, BATCH, 4, LENGTH, 16, generator=generator, dtype=DOUBLE)
    module = torch.nn.Module()
    whole, _ = integration.attention(module, q, k, v, spans)
    last, _ = integration.attention(module, q[:, :, -3:], k, v, spans[:, :, -3:])
    torch.testing.assert_close(last, whole[:, -3:], atol=1e-12, rtol=0)


def gemma4_config() -> Any:
    return transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        num_kv_shared_layers=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    )


def deepseek_config() -> Any:
    return transformers.DeepseekV32Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
        first_k_dense_replace=2,
    )


@pytest.mark.parametrize("make", [gemma4_config, deepseek_config])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("kept", [1, 3])
def test_models_that_drop_queries_or_select_keys(
    served: Served, make: Any, has_padding: bool, kept: int
) -> None:
    ids = torch.randint(2, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(4))
    options: dict[str, Any] = {"logits_to_keep": kept}
    if has_padding:
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :3] = 0
    logits = []
    for implementation in ("sdpa", "tuned_attention"):
        torch.manual_seed(0)
        config = make()
        config._attn_implementation = implementation
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        with torch.no_grad():
            logits.append(model(ids, **options).logits)
    assert len(served.calls) == config.num_hidden_layers
    assert distance([logits[1]], [logits[0]]) < BOUND


def reference_logits(model: Any, ids: Tensor) -> Tensor:
    with exact_softmax(), torch.no_grad():
        logits: Tensor = model(ids, use_cache=False).logits
        return logits


@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_of_given_starts(is_causal: bool) -> None:
    starts_q, starts_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 8])
    mask = masks.packed_mask(starts_q, starts_k, 6, 8, is_causal)[0, 0]
    want = torch.zeros(6, 8, dtype=torch.bool)
    for at, (first, last) in enumerate(itertools.pairwise(starts_q)):
        keys = slice(int(starts_k[at]), int(starts_k[at + 1]))
        part = torch.ones(int(last - first), keys.stop - keys.start, dtype=torch.bool)
        want[int(first) : int(last), keys] = part.tril(part.shape[1] - part.shape[0]) if is_causal else part
    assert torch.equal(mask[:5], want[:5])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "t5", "bert"])
def test_gradient_checkpointing(served: Served, name: str, use_reentrant: bool) -> None:
    inputs = inputs_of(name, "left")
    want = reference(model_of(transformers, name, "eager", dtype=DOUBLE), inputs)
    model = model_of(transformers, name, "tuned_attention", dtype=DOUBLE).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    results = passes_of(model, inputs, use_cache=False) if name != "bert" else passes_of(model, inputs)
    assert all(difference < BOUND for difference in error(results, want))


def mask_cases() -> dict[str, dict[str, Any]]:
    """Arguments of mask functions, by description."""
    host = transformers.masking_utils
    causal = host.causal_mask_function
    window = host.sliding_window_causal_mask_function(4)
    padding = inputs_of("llama", "left")["attention_mask"].bool()
    hole = inputs_of("llama", "hole")["attention_mask"].bool()
    packed = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4]).expand(2, -1)
    both = host.and_masks(window, host.packed_sequence_mask_function(packed))
    free = host.and_masks(host.bidirectional_mask_function, host.packed_sequence_mask_function(packed))
    square: dict[str, Any] = {"q_length": LENGTH, "kv_length": LENGTH}
    return {
        "window": square | {"mask_function": window},
        "padding": square | {"mask_function": causal, "attention_mask": padding},
        "hole": square | {"mask_function": causal, "attention_mask": hole},
        "window and padding": square | {"mask_function": window, "attention_mask": padding},
        "packed": square
        | {
            "mask_function": host.and_masks(causal, host.packed_sequence_mask_function(packed)),
            "allow_is_causal_skip": False,
        },
        "packed windows": square | {"mask_function": both, "allow_is_causal_skip": False},
        "packed without causal mask": square | {"mask_function": free, "allow_is_causal_skip": False},
        "chunk": {"q_length": 5, "kv_length": LENGTH, "q_offset": 7, "mask_function": causal}
        | {"attention_mask": padding},
        "chunk of a sliding cache": {"q_length": 5, "kv_length": 9, "q_offset": 7, "kv_offset": 3}
        | {"mask_function": window, "attention_mask": padding},
        "static": {"q_length": 5, "kv_length": 20, "q_offset": torch.tensor(7), "mask_function": causal}
        | {"attention_mask": padding},
        "static and empty": {"q_length": 5, "kv_length": 20, "mask_function": window},
        "short mask": {"q_length": 5, "kv_length": 20, "mask_function": causal, "attention_mask": padding},
        "both sides": square
        | {
            "mask_function": host.sliding_window_bidirectional_mask_function(3),
            "attention_mask": padding,
            "allow_is_causal_skip": False,
        },
    }


@pytest.mark.parametrize("case", mask_cases())
def test_spans_are_complete_masks(served: Served, case: str) -> None:
    arguments = {"batch_size": BATCH, **mask_cases()[case]}
    spans = masks.attention_mask(**arguments)
    arguments["allow_is_causal_skip"] = False
    want = transformers.masking_utils.sdpa_mask(**arguments)
    assert spans is not None
    assert masks.is_spans(spans)
    assert masks.pattern_of(spans, arguments["q_length"], spans.shape[3]) is not None
    assert masks.pattern_of(spans.clone(), arguments["q_length"], spans.shape[3]) is None
    seen = masks.boolean_mask(spans, arguments["q_length"]).expand(*want.shape[:3], -1)
    assert torch.equal(seen, want[..., : seen.shape[3]])
    assert not want[..., seen.shape[3] :].any()
    assert torch.equal(masks.boolean_mask(spans[:, :, -2:], 2).expand_as(seen[:, :, -2:]), seen[:, :, -2:])


@pytest.mark.parametrize("case", mask_cases())
@pytest.mark.parametrize("is_copied", [False, True])
def test_attention_with_spans(served: Served, case: str, is_copied: bool) -> None:
    arguments = {"batch_size": BATCH, **mask_cases()[case]}
    spans = present(masks.attention_mask(**arguments))
    arguments["allow_is_causal_skip"] = False
    want_mask = transformers.masking_utils.sdpa_mask(**arguments)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(BATCH, arguments["q_length"], 4, 16, generator=generator, dtype=DOUBLE).transpose(1, 2)
    k, v = torch.randn(2, BATCH, 4, arguments["kv_length"], 16, generator=generator, dtype=DOUBLE)
    module = torch.nn.Module()
    out, _ = integration.attention(module, q, k, v, spans.clone() if is_copied else spans)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, want_mask).transpose(1, 2)
    rows = want_mask.any(-1).expand(BATCH, 1, -1)[:, 0]
    if "attention_mask" in arguments and not isinstance(arguments.get("q_offset"), Tensor):
        first = arguments.get("q_offset", 0)  # rows of padding are not defined
        rows = rows & arguments["attention_mask"][:, first : first + arguments["q_length"]]
    assert len(served.calls) == 1
    assert out.is_contiguous()
    torch.testing.assert_close(out[rows], want[rows], atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", [case for case in mask_cases() if "packed" not in case])
def test_no_mask_waits_for_a_device(served: Served, case: str) -> None:
    """Fake tensors have no values, so that a function that reads one fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = {"batch_size": BATCH, **mask_cases()[case]}
    with FakeTensorMode() as mode:
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                arguments[name] = mode.from_tensor(value)
        spans = present(masks.attention_mask(**arguments))
        assert masks.boolean_mask(spans, arguments["q_length"]).dtype is torch.bool
        pattern = present(masks.pattern_of(spans, arguments["q_length"], spans.shape[3]))
        if pattern.valid is not None and pattern.is_own:
            assert pattern.orders[0].shape == (BATCH * arguments["q_length"],)


def test_compiled_attention_with_spans(served: Served) -> None:
    arguments = {"batch_size": BATCH, **mask_cases()["window and padding"]}
    spans = masks.attention_mask(**arguments)
    assert spans is not None
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, BATCH, 4, LENGTH, 16, generator=generator, dtype=DOUBLE)

    def attend(mask: Tensor) -> Tensor:
        return integration.attention(torch.nn.Module(), q, k, v, mask)[0]

    want = attend(spans)
    torch._dynamo.reset()
    compiled: Any = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(spans), want, atol=1e-12, rtol=0)
    assert len(served.calls) == 1


def test_compiled_models(served: Served) -> None:
    name = "mistral"
    inputs = inputs_of(name, "left")
    model = model_of(transformers, name, "tuned_attention", dtype=DOUBLE)
    want = reference(model_of(transformers, name, "eager", dtype=DOUBLE), inputs)
    served.calls.clear()
    targets: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=backend)
    results = passes_of(model, inputs)
    assert not served.calls
    assert sum("flashtune" in target for target in targets) == 2
    assert all(difference < BOUND for difference in error(results, want))


def test_compiled_generation(served: Served) -> None:
    name = "gemma3"
    inputs = inputs_of(name, "left")
    want = generated(model_of(transformers, name, "sdpa", dtype=DOUBLE), inputs, 6)
    model = model_of(transformers, name, "tuned_attention", dtype=DOUBLE)
    config = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    served.calls.clear()
    tokens = generated(model, inputs, 6, cache_implementation="static", compile_config=config)
    assert torch.equal(tokens, want)
    assert len(served.calls) == 2, "only the prompt is computed eagerly"


def test_the_name_is_registered() -> None:
    assert integration.register("another_name") == "another_name"
    assert "another_name" in transformers.AttentionInterface()


def test_dropout_is_passed_on(served: Served) -> None:
    model = model_of(transformers, "llama", "tuned_attention", attention_dropout=0.5).train()
    model(inputs_of("llama", "none")["input_ids"])
    assert not served.calls
