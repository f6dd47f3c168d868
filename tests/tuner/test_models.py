from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.errors import UsageError
from flashtune.features import Feature
from flashtune.kernel import Specialization
from flashtune.problem import Causal, Dtype, Problem
from flashtune.target import find_target
from flashtune.templates.family import why_not
from flashtune.templates.registry import families, find_family
from flashtune.tuner.hf_config import read_hf_config
from flashtune.tuner.known_models import MODELS, find_model
from flashtune.tuner.model_sizes import ModelSizes, Phase
from flashtune.tuner.models import Layers, ModelAttention, as_called, model_calls, model_problems

PREFILL, DECODE = ModelSizes(), ModelSizes(Phase.DECODE)


def test_the_table_has_many_models_each_once_with_its_source() -> None:
    assert len(MODELS) >= 25
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert all(model.source for model in MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_prefill_without_features_is_a_problem_that_a_family_computes(model: ModelAttention) -> None:
    found = model_problems(model, ModelSizes(seqlen="16384"))
    assert len(found) == len(model.kinds)
    assert {problem.dtype for problem in found} == {model.dtype}
    family, target = find_family("forward_q_outer"), find_target("h200")
    assert all(problem.features or family.supports(problem, target) is None for problem in found)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_call_of_every_model_is_computed_by_a_family(model: ModelAttention) -> None:
    phases = [PREFILL, PREFILL._replace(packed=True), *([DECODE] if model.causal else [])]
    target = find_target("h200")
    for problem in (problem for sizes in phases for problem in model_problems(model, sizes)):
        refused = [why_not(family, problem, target, Specialization()) for family in families()]
        assert None in refused, refused


def test_prefill_of_a_named_model() -> None:
    found = model_problems(find_model("Llama-3.1-8B"), ModelSizes(Phase.PREFILL, "1024..4096", "1|2", "fp16"))
    assert len(found) == 6
    assert {(problem.heads, problem.kv_heads, problem.head_dim) for problem in found} == {(32, 8, 128)}
    assert all(problem.causal is Causal.BOTTOM_RIGHT and problem.dtype is Dtype.FP16 for problem in found)


def test_packed_prompts_name_the_tokens_of_all() -> None:
    found = model_problems(find_model("llama-3.1-8b"), ModelSizes(batch="4", seqlen="1024|2048", packed=True))
    assert [(problem.batch, problem.seqlen_q, problem.packed) for problem in found] == [
        (4, 1024, 4096),
        (4, 2048, 8192),
    ]


def test_packed_prompts_and_pages_are_named_as_dispatch_names_them() -> None:
    (packed,) = model_problems(find_model("llama-3.1-8b"), ModelSizes(batch="3", seqlen="1000", packed=True))
    assert (packed.seqlen_q, packed.seqlen_kv, packed.packed) == (1024, 1024, 4096)
    (paged,) = model_problems(find_model("llama-3.1-8b"), DECODE._replace(seqlen="1025"))
    assert paged.seqlen_kv == 2048
    assert [as_called(number) for number in (1, 2, 3, 512, 513)] == [1, 2, 4, 512, 1024]


def test_decode_reads_whole_pages() -> None:
    (problem,) = model_problems(find_model("llama-3.1-8b"), DECODE._replace(seqlen="1000", batch="16"))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv, problem.page_size) == (16, 1, 1024, 16)
    assert problem.features == {Feature.PAGES}
    found = model_problems(find_model("llama-3.1-8b"), DECODE._replace(seqlen="1000", page_size="0|64"))
    assert [(problem.page_size, problem.seqlen_kv) for problem in found] == [(0, 1000), (64, 1024)]


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
def test_a_window_counts_the_token_itself(name: str, windows: dict[int | None, int]) -> None:
    assert {problem.window_left: layers for layers, problem in of(name)} == windows
    assert {problem.window_left: layers for layers, problem in of(name, DECODE)} == windows


def test_on_sequences_that_fit_into_a_window_there_is_none() -> None:
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


def test_latent_keys_are_decoded_as_one_head() -> None:
    ((layers, prefill),) = of("deepseek-v3")
    assert (layers, prefill.heads, prefill.kv_heads) == (61, 128, 128)
    assert (prefill.head_dim, prefill.value_head_dim, prefill.latent) == (192, 128, False)
    ((_, decode),) = of("deepseek-v3", DECODE)
    assert (decode.heads, decode.kv_heads, decode.head_dim, decode.value_head_dim) == (128, 1, 576, 512)
    assert decode.latent
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
def test_sizes_that_do_not_fit_get_a_sentence(sizes: ModelSizes, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        model_problems(find_model("llama-3.1-8b"), sizes)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"--hf-config, or did you mean 'llama-3\.1-8b'"):
        find_model("lama-3.1-8b")


