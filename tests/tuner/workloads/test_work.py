"""Tests of the operations and bytes of problems, and of the rates that searches print."""

import msgspec
import pytest

from flashtune.core.problem import KvDtype, Problem
from flashtune.core.record import Provenance
from flashtune.tuner.search.summary import describe_time
from flashtune.tuner.workloads.models import backward_of
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.tuner.workloads.work import Unit, kv_bytes, operations, unit_of
from flashtune.verification.lengths import usual_lengths
from tests.support.records import DIGEST, make_record
from tests.tuner.bench.bench_problems import PACKED, PAGES, a_problem


def test_operations_and_bytes_count_the_lengths_of_sequences() -> None:
    packed = a_problem(**PACKED)
    lengths = usual_lengths(packed)
    pairs = sum(count * (count + 1) // 2 for count in lengths.queries)
    assert operations(packed) == pytest.approx(4 * 16 * 4 * pairs, rel=0.02)
    chunk = a_problem(seqlen_q=32, **PAGES)
    seen = sum(32 * keys - 32 * 31 // 2 for keys in usual_lengths(chunk).keys)
    assert operations(chunk) == 4 * 16 * 4 * seen
    cache = a_problem(seqlen_q=1, kv_lengths=True)
    keys = sum(usual_lengths(cache).keys)
    assert keys < 2 * 90
    assert kv_bytes(cache) == keys * 2 * 2 * 16 * 2
    plain = a_problem(seqlen_q=1)
    assert kv_bytes(plain) == 2 * 90 * 2 * 2 * 16 * 2
    assert operations(plain) == plain.nominal_flops()


def test_bytes_of_a_cache_count_once_for_each_kv_head() -> None:
    (cache,) = parse_shape("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,dtype=bf16")
    assert kv_bytes(cache) == 2 * 8 * 8192 * 128 * 2
    latent = msgspec.structs.replace(cache, kv_heads=1, head_dim=576, value_head_dim=512, mla=True)
    assert kv_bytes(latent) == 8192 * 576 * 2
    windowed = msgspec.structs.replace(cache, window_left=1023, kv_dtype=KvDtype.INT8)
    assert kv_bytes(windowed) == 2 * 8 * 1024 * 128


def test_speed_of_gradients_of_one_query_is_in_operations() -> None:
    assert unit_of(backward_of(a_problem(seqlen_q=1))) is Unit.TFLOPS


def describe(problem: Problem, ms: float) -> str:
    return describe_time(make_record(problem, ms, provenance=Provenance.PREDICTED, kernel=DIGEST))


def test_rate_of_packed_sequences_is_that_of_their_usual_lengths() -> None:
    (packed,) = parse_shape("heads=32,kv_heads=8,seqlen=8192,head_dim=128,causal,batch=24,packed=32768")
    pairs = sum(count * (count + 1) // 2 for count in usual_lengths(packed).queries)
    tflops = 4 * 32 * 128 * pairs / 1e12
    assert describe(packed, 1000.0).endswith(f", {tflops:.0f} TFLOP/s")
    # The longest length of every sequence would be far more work.
    assert operations(packed) < packed.nominal_flops() / 2


def test_rate_of_decoding_is_in_bytes_of_keys_and_values() -> None:
    (decoding,) = parse_shape("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16")
    assert describe(decoding, 1.0).endswith(f", {2 * 16 * 8 * 8192 * 128 * 2 / 1e6:.0f} GB/s")
