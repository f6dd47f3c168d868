"""Grids of shapes from attention papers, and figures measured elsewhere at these shapes."""

from typing import Annotated

import msgspec

from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype, Problem, feature_words
from flashtune.core.record import ShortText
from flashtune.tuner.bench.results import decode_case
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.tuner.workloads.work import is_decode

MODEL_WIDTH = 2048
TOKENS = 16_384
PAPER_HEAD_DIMS = (64, 128, 256)
CAUSAL = "dtype=bf16,heads=16,head_dim=128,tokens=16384,seqlen=4096|16384,causal"
MASKS = "dtype=bf16,heads=16,head_dim=128,batch=1,seqlen=4096"
GPT_OSS = "dtype=bf16,heads=64,kv_heads=8,head_dim=64,tokens=16384,seqlen=4096|16384,causal,sinks"
GQA = "dtype=bf16,heads=32,kv_heads=8,head_dim=128"
PACKED = f"{GQA},batch=24,seqlen=8192,packed=32768,causal"
CHUNKED = f"{GQA},batch=16,seqlen_q=512,seqlen_kv=8192,causal=bottom_right"
FEW_KV_HEADS = "dtype=bf16,head_dim=128,heads=8,kv_heads=1"
# Each entry is a shape as for --shape. Lengths vary fastest. Lengths of packed and paged sequences are powers
# of two, to which calls round them.
GRIDS: dict[str, tuple[str, ...]] = {
    "paper": tuple(
        f"dtype=bf16,heads={MODEL_WIDTH // width},head_dim={width},causal=none|bottom_right,"
        f"tokens={TOKENS},seqlen=512..16384"
        for width in PAPER_HEAD_DIMS
    ),
    "gqa": (
        "dtype=bf16,heads=64,kv_heads=8,head_dim=128,causal=none|bottom_right,tokens=32768,seqlen=2048..32768",
    ),
    "fp8": (
        "dtype=e4m3,heads=64,kv_heads=8,head_dim=128,causal=none|bottom_right,tokens=32768,seqlen=2048..32768",
    ),
    "backward": tuple(
        f"dtype=bf16,heads={MODEL_WIDTH // width},head_dim={width},causal=none|bottom_right,"
        f"tokens={TOKENS},seqlen=2048|8192,backward"
        for width in PAPER_HEAD_DIMS
    ),
    "decode": (
        "dtype=bf16,heads=32,kv_heads=8,head_dim=128,seqlen_q=1,batch=1,seqlen_kv=8192|65536|131072",
        "dtype=bf16,heads=32,kv_heads=8,head_dim=128,seqlen_q=1,batch=16,seqlen_kv=8192",
        "dtype=bf16,heads=32,kv_heads=8,head_dim=128,seqlen_q=1,batch=64,seqlen_kv=4096",
        "dtype=bf16,heads=64,kv_heads=8,head_dim=128,seqlen_q=1,batch=128,seqlen_kv=4096",
        "dtype=bf16,heads=32,kv_heads=1,head_dim=128,seqlen_q=1,batch=16,seqlen_kv=8192",
        "dtype=bf16,heads=16,kv_heads=16,head_dim=64,seqlen_q=1,batch=64,seqlen_kv=4096",
    ),
    "paged": (
        f"{GQA},seqlen_q=1,batch=1,seqlen_kv=1024|4096|65536,page_size=16",
        f"{GQA},seqlen_q=1,batch=16,seqlen_kv=8192,page_size=16",
        f"{GQA},seqlen_q=1,batch=64,seqlen_kv=4096,page_size=16|64",
        "dtype=bf16,heads=64,kv_heads=8,head_dim=128,seqlen_q=1,batch=128,seqlen_kv=4096,page_size=16",
    ),
    "splits": (
        *(
            f"dtype=bf16,head_dim=128,heads={heads},kv_heads={kv_heads},batch=1,"
            "seqlen_q=17|64|256|512,seqlen_kv=4096|32768|131072"
            for heads, kv_heads in ((8, 1), (32, 8), (64, 8))
        ),
        f"{FEW_KV_HEADS},batch=8,seqlen_q=17|64,seqlen_kv=16384",
        f"{FEW_KV_HEADS},batch=1,seqlen_q=16|17|64,seqlen_kv=65536,page_size=16,causal=bottom_right",
        f"{GQA},batch=1,seqlen_q=17|64,seqlen_kv=8192|65536,page_size=16,causal=bottom_right",
    ),
    "features": (
        *(f"{CAUSAL}{more}" for more in ("", ",window=1023", ",softcap", ",alibi", ",chunk=2048")),
        f"{GPT_OSS},window=127",
        GPT_OSS,
        f"{MASKS},bias=additive|boolean",
        f"{MASKS},block_mask=64|128",
        *(f"{PACKED}{more}" for more in ("", ",softcap", ",sinks", ",alibi")),
        f"{CHUNKED},page_size=16|64",
        f"{CHUNKED},page_size=64,kv_dtype=e4m3",
        f"{GQA},seqlen_q=1,batch=16,seqlen_kv=8192,page_size=16|64",
    ),
}

