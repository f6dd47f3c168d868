"""Tests of reading models from `config.json`: model types, kinds of layers, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.errors import UsageError
from flashtune.core.problem import Dtype
from flashtune.tuner.workloads.hf_config import read_hf_config
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import Layers, model_problems

DECODE = ModelSizes(Phase.DECODE)


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
def test_configs_of_many_model_types(tmp_path: Path, document: Any, expected: tuple[Any, ...]) -> None:
    model = read_hf_config(write(tmp_path, document))
    widths = (model.head_dim, model.value_head_dim)
    assert (model.heads, model.kv_heads, *widths, model.dtype, model.causal) == expected


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
    model = read_hf_config(write(tmp_path, {**LLAMA, "num_hidden_layers": 12, **changes}))
    assert model.kinds == kinds


def test_mla_of_a_config(tmp_path: Path) -> None:
    document = {
        **LLAMA,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
    }
    model = read_hf_config(write(tmp_path, document))
    (problem,) = model_problems(model, DECODE)
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
def test_malformed_config_raises_one_sentence(tmp_path: Path, document: Any, part: str) -> None:
    with pytest.raises(UsageError, match=part) as raised:
        read_hf_config(write(tmp_path, document))
    assert "config.json" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_deeply_nested_config_is_refused(tmp_path: Path) -> None:
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


@pytest.mark.slow
@given(document=st.dictionaries(field_names, json_values))
def test_any_config_is_read_or_refused_in_one_sentence(
    document: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("hf"), document)
    try:
        model = read_hf_config(path)
        model_problems(model, ModelSizes(seqlen="128"))
    except UsageError:
        return
