"""Tests of exported files on a GPU, with descriptors that need scratch memory."""

import importlib.util
from pathlib import Path

import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.target import device_target
from flashtune.templates.registry import find_family
from flashtune.tuner.tables.table_files import kernel_files
from tests.support.records import make_record

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("family_name", "change", "is_causal"),
    [
        ("forward_q_outer", "", True),
        ("forward_q_outer", "loads=descriptor", True),
        ("forward_kv_outer", "", True),
        ("forward_hopper", "", True),
        ("forward_hopper", "order=lpt,head_swizzle=0", True),
        ("forward_hopper", "head_swizzle=1", False),
    ],
)
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_an_exported_file_computes_attention(
    kv_heads: int, family_name: str, change: str, is_causal: bool, tmp_path: Path
) -> None:
    target = device_target(0)
    if change and not target.has_descriptors:
        pytest.skip("this GPU takes no tensor descriptors")
    shape = f"heads=8,kv_heads={kv_heads},seqlen=1000,head_dim=128,dtype=bf16,batch=2"
    problem = testing.problem(f"{shape},causal" if is_causal else shape)
    family = find_family(family_name)
    reason = family.supports(problem, target)
    if reason:
        pytest.skip(reason)
    specialization = Specialization(lse=True)
    record = make_record(
        problem, family=family_name, config=change, target=target.name, specialization=specialization
    )
    (file,) = kernel_files((record,))
    path = tmp_path / file.name
    path.write_text(file.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    q = torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, kv_heads, 1000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = module.attention(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=is_causal, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert lse.isfinite().all()
