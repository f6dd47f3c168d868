from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.errors import UsageError
from flashtune.problem import Causal, Dtype
from flashtune.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner.hf_config import read_hf_config
from flashtune.tuner.models import MODELS, ModelAttention, find_model, prefill


def test_the_table_has_many_models_each_once_with_its_source() -> None:
    assert len(MODELS) >= 25
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert all(model.source for model in MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_is_a_problem_that_a_family_computes(model: ModelAttention) -> None:
    (problem,) = prefill(model, seqlen="2048", batch="1", dtype=None)
    assert problem.dtype is model.dtype
    assert find_family("forward_q_outer").supports(problem, find_target("h200")) is None


def test_prefill_of_a_named_model() -> None:
    found = prefill(find_model("Llama-3.1-8B"), seqlen="1024..4096", batch="1|2", dtype="fp16")
    assert len(found) == 6
    assert {(problem.heads, problem.kv_heads, problem.head_dim) for problem in found} == {(32, 8, 128)}
    assert all(problem.causal is Causal.BOTTOM_RIGHT and problem.dtype is Dtype.FP16 for problem in found)


def test_an_encoder_sees_all_keys() -> None:
    (problem,) = prefill(find_model("bert-base"), seqlen="512", batch="8", dtype=None)
    assert problem.causal is Causal.NONE


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


@pytest.mark.parametrize(
    ("document", "part"),
    [
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


field_names = st.sampled_from([*LLAMA, "head_dim", "n_head", "text_config", "v_head_dim"])


@given(document=st.dictionaries(field_names, json_values))
def test_any_config_is_a_model_or_one_sentence(
    document: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("hf"), document)
    try:
        model = read_hf_config(path)
        prefill(model, seqlen="128", batch="1", dtype=None)
    except UsageError:
        return