Tflops = Annotated[float, msgspec.Meta(gt=0)]


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speeds measured elsewhere at one case, in the unit that the case names, TFLOP/s by default."""

    case: ShortText  # Name as of `case_of`. Others are ignored.
    cudnn: Tflops  # SDPA's cuDNN backend.
    fa2: Tflops | None = None  # SDPA's flash backend.
    flex: Tflops | None = None  # Compiled FlexAttention.
    fa4: Tflops | None = None  # flash-attn-4.

    def best(self) -> tuple[str, float]:
        """Returns the name and speed of the fastest, cuDNN included."""
        named = (("cudnn", self.cudnn), ("fa2", self.fa2), ("flex", self.flex), ("fa4", self.fa4))
        return max(((name, speed) for name, speed in named if speed is not None), key=lambda pair: pair[1])


class PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of others."""

    source: ShortText  # Origin of the figures.
    cases: tuple[Figures, ...]  # One for each case.
    # Whether absolute speeds are compared. By default each speed is divided by cuDNN's of the same run, since
    # machines differ. This needs a cuDNN that computes the case here.
    absolute: bool = False


def grid_problems(name: str) -> tuple[Problem, ...]:
    """The problems of a grid of `GRIDS`."""
    return tuple(problem for shape in GRIDS[name] for problem in parse_shape(shape))


def case_of(problem: Problem) -> str:
    """Returns a problem's name in files of figures.

    Points of the `paper` grid have short names, such as `fwd d128 causal s4096`, or `bwd d128 causal s4096`
    for gradients. Points of the `decode` grid have names such as `decode b16 hq32 hkv8 s8192 d128 [GB/s]`.
    Other names contain everything but the batch, such as `fwd e4m3 d128 h64x8 full s4096`. Only decoding
    depends on the batch.
    """
    decode = decode_case(problem)
    if decode is not None:
        return decode
    mask = "full" if problem.causal is Causal.NONE else "causal"
    which = "bwd" if problem.is_backward else "fwd"
    if _is_of_paper(problem):
        return f"{which} d{problem.head_dim} {mask} s{problem.seqlen_q}"
    width, lengths = f"d{problem.head_dim}", f"s{problem.seqlen_q}"
    if problem.value_head_dim != problem.head_dim:
        width += f"v{problem.value_head_dim}"
    if problem.seqlen_kv != problem.seqlen_q:
        lengths += f"x{problem.seqlen_kv}"
        mask = problem.causal.value if problem.causal is not Causal.NONE else mask
    lengths += feature_words(problem)
    if is_decode(problem):
        lengths = f"b{problem.batch} {lengths}"
    return f"{which} {problem.dtype} {width} h{problem.heads}x{problem.kv_heads} {mask} {lengths}"


def _is_of_paper(problem: Problem) -> bool:
    square = problem.seqlen_q == problem.seqlen_kv and problem.head_dim == problem.value_head_dim
    is_plain = problem.dtype is Dtype.BF16 and problem.heads == problem.kv_heads and not problem.features
    width = problem.heads * problem.head_dim
    return square and is_plain and width == MODEL_WIDTH and problem.batch * problem.seqlen_q == TOKENS


def read_figures(data: bytes, name: str) -> PeerFile:
    """Returns figures of others: a list of cases, or an object with their `source` and `cases`."""
    try:
        decoded = msgspec.json.decode(data, type=PeerFile | tuple[Figures, ...])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{name} holds no peers' figures: {error}; write a list of cases with cudnn, fa2, flex and fa4"
        ) from error
    file = decoded if isinstance(decoded, PeerFile) else PeerFile(name[:400], decoded)
    cases = [figures.case for figures in file.cases]
    twice = sorted({case for case in cases if cases.count(case) > 1})
    if twice:
        raise UsageError(f"{name} has {twice[0]!r} twice: leave one of the two out")
    return file
