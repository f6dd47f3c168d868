"""Builds bundles of the kernels that dispatch chooses for calls."""

import functools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from pebble import ProcessExpired

from flashtune.bundle.bundle_file import Bundle, open_bundle, with_both
from flashtune.bundle.records import Entry, Receipt
from flashtune.core.errors import BundleError, FlashtuneError, MachineError
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.machine import ptxas_version, triton_version
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.db.machine_receipts import load_receipts
from flashtune.db.table import TunedTable
from flashtune.dispatch.lookup import BUNDLED_EXTENTS, select
from flashtune.dispatch.tables import Tables
from flashtune.launch.binding import compile_binary
from flashtune.launch.bundle_entries import entry_of, tail_entry
from flashtune.launch.bundles import recipe_of
from flashtune.launch.compilation import first_line
from flashtune.launch.kernel_cache import kernel_of
from flashtune.tuner.execution.compile_pool import COMPILE_SECONDS
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.processes import Workers
from flashtune.tuner.tables.warm import Call, Watch, calls_of
from flashtune.tuner.workloads.shapes import parse_shape

# Shapes of the kernels that untuned problems take: head dims, types and single features.
HEAD_DIMS = "head_dim=32|64|80|96|128|160|192|256"
EXTENTS = ",".join(f"{name}={extent}" for name, extent in BUNDLED_EXTENTS.items())
PREFILL = f"{EXTENTS},{HEAD_DIMS},causal=none|bottom_right"
DECODE = f"heads=32,kv_heads=8,batch=16,seqlen_q=1,seqlen_kv=4096,{HEAD_DIMS},dtype=bf16|fp16|fp32"
# Values of features for a prefill or gradients, and for decoding.
PREFILL_FEATURES = (
    "", "window=1023", "softcap", "alibi", "bias=additive", "bias=boolean", "sinks", "prefix", "chunk=512",
    "block_mask=128", "packed=8192", "kv_lengths", "dropout", "deterministic",
    "block_mask=128,block_lists=group",
)  # fmt: skip
DECODE_FEATURES = ("", "page_size=16", "page_size=64", "page_size=256", "kv_lengths")
# Random shapes of each head dim. The configs of untuned shapes depend on lengths and on the numbers of heads.
SEED, PLAIN_SHAPES, FEATURE_SHAPES = 43, 40, 4
# More random shapes of a forward pass with a feature: its configs differ most. Without a log-sum-exp.
FORWARD_SHAPES = 24
# Random shapes of few queries over many keys, with splits. The numbers of splits depend on tiles and keys.
COMMON_DIMS, OTHER_DIMS = "head_dim=64|128|256", "head_dim=32|80|96|160|192"
SPLITS = (
    (f"{COMMON_DIMS},dtype=bf16|fp16", 160),
    (f"{OTHER_DIMS},dtype=bf16", 100),
    ("head_dim=64|128,dtype=fp32", 80),
    ("head_dim=128,dtype=bf16,page_size=16", 80),
)
SPLIT_HEADS = ((8, 1), (32, 8), (64, 8), (32, 32), (16, 2), (28, 4), (40, 8), (8, 8), (16, 16), (32, 4))
# Decoding, chunks and prompts of batch-invariant kernels.
DECODED, CHUNKED = "seqlen_q=1|32,seqlen_kv=1024|4096|65536", "seqlen_q=100|512,seqlen_kv=2048|16384"
PROMPTS = "seqlen=2048|8192"
INVARIANT = (
    *((f"{COMMON_DIMS},dtype=bf16|fp16", "8|16|32|64", lengths) for lengths in (DECODED, CHUNKED, PROMPTS)),
    (f"{OTHER_DIMS},dtype=bf16", "32", DECODED),
    (f"{OTHER_DIMS},dtype=bf16", "32", "seqlen=4096"),
    ("head_dim=64|128,dtype=bf16,page_size=16,packed=1024", "8|32|64", DECODED),
    ("head_dim=128,dtype=bf16,kv_lengths", "8|32|64", DECODED),
)
# Types of outputs of packed calls.
CLEARED = (torch.bfloat16, torch.float16, torch.float32)
UNALIGNED = Specialization(Alignment.ANY)


class Choice(NamedTuple):
    """The kernel that dispatch chooses for a call."""

    problem: Problem
    record: Record
    specialization: Specialization


class Built(NamedTuple):
    """The entries and the machine code of a bundle, and a sentence for each call without a kernel."""

    entries: list[Entry]
    codes: dict[str, bytes]
    left_out: tuple[str, ...]


