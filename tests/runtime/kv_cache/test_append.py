"""Tests that the append kernel compiles for GPUs of other machines."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flashtune.kv_cache.append_kernel import append
from flashtune.kv_cache.layout import Encoding

SM_80, SM_90, GFX942 = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)


def compiled(target: GPUTarget, encoding: Encoding, growing: bool, value_dim: int = 128) -> CompiledKernel:
    constants = {
        "page_size": 16,
        "encoding": encoding.value,
        "growing": growing,
        "tile_rows": 16,
        "head_dim": 128,
        "block_dim": 128,
        "value_dim": value_dim,
        "block_value_dim": max(1, value_dim),
    }
    pool = {Encoding.PLAIN: "*bf16", Encoding.E4M3: "*u8", Encoding.INT8: "*i8"}[encoding]
    kinds = {"k": "*bf16", "v": "*bf16", "keys": pool, "values": pool, "slots": "*i64", "tokens": "i32"}
    kinds |= {"k_scale": "*fp32", "v_scale": "*fp32"}
    names = append.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i64") for name in names}
    scattered = {"tokens", "stride_k_scale_p", "stride_k_scale_h", "stride_v_scale_p", "stride_v_scale_h"}
    aligned = [name for name in names if name not in constants and name not in scattered]
    source = ASTSource(
        append,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    binary: CompiledKernel = triton.compile(source, target=target, options={"enable_fp_fusion": True})
    return binary


@pytest.mark.slow
@pytest.mark.parametrize("target", [SM_80, SM_90, GFX942], ids=lambda target: str(target.arch))
@pytest.mark.parametrize(
    ("encoding", "growing"),
    [
        (Encoding.PLAIN, False),
        (Encoding.E4M3, False),
        (Encoding.E4M3, True),
        (Encoding.INT8, False),
        (Encoding.INT8, True),
    ],
)
def test_append_kernel_compiles_for_every_gpu(target: GPUTarget, encoding: Encoding, growing: bool) -> None:
    binary = compiled(target, encoding, growing)
    assert binary.metadata.shared <= 1024
    if target.backend == "cuda":
        ptx = binary.asm["ptx"]
        assert "ld.global.v4" in ptx, "a thread reads 16 bytes at once"
        assert ".local" not in ptx


def test_kernel_without_values_loads_only_keys() -> None:
    both, keys = (compiled(SM_90, Encoding.PLAIN, False, width).asm["ptx"] for width in (128, 0))
    assert both.count("ld.global.v4") == 2 * keys.count("ld.global.v4") > 0
