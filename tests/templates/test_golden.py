"""Rendered kernels, compared with the checksums in tests/golden and read as text.

After a template was changed on purpose: read `make render-diff`, then
`pytest tests/templates/test_golden.py --update-golden`.
"""

import ast
import functools
import re
from fnmatch import fnmatchcase
from unittest import mock

import pytest

from flashtune.core.kernel import Kernel
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates import rendering
from flashtune.templates.dead_branches import remove_dead_branches
from flashtune.templates.docstring_rows import COMMENT, DOCSTRING
from tests.support.golden_kernels import (
    COMBINATIONS,
    HOPPER,
    HOPPER_BACKWARD,
    KERNELS,
    LATENT,
    SUMS,
    checksums,
)

MAX_LINE = 125
# Hopper's steps are handed the whole schedule.
MAX_HOPPER_LINE = 130
# Names that Hopper kernels may set without a use, for phases that not every config has.
SPARE = {"n_block", "positions", "workspaces", "v", "lse"}
# Capital letters that are no name of a kernel, and sizes of shapes.
WORDS = {"KV", "L2", "LLVM", "MLA", "PTX", "TMA", "head_dim", "value_head_dim"}
# Lines of a header that describe the problem and the config.
FACTS = re.compile(r"^(?:Computes|Problem|With|Config|Template) .*\n(?: {5,}.*\n)*", re.MULTILINE)
# A name in capital letters, with an underscore or in backquotes.
NAME = re.compile(r"(?<![\w*])[A-Z][A-Z0-9_]+(?![\w*])|(?<![\w*])[a-z]\w*_\w+(?![\w*])|(?<=`)\w+(?=`)")
# Names of a row of a docstring: q, k, v     [batch, heads, seqlen, head_dim]
ROW = re.compile(r"^ +([\w*]+(?:, [\w*]+)*) {2,}\S", re.MULTILINE)
# Next to those that test_supported_tritons compiles.
COMPILED = [
    "q_outer_fp16_d96_v80_decomposed",
    "hopper_fp16_d96_v80_decomposed",
    "masked_fp16_d128_packed_pages",
    "backward_split_fp16_d192_v128_window",
    "backward_fused_fp16_d192_v128_packed",
]