def table_calls(table: TunedTable) -> Iterator[Call]:
    """Yields the problems of a table's kernels, with and without a log-sum-exp."""
    for record in table.records:
        if record.config is not None:
            for lse in (False, True):
                yield record.problem, msgspec.structs.replace(record.specialization, lse=lse)


def coverage_calls() -> Iterator[Call]:
    """Yields calls of untuned shapes: head dims, types and single features, both passes.

    There are also few queries over many keys, of which kernels split the keys, and batch-invariant calls.
    Tensors are aligned and unaligned. Those of random shapes, and float32 tensors with a feature, are only
    aligned. With a feature, no gradient of a log-sum-exp is taken.
    """
    prefill = [f"{PREFILL},dtype={dtype}" for dtype in ("bf16", "fp16", "fp32")]
    shapes = [(text, feature) for text in prefill for feature in PREFILL_FEATURES]
    shapes += [(f"{text},backward", feature) for text, feature in shapes]
    shapes += [(DECODE, feature) for feature in DECODE_FEATURES]
    yield from _calls(shapes)
    yield from _calls(
        ((text, feature) for text, feature in shapes if not feature or "fp32" not in text), UNALIGNED
    )
    drawn = random.Random(SEED)  # noqa: S311 - shapes are no secrets
    for feature in PREFILL_FEATURES:
        dtypes = "bf16" if feature else "bf16|fp16"
        for _ in range(FEATURE_SHAPES if feature else PLAIN_SHAPES):
            text = f"{_drawn(drawn)},{HEAD_DIMS},causal=none|bottom_right,dtype={dtypes}"
            yield from _calls([(text, feature), (f"{text},backward", feature)])
    for feature in PREFILL_FEATURES[1:]:
        for _ in range(FORWARD_SHAPES):
            text = f"{_drawn(drawn)},{HEAD_DIMS},causal=none|bottom_right,dtype=bf16"
            yield from calls_of(parse_shape(f"{text},{feature}"))
    yield from _split_calls(drawn)
    for rest, heads, lengths in INVARIANT:
        text = f"heads={heads},kv_heads=8,batch=1|16,{lengths},causal=bottom_right"
        yield from calls_of(parse_shape(f"{text},{rest},batch_invariant"))


def _split_calls(drawn: random.Random) -> Iterator[Call]:
    """Yields calls of few queries over many keys, aligned and without a log-sum-exp."""
    for rest, count in SPLITS:
        for _ in range(count):
            heads, kv_heads = drawn.choice(SPLIT_HEADS)
            queries, keys = round(2 ** drawn.uniform(4.1, 9)), round(2 ** drawn.uniform(11, 17))
            text = f"heads={heads},kv_heads={kv_heads},batch={drawn.choice((1, 1, 1, 2, 4, 8))}"
            text = f"{text},seqlen_q={queries},seqlen_kv={keys},causal=bottom_right"
            yield from calls_of(parse_shape(f"{text},{rest}"))


def _calls(shapes: Iterable[tuple[str, str]], assumed: Specialization | None = None) -> Iterator[Call]:
    """Yields the calls of shapes and features, with and without a log-sum-exp."""
    for text, feature in shapes:
        for problem, specialization in calls_of(parse_shape(f"{text},{feature}")):
            for lse in (False,) if feature and problem.is_backward else (False, True):
                yield problem, msgspec.structs.replace(assumed or specialization, lse=lse)


def _drawn(drawn: random.Random) -> str:
    """Returns a random shape without its head dim, type and features."""
    heads, group = drawn.choice((4, 8, 12, 16, 24, 32, 40, 64)), drawn.choice((1, 1, 2, 4))
    length, batch = round(2 ** drawn.uniform(7, 14)), drawn.choice((1, 1, 2, 4, 8, 16))
    return f"heads={heads},kv_heads={heads // group},batch={batch},seqlen={length}"


