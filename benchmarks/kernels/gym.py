"""Runs the masks and score functions of attention-gym unchanged, against torch's results in float64.

    python -m benchmarks.kernels.gym FOLDER                       # in Triton's interpreter without a GPU
    python -m benchmarks.kernels.gym FOLDER --length 4096 --head-dim 64 --dtype bf16 --out FILE

FOLDER is a checkout of the repository meta-pytorch/attention-gym, of which `attn_gym/masks` and
`attn_gym/mods` are imported. Every function there that makes a mask or a score function has a case. An error
may be twice that of torch's unfused computation in the same type. The exit code is 1 if a function was
refused or has a wrong result, or if a function has no case.
"""

import argparse
import copy
import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from benchmarks.saved import RESULTS, save
from benchmarks.saved import load as load_saved
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/kernels/gym.py"
SAVED = (RESULTS / "nvidia-h200-gym.json.gz", RESULTS / "gym-interpreter.json.gz")
BATCH, HEADS, ROPE_WIDTH, PATH = 2, 4, 64, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Roundoff of each type relative to 1, which an output of a size of about 1 may be off in any case.
ROUNDOFFS = {"fp32": 2.0**-20, "bf16": 2.0**-8, "fp16": 2.0**-11}


class Case(NamedTuple):
    """Functions, and the lengths for which they are."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    queries: int | None = None  # The length of the run if None.
    keys: int | None = None
    block_mask: Any = None  # Instead of one of `mask`.
    # An equal function for the reference. Uncompiled, torch calls a custom operator for each score.
    plain: Callable[..., Any] | None = None


class Row(msgspec.Struct, frozen=True):
    """The result of a case."""

    name: str
    outcome: str  # `passed`, `refused` or `failed`.
    backend: str
    error: float | None  # The largest difference of an output from float64.
    allowed: float | None
    reason: str = ""


def load(folder: Path) -> tuple[Any, Any]:
    """Returns the modules `attn_gym.masks` and `attn_gym.mods` without the rest of the package."""
    if not (folder / "attn_gym" / "masks").is_dir():
        raise UsageError(f"{folder} has no attn_gym/masks: pass a checkout of meta-pytorch/attention-gym")
    package = types.ModuleType("attn_gym")
    package.__path__ = [str(folder / "attn_gym")]
    package.__spec__ = importlib.machinery.ModuleSpec("attn_gym", None, is_package=True)
    sys.modules["attn_gym"] = package
    return importlib.import_module("attn_gym.masks"), importlib.import_module("attn_gym.mods")


def makers(*modules: Any) -> set[str]:
    """Returns the names of functions that make a mask or a score function."""
    found = set()
    for module in modules:
        folder = Path(module.__file__).parent
        for file in sorted(folder.glob("*.py")):
            part = importlib.import_module(f"{module.__name__}.{file.stem}")
            for name, value in vars(part).items():
                is_own = getattr(value, "__module__", "").startswith(module.__name__)
                if isinstance(value, types.FunctionType) and is_own and "visualize" not in name:
                    is_maker = name.startswith("generate_") or "block_mask" in name or "mask_mod" in name
                    if (is_maker or name == "causal_mask") and "validate" not in name:
                        found.add(name)
    return found - {"generate_random_lengths"}


def cases(masks: Any, mods: Any, length: int, device: torch.device) -> dict[str, Case]:
    """Returns cases by the names of their functions, with a word after a space if there are several."""
    return {
        **position_masks(masks, length),
        **tensor_masks(masks, length, device),
        **tile_masks(length, device),
        **scores(mods, length, device),
    }


def position_masks(masks: Any, length: int) -> dict[str, Case]:
    """Returns masks of positions alone."""
    causal = masks.causal_mask
    grid = {"canvas_w": 16, "canvas_h": length // 16}
    kernel = {"kernel_w": 5, "kernel_h": 3}
    video = {"prompt_length": 20, "num_frames": 4, "token_per_frame": (length - 20) // 4}
    half = length // 2
    return {
        "causal_mask": Case(mask=causal),
        "batchify_mask_mod": Case(mask=masks.batchify_mask_mod(causal, length // 4)),
        "generate_block_diffusion_mask": Case(mask=masks.generate_block_diffusion_mask(half, 16)),
        "generate_dilated_sliding_window": Case(mask=masks.generate_dilated_sliding_window(length // 4, 3)),
        "generate_sliding_window": Case(mask=masks.generate_sliding_window(length // 4)),
        "generate_prefix_lm_mask": Case(mask=masks.generate_prefix_lm_mask(length // 3)),
        "generate_natten": Case(mask=masks.generate_natten(**grid, **kernel)),
        "generate_morton_natten": Case(mask=masks.generate_morton_natten(**grid, **kernel)),
        "generate_tiled_natten": Case(mask=masks.generate_tiled_natten(16, length // 16, 5, 3, 4, 2)),
        "generate_sta_mask_mod_2d": Case(
            mask=masks.generate_sta_mask_mod_2d((8, length // 8 - 4), (4, 8), (2, 4), 32)
        ),
        "generate_sta_mask_mod_3d": Case(
            mask=masks.generate_sta_mask_mod_3d((4, 4, length // 16 - 2), (2, 4, 4), (2, 2, 2), 32)
        ),
        "generate_spatial_head_mask_mod": Case(
            mask=masks.generate_spatial_head_mask_mod(**video, round_width=16)
        ),
        "generate_spatial_head_mask_mod sink": Case(
            mask=masks.generate_spatial_head_mask_mod(**video, attn_sink=True, round_width=16)
        ),
        "generate_temporal_head_mask_mod": Case(mask=masks.generate_temporal_head_mask_mod(**video)),
        "generate_jetspec_training_mask_mod": Case(
            mask=masks.generate_jetspec_training_mask_mod(half, 8), keys=half + length
        ),
    }


def tensor_masks(masks: Any, length: int, device: torch.device) -> dict[str, Case]:
    """Returns masks of documents, images, global tokens and trees."""
    document = importlib.import_module("attn_gym.masks.document_mask")
    part = length // 8
    offsets = document.length_to_offsets([part, 3 * part, 1, length - 5 * part - 1, part], device)
    prefixes = torch.tensor([0, 0, 0, 3, 3], device=device)
    images = torch.tensor([[0, 3 * part], [part, 5 * part], [5 * part, length]], device=device)
    is_global = torch.arange(length, device=device) % (length // 3) == 0
    nodes = min(length, 96)
    tree = masks.build_tree_ancestor_matrix([-1, *((node - 1) // 2 for node in range(1, nodes))], device)
    return {
        "generate_doc_mask_mod": Case(mask=masks.generate_doc_mask_mod(masks.causal_mask, offsets)),
        "generate_packed_causal_doc_mask_mod": Case(mask=masks.generate_packed_causal_doc_mask_mod(offsets)),
        "generate_shared_prefix_mask_mod": Case(
            mask=masks.generate_shared_prefix_mask_mod(offsets, prefixes)
        ),
        "generate_vision_cross_attention_mask_mod": Case(
            mask=masks.generate_vision_cross_attention_mask_mod(images, part), keys=3 * part
        ),
        "generate_global_sliding_window": Case(mask=masks.generate_global_sliding_window(part, is_global)),
        "generate_jetspec_tree_causal_mask_mod": Case(
            mask=masks.generate_jetspec_tree_causal_mask_mod(part, tree), queries=nodes, keys=part + nodes
        ),
    }


def tile_masks(length: int, device: torch.device) -> dict[str, Case]:
    """Returns block masks, and masks of selected tiles of keys."""
    vsa = importlib.import_module("attn_gym.masks.vsa")
    causal = importlib.import_module("attn_gym.masks.causal")

    def chosen(tile: int, count: int = 2) -> Tensor:
        tiles = length // tile
        return torch.rand(BATCH, HEADS, tiles, tiles, device=device).topk(min(count, tiles), -1).indices

    def sizes(tile: int) -> Tensor:
        return torch.tensor([tile] * (length // tile - 1) + [tile - 5], device=device)

    tiles = length // 16
    seen = torch.rand(BATCH, HEADS, tiles, tiles, device=device) < 0.4
    seen[..., 0] = True
    blocks = length // 64, sizes(64)
    wide = length // 128, sizes(128)
    return {
        "create_causal_block_mask_fast": Case(
            block_mask=causal.create_causal_block_mask_fast(None, None, length, length, device)
        ),
        "generate_vsa_mask_mod": Case(mask=vsa.generate_vsa_mask_mod(chosen(16, 5), 16)),
        "generate_vsa_mask_mod sizes": Case(mask=vsa.generate_vsa_mask_mod(chosen(16), 16, sizes(16))),
        "generate_vsa_block_map_mask_mod": Case(mask=vsa.generate_vsa_block_map_mask_mod(seen, 16)),
        "generate_vsa_block_map_mask_mod sizes": Case(
            mask=vsa.generate_vsa_block_map_mask_mod(seen, 16, sizes(16))
        ),
        "generate_vsa_padding_mask_mod": Case(mask=vsa.generate_vsa_padding_mask_mod(sizes(16), 16)),
        "create_vsa_block_mask": Case(block_mask=vsa.create_vsa_block_mask(chosen(64), 64, blocks[0])),
        "create_vsa_block_mask sizes": Case(block_mask=vsa.create_vsa_block_mask(chosen(64), 64, *blocks)),
        "create_vsa_flash_block_mask": Case(
            block_mask=vsa.create_vsa_flash_block_mask(chosen(128), 128, wide[0], 128, wide[1])
        ),
    }


def scores(mods: Any, length: int, device: torch.device) -> dict[str, Case]:
    """Returns score functions."""
    activation, functional = mods.activation.generate_activation_score_mod, torch.nn.functional
    # A ring, on which shortest paths have every length.
    nodes = torch.arange(length, device=device)
    adjacency = torch.zeros(BATCH, length, length, dtype=torch.bool, device=device)
    adjacency[:, nodes, (nodes + 1) % length] = True
    adjacency[:, (nodes + 1) % length, nodes] = True
    graphormer = importlib.import_module("attn_gym.mods.graphormer")
    distances = graphormer.shortest_path_distances(adjacency, PATH)
    kinds = torch.randint(3, adjacency.shape, device=device, dtype=torch.int32)
    paths = graphormer.shortest_path_edge_types(adjacency, kinds, PATH)
    queries, keys = (torch.randn(BATCH, heads, length, ROPE_WIDTH, device=device) for heads in (HEADS, 1))
    return {
        "generate_alibi_bias": Case(mods.generate_alibi_bias(HEADS)),
        "generate_tanh_softcap": Case(mods.generate_tanh_softcap(2)),
        "generate_tanh_softcap approximate": Case(
            mods.generate_tanh_softcap(2, approx=True), plain=mods.generate_tanh_softcap(2)
        ),
        "generate_sandwich_bias": Case(mods.generate_sandwich_bias(HEADS, length, device=device)),
        "generate_mla_rope_score_mod": Case(
            mods.generate_mla_rope_score_mod(queries, keys, HEADS, scale=ROPE_WIDTH**-0.5)
        ),
        "generate_activation_score_mod": Case(activation()),
        "generate_activation_score_mod relu": Case(activation(functional.relu)),
        "generate_activation_score_mod sigmoid": Case(activation(torch.sigmoid)),
        "generate_graphormer_spatial_bias": Case(
            mods.generate_graphormer_spatial_bias(torch.randn(HEADS, PATH + 2, device=device), distances)
        ),
        "generate_graphormer_edge_bias": Case(
            mods.generate_graphormer_edge_bias(torch.randn(HEADS, PATH, 3, device=device), *paths)
        ),
    }


def run(name: str, case: Case, length: int, width: int, dtype: str, device: torch.device) -> Row:
    """Returns the result of a case."""
    from torch.nn.attention import flex_attention as flex

    import flashtune

    queries, keys = case.queries or length, case.keys or length
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(BATCH, HEADS, rows, width, device=device, dtype=DTYPES[dtype])
        for rows in (queries, keys, keys)
    )
    mask = case.block_mask
    if case.mask is not None:
        mask = flex.create_block_mask(case.mask, BATCH, HEADS, queries, keys, device=str(device))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        visible = None if mask is None else copy.copy(mask)
        if visible is not None:
            # Without a compiler, torch evaluates the mask function alone.
            seen = shown(mask, queries, keys)
            visible.mask_mod = lambda b, h, q, k: seen[b, h, q, k]
        score = case.plain or case.score
        exact = flex.flex_attention(q.double(), k.double(), v.double(), score, visible)
        unfused = flex.flex_attention(q, k, v, score, visible)
        allowed = 2 * largest(unfused, exact) + ROUNDOFFS[dtype]
        try:
            out = flashtune.flex_attention(q, k, v, case.score, mask)
            backend = flashtune.explain_flex(q, k, v, case.score, mask).backend
        except FlashtuneError as error:
            return Row(name, "refused", "none", None, allowed, str(error))
    off = largest(out, exact)
    outcome = "passed" if off <= allowed and backend in ("generated", "interpreter") else "failed"
    return Row(name, outcome, backend, off, allowed)


def shown(mask: Any, queries: int, keys: int) -> Tensor:
    """Returns the pairs that a block mask and its function show."""
    from torch.nn.attention import flex_attention as flex

    seen = flex.create_mask(mask.mask_mod, BATCH, HEADS, queries, keys, device=str(mask.kv_indices.device))
    blocks = mask.to_dense().bool()
    for axis, size in ((-2, mask.BLOCK_SIZE[0]), (-1, mask.BLOCK_SIZE[1])):
        blocks = blocks.repeat_interleave(size, axis)
    both: Tensor = seen & blocks[..., :queries, :keys]
    return both


def largest(out: Tensor, exact: Tensor) -> float:
    """Returns the largest difference."""
    return float((out.double() - exact).abs().max())


def texts() -> dict[str, str]:
    """Returns the table of the saved runs, by name."""
    rows = []
    for path in SAVED:
        saved = load_saved(path, tuple[Row, ...])
        where = "Triton's interpreter" if saved.source.gpu == "none" else saved.source.gpu
        passed = sum(row.outcome == "passed" for row in saved.rows)
        rows.append((where, saved.source.torch, str(len(saved.rows)), str(passed)))
    return {"gym": "\n".join(table(("run on", "torch", "cases", "passed"), rows))}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of attention-gym")
    parser.add_argument("--length", type=int, default=256, help="queries and keys, a multiple of 128")
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--only", default="", help="run the cases with this text in their names")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.length % 128:
        raise UsageError(f"--length is {options.length}: pass a multiple of 128")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    masks, mods = load(options.folder.resolve())
    torch.manual_seed(0)
    known = cases(masks, mods, options.length, device)
    missing = sorted(makers(masks, mods) - {name.partition(" ")[0] for name in known})
    rows = [Row(name, "failed", "none", None, None, "it has no case") for name in missing]
    for name, case in known.items():
        if options.only in name:
            rows.append(run(name, case, options.length, options.head_dim, options.dtype, device))
            print(f"{rows[-1].outcome:8} {name} {rows[-1].error} {rows[-1].reason}", flush=True)
            if options.out is not None:
                save(options.out, rows)
    passed = sum(row.outcome == "passed" for row in rows)
    print(f"{passed} of {len(rows)} passed", *(row.name for row in rows if row.outcome != "passed"))
    raise SystemExit(passed < len(rows))


if __name__ == "__main__":
    main()
