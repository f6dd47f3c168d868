"""Models that are known by name: the problems of their calls, in both phases and of any sizes."""

import pytest

from flashtune.core.errors import UsageError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Feature, Problem
from flashtune.core.target import find_target
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import families
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import ModelAttention, as_called, model_calls, model_problems
from flashtune.tuner.workloads.presets import MODELS, find_model

PREFILL, DECODE = ModelSizes(), ModelSizes(Phase.DECODE)


def test_table_has_unique_models_with_sources() -> None:
    assert len(MODELS) >= 25
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert all(model.source for model in MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_call_of_every_model_is_supported(model: ModelAttention) -> None:
    phases = [PREFILL, PREFILL._replace(packed=True), *([DECODE] if model.causal else [])]
    target = find_target("h200")
    for problem in (problem for sizes in phases for problem in model_problems(model, sizes)):
        refused = [unsupported_reason(family, problem, target, Specialization()) for family in families()]
        assert None in refused, refused


def test_prefill_of_a_named_model() -> None:
    problems = model_problems(
        find_model("Llama-3.1-8B"), ModelSizes(Phase.PREFILL, "1024..4096", "1|2", "fp16")
    )
    assert len(problems) == 6
    assert {(problem.heads, problem.kv_heads, problem.head_dim) for problem in problems} == {(32, 8, 128)}
    assert all(problem.causal is Causal.BOTTOM_RIGHT and problem.dtype is Dtype.FP16 for problem in problems)


def test_packed_prompts_have_the_total_number_of_tokens() -> None:
    problems = model_problems(
        find_model("llama-3.1-8b"), ModelSizes(batch="4", seqlen="1024|2048", packed=True)
    )
    assert [(problem.batch, problem.seqlen_q, problem.packed) for problem in problems] == [
        (4, 1024, 4096),
        (4, 2048, 8192),
    ]


def test_packed_and_paged_problems_match_dispatch() -> None:
    (packed,) = model_problems(find_model("llama-3.1-8b"), ModelSizes(batch="3", seqlen="1000", packed=True))
    assert (packed.seqlen_q, packed.seqlen_kv, packed.packed) == (1024, 1024, 4096)
    (paged,) = model_problems(find_model("llama-3.1-8b"), DECODE._replace(seqlen="1025"))
    assert paged.seqlen_kv == 2048
    assert [as_called(number) for number in (1, 2, 3, 512, 513)] == [1, 2, 4, 512, 1024]


def test_decode_reads_whole_pages() -> None:
    (problem,) = model_problems(find_model("llama-3.1-8b"), DECODE._replace(seqlen="1000", batch="16"))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv, problem.page_size) == (16, 1, 1024, 16)
    assert problem.features == {Feature.PAGES}
    problems = model_problems(find_model("llama-3.1-8b"), DECODE._replace(seqlen="1000", page_size="0|64"))
    assert [(problem.page_size, problem.seqlen_kv) for problem in problems] == [(0, 1000), (64, 1024)]


def of(name: str, sizes: ModelSizes = PREFILL) -> list[tuple[int, Problem]]:
    (calls,) = model_calls(find_model(name), sizes._replace(seqlen="16384"))
    return [(call.layers, call.problem) for call in calls]


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral-7b-v0.1", {4095: 32}),
        ("gemma-2-9b", {4095: 21, None: 21}),
        ("gemma-2-27b", {4095: 23, None: 23}),
        ("gemma-3-1b", {511: 22, None: 4}),
        ("gemma-3-27b", {1023: 52, None: 10}),
        ("gpt-oss-20b", {127: 12, None: 12}),
        ("gpt-oss-120b", {127: 18, None: 18}),
    ],
)
def test_window_includes_the_token_itself(name: str, windows: dict[int | None, int]) -> None:
    assert {problem.window_left: layers for layers, problem in of(name)} == windows
    assert {problem.window_left: layers for layers, problem in of(name, DECODE)} == windows


def test_window_is_dropped_if_sequences_fit_into_it() -> None:
    windowed = find_model("mistral-7b-v0.1")
    (short, long) = model_problems(windowed, ModelSizes(seqlen="4096|8192"))
    assert (short.window_left, long.window_left) == (None, 4095)
    (whole,) = model_problems(find_model("llama-4-scout"), ModelSizes(seqlen="8192"))
    assert not whole.features


def test_features_of_models() -> None:
    assert {problem.features for _, problem in of("gemma-2-9b")} == {
        frozenset({Feature.SOFTCAP}),
        frozenset({Feature.SOFTCAP, Feature.WINDOW}),
    }
    assert all(Feature.SINKS in problem.features for _, problem in of("gpt-oss-20b"))
    chunked, full = of("llama-4-scout")
    assert (chunked[0], chunked[1].chunk, full[0], full[1].features) == (36, 8192, 12, frozenset())


def test_mla_is_decoded_with_one_kv_head() -> None:
    ((layers, prefill),) = of("deepseek-v3")
    assert (layers, prefill.heads, prefill.kv_heads) == (61, 128, 128)
    assert (prefill.head_dim, prefill.value_head_dim, prefill.mla) == (192, 128, False)
    ((_, decode),) = of("deepseek-v3", DECODE)
    assert (decode.heads, decode.kv_heads, decode.head_dim, decode.value_head_dim) == (128, 1, 576, 512)
    assert decode.mla
    model = find_model("deepseek-v3")
    # A cache of 576 numbers of two bytes for each token and layer.
    assert model.cache_bytes(decode) == model.cache_bytes(prefill) == 61 * 16384 * 576 * 2


def test_an_encoder_sees_all_keys_and_does_not_decode() -> None:
    (problem,) = model_problems(find_model("bert-base"), ModelSizes(seqlen="512", batch="8"))
    assert problem.causal is Causal.NONE
    with pytest.raises(UsageError, match="encoder"):
        model_problems(find_model("bert-base"), DECODE)


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        (ModelSizes(page_size="16"), "add --phase decode"),
        (DECODE._replace(packed=True), "leave it out"),
        (DECODE._replace(page_size="24"), "16, 32, 64, 128, 256"),
        (DECODE._replace(seqlen="long"), "whole numbers"),
    ],
)
def test_invalid_sizes_raise_one_sentence(sizes: ModelSizes, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        model_problems(find_model("llama-3.1-8b"), sizes)


def test_unknown_model_error_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"--hf-config, or did you mean 'llama-3\.1-8b'"):
        find_model("lama-3.1-8b")