def build(
    calls: Iterable[Call],
    target: Target,
    tables: Tables,
    base: Path | None = None,
    watch: Watch = lambda phase, done, total: None,
) -> Built:
    """Returns the kernels that dispatch chooses for calls, compiled on all cores.

    Args:
        calls: The calls.
        target: The GPU.
        tables: The tables of dispatch.
        base: The file of a bundle. Its kernels of the installed compiler are taken as they are.
        watch: Called with the progress of compilation.

    Raises:
        BundleError: The GPU is not NVIDIA's, or the base is damaged.
    """
    if not target.is_nvidia:
        raise BundleError(
            f"bundles hold code of NVIDIA's GPUs, and {target.name} is none: name another target"
        )
    chosen, left_out = choices(calls, target, tables)
    entries: dict[str, Entry] = {}
    codes: dict[str, bytes] = {}
    workers = Workers(max(1, min(len(chosen), available_cpus())))
    try:
        jobs = {
            recipe: workers.schedule(
                compile_entry, (choice.record, choice.specialization, target, base), COMPILE_SECONDS
            )
            for recipe, choice in chosen.items()
        }
        for done, (recipe, job) in enumerate(jobs.items()):
            watch("compiling", done, len(jobs))
            try:
                entry, its_codes = job.result()
            except MachineError:
                raise
            except (FlashtuneError, TimeoutError, ProcessExpired) as error:
                record = chosen[recipe].record
                left_out.append(f"{record.family} for {record.problem.key}: {first_line(error)}")
                continue
            entry = msgspec.structs.replace(entry, recipes=(recipe,))
            # Of a kernel that was compiled twice, the first code serves all recipes.
            entries[entry.kernel] = with_both(entries.get(entry.kernel, entry), entry)
            codes |= its_codes
        watch("compiling", len(jobs), len(jobs))
    finally:
        workers.stop()
    for dtype in CLEARED if any(choice.record.problem.packed for choice in chosen.values()) else ():
        entry, its_codes = tail_entry(dtype, target, ptxas_version())
        entries[entry.kernel] = entry
        codes |= its_codes
    by_machine = load_receipts(target.name)
    proven = (_with_receipt(entry, by_machine.get(entry.machine)) for entry in entries.values())
    return Built([*proven], codes, tuple(dict.fromkeys(left_out)))


def choices(
    calls: Iterable[Call],
    target: Target,
    tables: Tables,
    watch: Watch = lambda phase, done, total: None,
) -> tuple[dict[str, Choice], list[str]]:
    """Returns the kernels that dispatch chooses for calls by their recipes, and why other calls have none."""

    @functools.cache
    def chosen(problem: Problem, assumed: Specialization) -> Record | str:
        try:
            return select(problem, target, tables, assumed, generated=True).record
        except MachineError:
            raise
        except FlashtuneError as error:
            return str(error)

    found: dict[str, Choice] = {}
    left_out: list[str] = []
    distinct = dict.fromkeys(calls)
    for number, (problem, specialization) in enumerate(distinct):
        watch("choosing kernels", number, len(distinct))
        # The log-sum-exp does not change the choice.
        record = chosen(problem, msgspec.structs.replace(specialization, lse=False))
        if isinstance(record, str):
            left_out.append(record)
        else:
            found.setdefault(recipe_of(record, specialization), Choice(problem, record, specialization))
    return found, left_out


def compile_entry(
    record: Record,
    specialization: Specialization,
    target: Target,
    base: Path | None = None,
) -> tuple[Entry, dict[str, bytes]]:
    """Returns the entry of a record's kernel and its machine code, of a base or compiled in this process."""
    kernel = kernel_of(record, specialization)
    bundle = _opened(base) if base else None
    entry = bundle and bundle.entry(kernel.digest)
    if bundle and entry and (entry.triton, entry.ptxas) == (triton_version(), ptxas_version()):
        return entry, {stage.code: bundle.code(stage.code) for stage in entry.stages}
    return entry_of(kernel, record.problem, compile_binary(kernel, target), ptxas_version())


@functools.cache
def _opened(path: Path) -> Bundle:
    return open_bundle(path)


def _with_receipt(entry: Entry, receipt: Receipt | None) -> Entry:
    return entry if receipt is None else with_both(entry, msgspec.structs.replace(entry, receipts=(receipt,)))


class Listed(msgspec.Struct, frozen=True):
    """An entry of a bundle, for a list."""

    kernel: str
    family: str
    functions: tuple[str, ...]
    machine: str  # Digest of the machine code.
    code_bytes: int  # Machine code, not compressed. Other entries may share it.
    recipes: int
    verified: tuple[str, ...]  # The GPUs with a receipt.
    triton: str
    ptxas: str


def listed(bundle: Bundle) -> list[Listed]:
    """Returns the entries of a bundle by family and digest, after a check of the whole file."""
    bundle.check_all()
    rows = []
    for entry in bundle.entries():
        sizes = [bundle.index.codes[stage.code].size for stage in entry.stages]
        functions = tuple(stage.function for stage in entry.stages)
        row = Listed(
            entry.kernel, entry.family, functions, entry.machine, sum(sizes), len(entry.recipes),
            tuple(sorted(entry.verified_on)), entry.triton, entry.ptxas,
        )  # fmt: skip
        rows.append(row)
    return sorted(rows, key=lambda row: (row.family, row.kernel))
