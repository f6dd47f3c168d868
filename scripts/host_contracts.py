"""Compares the parts of other libraries that flashtune's integrations rely on with those of another version.

    python -m scripts.host_contracts vllm WHEEL          # or a folder with the package `vllm`
    python -m scripts.host_contracts vllm WHEEL --write  # freezes this version's parts
    python -m scripts.host_contracts --newest            # downloads the newest wheels of all libraries by pip

It prints one line for each difference and fails if there is one. Sources are parsed, never imported. The
frozen parts are `tests/data/contracts/LIBRARY.json`: signatures without annotations, abstract methods, values
of constants and of enum members, and annotations of fields. For functions with closures that flashtune reads,
they are the source. For callers, they are the keywords of attention and mask functions, or the operators of
torch. Of torch, they are also the arguments of all operators of attention.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FROZEN = Path(__file__).resolve().parent.parent / "tests/data/contracts"
ABSTRACT = "abstract methods"
BASES = "bases"
# The text of a function and of its inner function.
SOURCE = "source"
# The keywords of calls in a function or class, by which transformers calls flashtune's functions.
TO_ATTENTION = "keywords of attention_interface"
TO_MASK = "keywords of mask_interface"
CALLED = {"attention_interface": TO_ATTENTION, "mask_interface": TO_MASK}
# The operators that a function calls.
OPERATORS = "operators of aten"
# The file of torch's wheels with the schemas of operators, and those of attention.
SCHEMAS = "torchgen/packaged/ATen/native/native_functions.yaml"
SCHEMA = re.compile(r"^- func: (_\w*_attention_\w+|_scaled_dot_product_\w+)\((.*?)\) -> ", re.MULTILINE)
# The operators that GPUs of NVIDIA have, of which arguments are frozen too.
OF_GPUS = re.compile(r"_(scaled_dot_product_)?(flash|cudnn|efficient)_attention(?!_for_cpu)")
# Classes that flashtune's extend: a new abstract method breaks these.
EXTENDED = ("AttentionBackend", "AttentionImpl", "AttentionImplBase", "AttentionMetadataBuilder")
# Other base classes are the library's own matter.
KNOWN_BASES = ("AttentionImplBase", "Enum", "GeneralInterface", "IntEnum", "str")
# What older versions that flashtune takes lack, and the first version that has it.
ADDED = {
    "transformers.masking_utils.remap_positions_for_packed_sequence": (5, 23),
    "aten._cudnn_attention_forward: Tensor? block_table=None": (2, 14),
    "aten._cudnn_attention_forward: Tensor? seqused_k=None": (2, 14),
    **dict.fromkeys(
        (
            f"{place}_cudnn_attention_forward_no_dropout_inplace"
            for place in (
                "aten.",
                "aten.names: ",
                f"torch.nn.attention.varlen._varlen_attn_out.{OPERATORS}: ",
            )
        ),
        (2, 15),
    ),
}
# Optional parameters that only some versions have, and that flashtune does not pass.
IGNORED = {"sdpa_attention_forward": "cache", "sdpa_mask": "allow_torch_fix"}

Contract = dict[str, Any]

# The names of each module, and the parts of classes and of some functions. Others have their signature.
RELIED: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "vllm": {
        "vllm.plugins": {"DEFAULT_PLUGINS_GROUP": ()},
        "vllm.v1.attention.backend": {
            "AttentionType": ("DECODER", "ENCODER", "ENCODER_ONLY", "ENCODER_DECODER"),
            "AttentionBackend": (
                "supported_dtypes",
                "supported_kv_cache_dtypes",
                "forward_includes_kv_cache_update",
                "supports_kv_cache_update_bypass",
                "get_name",
                "get_impl_cls",
                "get_builder_cls",
                "get_supported_kernel_block_sizes",
                "supports_head_size",
                "supports_sink",
                "supports_alibi_sqrt",
                "supports_mm_prefix",
                "supports_sliding_window",
                "supports_per_head_quant_scales",
                "supports_rswa",
                "supports_non_causal",
                "supports_batch_invariance",
                "supports_attn_type",
                "supports_compute_capability",
                "supports_combination",
                "supported_kv_cache_layouts",
                "validate_configuration",
            ),
            "AttentionMetadata": (),
            "CommonAttentionMetadata": (
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "num_reqs",
                "num_actual_tokens",
                "max_query_len",
                "max_seq_len",
                "block_table_tensor",
                "slot_mapping",
                "causal",
                "seq_lens_cpu_upper_bound",
                "is_prefilling",
            ),
            "AttentionCGSupport": ("ALWAYS",),
            "AttentionMetadataBuilder": (
                "_cudagraph_support",
                "reorder_batch_threshold",
                "supports_update_block_table",
                "supports_draft_decode_metadata_update",
                "__init__",
                "build",
                "build_for_cudagraph_capture",
                "build_for_drafting",
                "update_block_table",
                "update_draft_decode_metadata",
            ),
            "AttentionLayer": ("_k_scale", "_v_scale"),
            "AttentionImplBase": ("process_weights_after_loading", "supports_quant_query_input"),
            "AttentionImpl": ("__init__", "forward", "fused_output_quant_supported"),
        },
        "vllm.v1.attention.backends.registry": {"register_backend": (), "AttentionBackendEnum": ()},
        # Methods and arguments that the base classes do not declare.
        "vllm.v1.attention.backends.flash_attn": {"FlashAttentionImpl": ("__init__", "do_kv_cache_update")},
        "vllm.config.compilation": {"CompilationConfig": ("static_forward_context",)},
        "vllm.config.scheduler": {"SchedulerConfig": ("max_num_batched_tokens",)},
        "vllm.model_executor.layers.attention.attention": {"Attention": ("dtype", "impl", "kv_cache")},
        "vllm.v1.kv_cache_layout": {"KVCacheLayout": ("LBHNC", "LBNHC")},
    },
    "sglang": {
        "sglang.srt.plugins": {"GENERAL_PLUGINS_GROUP": ()},
        "sglang.srt.arg_groups.choices": {"add_attention_backend_choices": ()},
        "sglang.srt.layers.attention.attention_registry": {"register_attention_backend": ()},
        "sglang.srt.layers.attention.base_attn_backend": {
            "AttentionBackend": (
                "needs_cpu_seq_lens",
                "forward_metadata",
                "init_forward_metadata",
                "init_forward_metadata_out_graph",
                "init_forward_metadata_in_graph",
                "init_cuda_graph_state",
                "get_cuda_graph_seq_len_fill_value",
                "forward",
                "forward_extend",
                "forward_decode",
            )
        },
        "sglang.srt.layers.radix_attention": {
            "AttentionType": ("DECODER", "DECODER_BIDIRECTIONAL", "ENCODER_ONLY"),
            "RadixAttention": (
                "__init__",
                "tp_q_head_num",
                "qk_head_dim",
                "v_head_dim",
                "scaling",
                "layer_id",
                "logit_cap",
                "logit_capping_method",
                "sliding_window_size",
                "is_cross_attention",
                "use_irope",
                "k_scale",
                "v_scale",
                "attn_type",
                "xai_temperature_len",
            ),
        },
        "sglang.srt.mem_cache.base_swa_memory_pool": {"BaseSWAKVPool": ("translate_loc_from_full_to_swa",)},
        "sglang.srt.mem_cache.memory_pool": {
            "KVWriteLoc": ("for_layer",),
            "MHATokenToKVPool": ("set_kv_buffer", "get_kv_buffer"),
        },
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardMode": ("is_idle", "is_decode", "is_decode_or_idle", "is_extend_without_speculative"),
            "ForwardBatch": (
                "forward_mode",
                "req_pool_indices",
                "seq_lens",
                "out_cache_loc",
                "seq_lens_cpu",
                "extend_seq_lens",
                "extend_seq_lens_cpu",
                "extend_prefix_lens_cpu",
            ),
        },
        "sglang.srt.model_executor.model_runner": {
            "ModelRunner": (
                "attention_chunk_size",
                "dtype",
                "kv_cache_dtype",
                "model_config",
                "page_size",
                "req_to_token_pool",
                "spec_algorithm",
                "token_to_kv_pool",
                "use_mla_backend",
            )
        },
    },
    "transformers": {
        "transformers.modeling_utils": {"AttentionInterface": (BASES,)},
        "transformers.integrations.sdpa_attention": {
            "sdpa_attention_forward": (),
            "create_position_bias_mask": (),
        },
        "transformers.utils.generic": {
            "GeneralInterface": ("register",),
            "TransformersKwargs": (
                "cu_seq_lens_q",
                "cu_seq_lens_k",
                "max_length_q",
                "max_length_k",
                "output_attentions",
            ),
        },
        "transformers.masking_utils": {
            "AttentionMaskInterface": (BASES,),
            "sdpa_mask": (),
            # `transformers_masks.structure_of` reads these functions.
            "causal_mask_function": (SOURCE,),
            "bidirectional_mask_function": (SOURCE,),
            "and_masks": (SOURCE,),
            "sliding_window_overlay": (SOURCE,),
            "sliding_window_bidirectional_overlay": (SOURCE,),
            "packed_sequence_mask_function": (SOURCE,),
            "remap_positions_for_packed_sequence": (SOURCE,),
            # These call `transformers_masks.attention_mask`.
            "create_causal_mask": (TO_MASK,),
            "create_bidirectional_mask": (TO_MASK,),
            "create_sliding_window_causal_mask": (TO_MASK,),
            "create_bidirectional_sliding_window_mask": (TO_MASK,),
            "create_chunked_causal_mask": (TO_MASK,),
        },
        # One model for each argument of attention, and for each setting that masks depend on.
        "transformers.models.gemma2.modeling_gemma2": {
            "Gemma2Attention": (TO_ATTENTION,),
            "eager_attention_forward": (),
        },
        "transformers.models.gpt_oss.modeling_gpt_oss": {
            "GptOssAttention": (TO_ATTENTION,),
            "eager_attention_forward": (),
        },
        "transformers.models.t5.modeling_t5": {"T5Attention": (TO_ATTENTION,)},
        "transformers.models.deepseek_v32.modeling_deepseek_v32": {"DeepseekV32Attention": (TO_ATTENTION,)},
        "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl": {"MiniMaxM3VLAttention": (TO_ATTENTION,)},
        "transformers.models.deepseek_v32.configuration_deepseek_v32": {"DeepseekV32Config": ("index_topk",)},
        "transformers.models.gemma4.configuration_gemma4": {"Gemma4TextConfig": ("num_kv_shared_layers",)},
    },
    "torch": {
        # `flashtune.integrations.torch` overrides these operators.
        "torch.nn.attention.varlen": {
            "_varlen_attn": (OPERATORS,),
            "_varlen_attn_out": (OPERATORS,),
            "_varlen_attn_backward": (OPERATORS,),
        },
        "torch.nn.attention": {"register_flash_attention_impl": (), "current_flash_attention_impl": ()},
        "torch.nn.attention.flex_attention": {"_Backend": ()},
    },
}


def contract_of(library: str, path: Path) -> Contract:
    """Returns the relied parts of a wheel, or of a folder that contains the package, without absent ones."""
    root = zipfile.Path(path) if path.is_file() else path
    modules = {}
    for module, names in RELIED[library].items():
        file = root / f"{module.replace('.', '/')}.py"
        if not file.is_file():
            file = root / f"{module.replace('.', '/')}/__init__.py"
        if file.is_file():
            parts = dict(_parts(ast.parse(file.read_text(encoding="utf-8")), names))
            modules[module] = {
                name: _chosen(name, parts[name], names[name]) for name in sorted(names) if name in parts
            }
    schemas = root / SCHEMAS
    if library == "torch" and schemas.is_file():
        found = dict(SCHEMA.findall(schemas.read_text(encoding="utf-8")))
        arguments = {name: text.split(", ") for name, text in found.items() if OF_GPUS.match(name)}
        modules["aten"] = {"names": sorted(found), **arguments}
    infos = [each.name for each in root.iterdir() if each.name.endswith(".dist-info")]
    versions = [info.split("-")[1] for info in infos if info.split("-")[0] == library]
    return {"version": versions[0].removesuffix(".dist"), "modules": modules}


def differences(frozen: Contract, found: Contract) -> list[str]:
    """Returns one sentence for each part that is gone or differs.

    New abstract methods and new keywords have one too. Older versions may lack what was `ADDED` later.
    """
    version = tuple(int(number) for number in re.findall(r"\d+", found["version"]))
    lacking = [f"{name} is gone" for name, first in ADDED.items() if version < first]
    lines = _differences("", frozen["modules"], found["modules"])
    return [line for line in lines if line not in lacking]


def _differences(name: str, frozen: Any, found: Any) -> Iterator[str]:
    if isinstance(frozen, dict) and isinstance(found, dict):
        for key, value in frozen.items():
            inner = f"{name}.{key}" if name else key
            if key in found:
                yield from _differences(inner, value, found[key])
            else:
                yield f"{inner} is gone"
    elif isinstance(frozen, list) and isinstance(found, list):
        for item in sorted({*frozen} ^ {*found}):
            yield f"{name}: {item} is {'new' if item in found else 'gone'}"
    elif frozen != found:
        yield f"{name} was {frozen} and is {found}"


def _chosen(name: str, part: Any, members: tuple[str, ...]) -> Any:
    if not isinstance(part, dict):
        return part
    kept = {member: part[member] for member in sorted(members) if member in part and member != BASES}
    if BASES not in part:
        return kept
    abstract = {ABSTRACT: part[ABSTRACT]} if name in EXTENDED else {}
    return {BASES: [base for base in part[BASES] if base in KNOWN_BASES], **abstract, **kept}


def _parts(module: ast.Module, names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    """Yields functions and constants as text. Classes, and functions with listed parts, are dicts."""
    for node in module.body:
        match node:
            case ast.ClassDef(name=name) if name in names:
                yield name, _class_parts(node)
            case ast.FunctionDef(name=name) if names.get(name):
                yield name, {OPERATORS: _operators(node), SOURCE: _text(node), **_keywords(node)}
            case _:
                yield from _texts(node)


def _keywords(node: ast.AST) -> dict[str, list[str]]:
    """Returns the keywords that are passed to attention and mask functions, if these are called."""
    found: dict[str, set[str]] = {}
    for each in ast.walk(node):
        match each:
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if name in CALLED:
                passed = found.setdefault(CALLED[name], set())
                passed.update(keyword.arg for keyword in keywords if keyword.arg is not None)
    return {member: sorted(passed) for member, passed in found.items()}


def _operators(node: ast.AST) -> list[str]:
    """Returns the names after `torch.ops.aten`."""
    found: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Attribute(attr="aten"), attr=name):
                found.add(name)
    return sorted(found)


def _class_parts(node: ast.ClassDef) -> dict[str, Any]:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    # Attributes that methods set come first, so that declarations of the class replace them.
    parts: dict[str, Any] = {name: "attribute" for method in methods for name in _set_on_self(method)}
    for item in node.body:
        parts.update(_texts(item))
    parts |= _keywords(node)
    parts[BASES] = [ast.unparse(base).partition("[")[0] for base in node.bases]
    parts[ABSTRACT] = sorted(one.name for one in methods if "abstractmethod" in _decorators(one))
    return parts


def _texts(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef):
        kinds = [kind for kind in ("staticmethod", "classmethod", "property") if kind in _decorators(node)]
        parameters = _text(node.args)
        if node.name in IGNORED:
            parameters = re.sub(rf", {IGNORED[node.name]}=\w+", "", parameters)
        yield node.name, " ".join([*kinds, f"({parameters})"])
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, f"= {ast.unparse(node.value)}"
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        value = "" if node.value is None else f" = {ast.unparse(node.value)}"
        yield node.target.id, f": {ast.unparse(node.annotation)}{value}"


def _set_on_self(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def _text(node: ast.arguments | ast.FunctionDef) -> str:
    """Returns parameters, or a whole function, as text without annotations and docstrings."""
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            each.annotation = None
        elif isinstance(each, ast.FunctionDef):
            each.returns = None
            each.body = each.body[ast.get_docstring(each) is not None :]
    return ast.unparse(node)


def newest_wheel(library: str, folder: Path) -> Path:
    """Returns the newest wheel for this machine, downloaded into a folder."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        library,
    ]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob(f"{library}-*.whl")
    return wheel


def compare(library: str, path: Path) -> int:
    """Prints the differences of a version from the frozen one, and returns their number."""
    frozen = json.loads((FROZEN / f"{library}.json").read_text(encoding="utf-8"))
    found = contract_of(library, path)
    lines = differences(frozen, found)
    print(f"{library} {found['version']}: {len(lines)} differences from {frozen['version']}")
    for line in lines:
        print(f"  {line}")
    return len(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compares or freezes, and returns 1 if there is a difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("library", nargs="?", choices=sorted(RELIED))
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--newest", action="store_true")
    given = parser.parse_args(arguments)
    if given.newest:
        count = 0
        for library in [given.library] if given.library else sorted(RELIED):
            with tempfile.TemporaryDirectory() as folder:
                count += compare(library, newest_wheel(library, Path(folder)))
        return int(count > 0)
    if given.library is None or given.path is None:
        parser.error("pass a library and its wheel or folder, or --newest")
    if given.write:
        found = json.dumps(contract_of(given.library, given.path), indent=1)
        (FROZEN / f"{given.library}.json").write_text(found + "\n", encoding="utf-8")
        return 0
    return int(compare(given.library, given.path) > 0)


if __name__ == "__main__":
    sys.exit(main())