def write(folder: Path, document: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0},
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (LLAMA, (32, 8, 128, 128, Dtype.BF16, True)),
        ({**LLAMA, "head_dim": 64, "dtype": "float16"}, (32, 8, 64, 64, Dtype.FP16, True)),
        ({"n_head": 12, "n_embd": 768, "torch_dtype": "float32"}, (12, 12, 64, 64, Dtype.FP32, True)),
        ({**LLAMA, "model_type": "bert"}, (32, 8, 128, 128, Dtype.BF16, False)),
        ({"torch_dtype": "float16", "text_config": LLAMA}, (32, 8, 128, 128, Dtype.BF16, True)),
        (
            {"num_attention_heads": 71, "hidden_size": 4544, "multi_query": True, "num_kv_heads": 71},
            (71, 1, 64, 64, Dtype.BF16, True),
        ),
        (
            {
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "hidden_size": 7168,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            (128, 128, 192, 128, Dtype.BF16, True),
        ),
        ({**LLAMA, "num_key_value_heads": None, "head_dim": None}, (32, 32, 128, 128, Dtype.BF16, True)),
    ],
)
def test_configs_of_many_makes(tmp_path: Path, document: Any, expected: tuple[Any, ...]) -> None:
    found = read_hf_config(write(tmp_path, document))
    widths = (found.head_dim, found.value_head_dim)
    assert (found.heads, found.kv_heads, *widths, found.dtype, found.causal) == expected


GEMMA_3 = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512}
TYPES = ["sliding_attention", "full_attention", "linear_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window": None}, (Layers(12),)),
        ({"sliding_window": 4096}, (Layers(12, window=4096),)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (Layers(12),)),
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 8},
            (Layers(4, window=4096), Layers(8)),
        ),
        ({"sliding_window": 64, "layer_types": TYPES}, (Layers(2, window=64), Layers(1))),
        ({"attention_chunk_size": 8192}, (Layers(9, chunk=8192), Layers(3))),
        (
            {"model_type": "gemma2", "sliding_window": 4096, "attn_logit_softcapping": 50.0},
            (Layers(6, window=4096, softcap=True), Layers(6, softcap=True)),
        ),
        (
            {"model_type": "gpt_oss", "sliding_window": 128},
            (Layers(6, window=128, sinks=True), Layers(6, sinks=True)),
        ),
        (GEMMA_3, (Layers(22, window=512), Layers(4))),
        ({**GEMMA_3, "sliding_window_pattern": 2}, (Layers(13, window=512), Layers(13))),
    ],
)
def test_kinds_of_layers(tmp_path: Path, changes: dict[str, Any], kinds: tuple[Layers, ...]) -> None:
    found = read_hf_config(write(tmp_path, {**LLAMA, "num_hidden_layers": 12, **changes}))
    assert found.kinds == kinds


def test_latent_keys_of_a_config(tmp_path: Path) -> None:
    document = {
        **LLAMA,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
    }
    found = read_hf_config(write(tmp_path, document))
    (problem,) = model_problems(found, DECODE)
    assert (problem.head_dim, problem.value_head_dim, problem.kv_heads) == (576, 512, 1)


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ({**LLAMA, "layer_types": ["mamba"] * 3}, "none of them attends"),
        ({**LLAMA, "layer_types": "full_attention"}, "layer_types"),
        ({**LLAMA, "sliding_window": -1}, "sliding_window"),
        ({**LLAMA, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({**LLAMA, "kv_lora_rank": 1024, "qk_rope_head_dim": 64}, "at most 1024"),
        ([], "Expected `object`"),
        ({}, "num_attention_heads"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"num_attention_heads": 10**30}, "cannot be used"),
        ({"num_attention_heads": 3, "hidden_size": 100}, "head_dim"),
        ({"num_attention_heads": 3}, "head_dim"),
        ({**LLAMA, "torch_dtype": "float8_e4m3"}, "flashtune takes"),
        ({**LLAMA, "torch_dtype": "x" * 5000}, "torch_dtype"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_a_hostile_config_gets_a_sentence(tmp_path: Path, document: Any, part: str) -> None:
    with pytest.raises(UsageError, match=part) as raised:
        read_hf_config(write(tmp_path, document))
    assert "config.json" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_config_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"text_config":' * 50_000, encoding="utf-8")
    with pytest.raises(UsageError):
        read_hf_config(path)
    path.write_text('{"x":' + "[" * 100_000, encoding="utf-8")
    with pytest.raises(UsageError):
        read_hf_config(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


field_names = st.sampled_from(
    [
        *LLAMA,
        "head_dim",
        "n_head",
        "text_config",
        "v_head_dim",
        "sliding_window",
        "layer_types",
        "kv_lora_rank",
    ]
)


@given(document=st.dictionaries(field_names, json_values))
def test_any_config_is_a_model_or_one_sentence(
    document: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("hf"), document)
    try:
        model = read_hf_config(path)
        model_problems(model, ModelSizes(seqlen="128"))
    except UsageError:
        return
