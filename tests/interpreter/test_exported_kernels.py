"""Tests of exported files in a new process with only torch and triton, and of arguments that they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Direction
from flashtune.core.target import find_target
from flashtune.launch.compilation import load_module
from flashtune.templates.registry import families
from flashtune.tuner.tables.table_files import kernel_files
from tests.support.golden_kernels import kernel_of
from tests.support.records import make_record

# Computes the attention of each file in the interpreter, of float32 tensors. Files of 16-bit kernels refuse
# the tensors that they were made for.
PROGRAM = """
import importlib.util, sys
import torch

class Forbidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("flashtune", "jinja2", "msgspec"):
            raise ImportError(name)

sys.meta_path.insert(0, Forbidden())
message = "q has dtype torch.bfloat16, expected float32: TRITON_INTERPRET corrupts 16-bit products"

def call(module, q, k, v, out, lse, dout):
    if hasattr(module, "attention"):
        return module.attention(q, k, v)
    return module.attention_backward(q, k, v, out, lse, dout)

for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("exported", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    rows = 8 if "decode" in path else 48
    shapes = (2, 4, rows, 64), (2, 2, 48, 64), (2, 2, 48, 64)
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    scores = q @ k.repeat_interleave(2, 1).mT / 8
    scores = scores.masked_fill(torch.ones(rows, 48).triu(49 - rows).bool(), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    tensors = [tensor.detach() for tensor in (q, k, v, out, scores.logsumexp(-1), dout)]
    if hasattr(module, "attention"):
        expected = tensors[3:5]
    for result, reference in zip(call(module, *tensors), expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4)
    try:
        call(module, *(tensor.bfloat16() for tensor in tensors))
    except ValueError as error:
        assert str(error) == message, error
    else:
        raise AssertionError(path)
    print(path)
"""
SHAPE = "heads=4,kv_heads=2,seqlen=48,head_dim=64,causal,batch=2,dtype=bf16"
# Of families that do not compute plain attention, or not of as many queries.
CHANGES = {"decode_split_kv": {"seqlen_q": 8}, "forward_masked": {"window_left": 64}}


@pytest.mark.tritons
def test_exported_files_compute_attention_without_flashtune(tmp_path: Path) -> None:
    paths = []
    for family in families():
        if not family.interpreted:
            continue
        changes = {"direction": family.direction, **CHANGES.get(family.name, {})}
        problem = testing.problem(SHAPE, **changes)
        assert family.supports(problem, find_target("h200")) is None
        sides = "block_n=32,num_warps=4"
        specialization = Specialization(lse=family.direction is Direction.FORWARD)
        record = make_record(problem, family=family.name, config=sides, specialization=specialization)
        (file,) = kernel_files((record,))
        path = tmp_path / f"{family.name}.py"
        path.write_text(file.text, encoding="utf-8")
        paths.append(str(path))
    command = [sys.executable, "-c", PROGRAM, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == paths


def test_a_kernel_of_quantized_keys_is_refused() -> None:
    """It multiplies in fp16 whatever its queries are."""
    module = load_module(kernel_of("decode_bf16_d128_e4m3"))
    q, k = torch.zeros(2, 4, 8, 128), torch.zeros(2, 2, 48, 128, dtype=torch.float8_e4m3fn)
    scales = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^TRITON_INTERPRET is set, and Triton's interpreter corrupts"):
        module.attention(q, k, k, k_scale=scales, v_scale=scales)


def test_inputs_that_are_no_tensors_are_named() -> None:
    module = load_module(kernel_of("masked_bf16_d64_window_sinks"))
    q = torch.zeros(2, 4, 8, 64)
    sinks = torch.zeros(4)
    with pytest.raises(TypeError, match=r"^k is a list, expected a tensor$"):
        module.attention(q, [1.0], q, sinks=sinks)
    with pytest.raises(TypeError, match=r"^sinks is a list, expected a tensor$"):
        module.attention(q, q, q, sinks=[0.0] * 4)