@pytest.fixture(params=COMBINATIONS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


FLAGS: dict[str, set[str]] = {}


@functools.cache
def rendered_kernel(name: str) -> Kernel:
    """Renders a kernel, and notes its flags."""
    with mock.patch.object(rendering, "remove_dead_branches", wraps=remove_dead_branches) as removal:
        kernel = KERNELS[name]()
    FLAGS[name] = set[str]().union(*(call.args[1] for call in removal.call_args_list))
    return kernel


def test_kernels_match_their_checksums(updates_golden: bool) -> None:
    rendered = checksums()
    if updates_golden:
        SUMS.write_text(rendered, encoding="utf-8")
    assert SUMS.read_text(encoding="utf-8").count("\n") == len(KERNELS)
    changed = set(SUMS.read_text(encoding="utf-8").splitlines()) ^ set(rendered.splitlines())
    names = sorted({line.split("  ")[1] for line in changed})
    assert names == [], "if meant: pytest tests/templates/test_golden.py --update-golden"


@pytest.mark.slow
@pytest.mark.parametrize("rendered", KERNELS)
def test_rendered_kernels_are_readable(rendered: str) -> None:
    source = rendered_kernel(rendered).source
    ast.parse(source)
    lines = source.split("\n")
    assert [line for line in lines if line != line.rstrip() or "\t" in line] == []
    hopper = "hopper" in rendered
    assert [line for line in lines if len(line) > (MAX_HOPPER_LINE if hopper else MAX_LINE)] == []
    assert source.endswith("\n")
    assert not source.endswith("\n\n")
    assert hopper or "\n\n\n\n" not in source
    # Two blank lines are for the borders of functions.
    assert re.findall(r"\n\n\n(?!\n|@|def |# |[A-Z]+ = )", source) == []


@pytest.mark.slow
@pytest.mark.parametrize("rendered", KERNELS)
def test_comments_and_docstrings_name_only_what_the_code_has(rendered: str) -> None:
    source = rendered_kernel(rendered).source
    explained = DOCSTRING.findall(source)
    code = DOCSTRING.sub("", source)
    explained += COMMENT.findall(code)
    words = set(re.findall(r"\w+", COMMENT.sub("", code)))
    # Some tiles have a part of a head dim each: q_tile_128.
    words |= {re.sub(r"_\d+$", "", word) for word in words} | WORDS
    # Rows of the header explain flags of the config that are set.
    flags = set(re.findall(r"(\w+) True", "".join(FACTS.findall(explained[0]))))
    for text in (FACTS.sub("", part) for part in explained):
        rows = [name for row in ROW.findall(text) for name in row.split(", ")]
        absent = {*NAME.findall(text), *rows} - words - flags
        patterns = {name for name in absent if "*" in name and any(fnmatchcase(word, name) for word in words)}
        assert absent - patterns == set(), text


@pytest.mark.slow
@pytest.mark.parametrize("rendered", KERNELS)
def test_comments_are_above_code(rendered: str) -> None:
    """A comment of a branch that was removed would be at the end of a block."""
    last = re.compile(r"^( *)#.*\n(?!\1[^ \n])", re.MULTILINE)
    assert [match[0] for match in last.finditer(rendered_kernel(rendered).source)] == []


@pytest.mark.parametrize("rendered", HOPPER_BACKWARD)
def test_arguments_match_the_functions_of_the_hopper_gradient(rendered: str) -> None:
    kernel, by_name = rendered_kernel(rendered), functions(rendered)
    plans = {"launch_plan", "prologue_plan", "epilogue_plan"}
    assert plans | {"descriptors", "attention_backward"} <= by_name.keys()
    for part in kernel.parts:
        parameters = [argument.arg for argument in by_name[part.entry].args.args]
        assert parameters == [argument.name for argument in part.arguments]


@pytest.mark.slow
def test_functions_have_no_unused_names(name: str) -> None:
    kernel = rendered_kernel(name)
    for function in functions(name).values():
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        unused = {node.id for node in names if isinstance(node.ctx, ast.Store)} - read
        assert unused - {"_"} - (SPARE if kernel.family == HOPPER else set()) == set()


@pytest.mark.slow
def test_rendered_kernels_contain_no_flags(name: str) -> None:
    names = {node.id for node in ast.walk(tree_of(name)) if isinstance(node, ast.Name)}
    assert FLAGS[name]
    assert names & FLAGS[name] == set()


# Tests of one kernel follow each other.
@functools.lru_cache(maxsize=1)
def tree_of(name: str) -> ast.Module:
    return ast.parse(rendered_kernel(name).source)


def functions(name: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree_of(name).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_all_families_take_tensors_and_scale_in_the_same_order(name: str) -> None:
    """Kernel packages call the files of all families alike."""
    by_name = functions(name)
    order = ["q", "k", "v", "scale"] if "attention" in by_name else [*"qkv", "out", "lse", "dout", "scale"]
    order += ["q_scale", "k_scale", "v_scale"] if COMBINATIONS[name].dtype == "e4m3" else []
    (entry,) = (by_name[wrapper] for wrapper in ("attention", "attention_backward") if wrapper in by_name)
    assert [argument.arg for argument in entry.args.args] == order


@pytest.mark.slow
def test_header_describes_the_kernel(name: str) -> None:
    kernel = rendered_kernel(name)
    header = ast.get_docstring(tree_of(name)) or ""
    chosen = COMBINATIONS[name]
    widths = "head dim {}, value head dim {}".format(*chosen.widths)
    assert f"{chosen.dtype}, {widths}, causal: {chosen.causal}" in header
    said = {
        HOPPER: "num_consumer_groups {num_consumer_groups}, rows_per_group {rows_per_group}, "
        "block_n {block_n}, num_stages {num_stages}",
        LATENT: "{queries} queries and {heads} heads a tile, {num_stages} stages, {num_splits} parts",
    }
    told = said.get(kernel.family, "block_m {block_m}, block_n {block_n}, {num_warps} warps")
    assert told.format(**chosen.config, heads=64 // chosen.config.get("queries", 1)) in header
    assert kernel.family in header


@pytest.mark.slow
def test_kernels_import_only_torch_and_triton(name: str) -> None:
    tree = tree_of(name)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    sources = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if name.startswith("hopper"):
        portable_steps = any(
            part in name for part in ("e4m3", "parts", "bias", "blocks", "boolean", "splits")
        )
        # Kernels of packed sequences count tiles by the sequences' starts, and need no `triton.cdiv`.
        steps = ["triton", "triton.language"] if portable_steps else [] if "sequences" in name else ["triton"]
        assert imported == ["torch", *steps]
        # Triton has aggregates in `language.core` before version 3.9.
        modules = ("triton.experimental", "triton.language.core")
        assert all(str(source).startswith(modules) for source in sources)
    else:
        assert imported == ["torch", "triton", "triton.language"]
        assert sources == []


@pytest.mark.slow
def test_arguments_match_the_function(name: str) -> None:
    kernel = rendered_kernel(name)
    by_name = functions(name)
    backward = kernel.family.startswith("backward")
    usable = {kernel.entry, "launch_plan", "attention_backward" if backward else "attention"}
    if kernel.prologue is not None and not kernel.takes_descriptors:
        usable |= {kernel.prologue.entry, "prologue_plan"}
    if kernel.epilogue is not None:
        usable |= {kernel.epilogue.entry, "epilogue_plan"}
    if "seed" in kernel.all_side:
        usable |= {"scrambled", "random_rows", "drop" if kernel.takes_descriptors else "stays"}
    if kernel.takes_descriptors:
        # Steps and roles are functions of their own.
        assert usable | {"descriptors", "produce", "consume"} <= set(by_name)
    else:
        # Helpers of kernels are functions of their own.
        assert usable <= set(by_name)
    parameters = [argument.arg for argument in by_name[kernel.entry].args.args]
    assert parameters == [argument.name for argument in kernel.arguments]
    for step in filter(None, (kernel.prologue, kernel.epilogue)):
        parameters = [argument.arg for argument in by_name[step.entry].args.args]
        assert parameters == [argument.name for argument in step.arguments]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", COMPILED)
def test_kernels_compile_for_hopper(compiled: str) -> None:
    target = find_target("h100")
    binary = compile_kernel(rendered_kernel(compiled), target)
    assert 0 < binary.metadata.shared <= target.sram_per_block
    assert "wgmma" in binary.asm["ptx"]
