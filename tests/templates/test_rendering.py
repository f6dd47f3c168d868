"""Tests of rendering: typed contexts, undefined names, and digests."""

import enum
import functools
from pathlib import Path

import jinja2
import msgspec
import pytest

from flashtune import templates, testing
from flashtune.core.config import Config
from flashtune.core.errors import KernelError, TableError
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.common.model.sram import Chunk, columns, head_chunks
from flashtune.templates.family import Context, Family
from flashtune.templates.forward_q_outer.family import ForwardQOuter
from flashtune.templates.registry import (
    TEMPLATE,
    _imported,
    families,
    family_names,
    find_family,
    template_hash,
)
from flashtune.templates.rendering import CHECKS, _environment, render

FORWARD = [find_family(name) for name in ("forward_q_outer", "forward_kv_outer")]
BY_FAMILY = pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
a_problem = functools.partial(testing.problem, "heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal")


def a_config(family: Family) -> Config:
    return family.config_type(block_m=64, block_n=64, num_warps=4, num_stages=1)  # type: ignore[call-arg]


def rendered(
    family: Family, problem: Problem | None = None, specialization: Specialization | None = None
) -> Kernel:
    return render(family, problem or a_problem(), a_config(family), specialization or Specialization())


class HostileFamily(ForwardQOuter):
    """A family whose context holds what it should not."""

    def __init__(self, value: object) -> None:
        self._value = value

    def context(self, problem: Problem, config: Config, specialization: Specialization) -> Context:
        return {"value": self._value}


@pytest.mark.parametrize(
    "value", ["__import__('os')", b"x", 1.5, None, (1, "x"), {"a": "x"}, {"a": {"b": "x"}}, [1]]
)
def test_context_refuses_other_types_than_numbers(value: object) -> None:
    problem = a_problem()
    config = a_config(FORWARD[0])
    with pytest.raises(KernelError, match="must be ints, bools or enums"):
        render(HostileFamily(value), problem, config, Specialization())


def test_context_accepts_numbers_bools_enums_and_tuples() -> None:
    problem = a_problem()
    config = a_config(FORWARD[0])
    for value in (1, True, Causal.NONE, (1, 2), Chunk(0, 0, 16, False), (Chunk(0, 0, 16, False),), {"a": 1}):
        # Past the check, the template misses everything that it needs.
        with pytest.raises(jinja2.UndefinedError):
            render(HostileFamily(value), problem, config, Specialization())


def test_text_enums_render_only_their_members() -> None:
    class Sneaky(enum.StrEnum):
        CODE = "import os"

    problem = a_problem()
    decoder = msgspec.json.Decoder(type(problem))
    hostile = msgspec.json.encode(problem).replace(b'"bf16"', b'"import os"')
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value"):
        decoder.decode(hostile)
    assert Sneaky.CODE not in rendered(FORWARD[0]).source


def test_undefined_name_is_an_error() -> None:
    template = _environment().from_string("{{ block_m }} {{ blokc_n }}")
    with pytest.raises(jinja2.UndefinedError, match="blokc_n"):
        template.render(block_m=16)


@BY_FAMILY
def test_source_does_not_depend_on_lengths_heads_and_batch(family: Family) -> None:
    problem = a_problem()
    config = a_config(family)
    other = a_problem(heads=32, kv_heads=1, batch=7, seqlen_q=31, seqlen_kv=4096)
    assert render(family, problem, config, Specialization()) == render(
        family, other, config, Specialization()
    )


@BY_FAMILY
def test_digest_covers_every_input_of_the_binary(family: Family) -> None:
    problem = a_problem()
    config = a_config(family)
    kernels = [
        render(family, problem, config, Specialization()),
        render(family, problem, msgspec.structs.replace(config, num_warps=8), Specialization()),
        render(family, problem, msgspec.structs.replace(config, maxnreg=128), Specialization()),
        render(family, problem, msgspec.structs.replace(config, block_m=16), Specialization()),
        *(rendered(family, a_problem(causal=causal)) for causal in (Causal.NONE, Causal.TOP_LEFT)),
        rendered(family, a_problem(dtype=Dtype.FP16)),
        rendered(family, a_problem(head_dim=48, value_head_dim=64)),
        rendered(family, a_problem(value_head_dim=128)),
        rendered(family, specialization=Specialization(Alignment.EIGHT)),
        rendered(family, specialization=Specialization(Alignment.ANY)),
        rendered(family, specialization=Specialization(index_bits=64)),
        rendered(family, specialization=Specialization(lse=True)),
    ]
    assert len({kernel.digest for kernel in kernels}) == len(kernels)
    assert rendered(family).digest == rendered(family).digest


def test_template_version_differs_by_family_and_is_in_the_header() -> None:
    hashes = {family.name: template_hash(family.name) for family in FORWARD}
    assert len(set(hashes.values())) == len(FORWARD)
    for family in FORWARD:
        assert hashes[family.name][:12] in rendered(family).source


def test_every_template_is_hashed_for_some_family() -> None:
    hashed = set[str]().union(*(_imported(f"{name}/{TEMPLATE}") for name in family_names()))
    folder = Path(templates.__file__).parent
    # The checks of wrappers decide nothing of a kernel.
    assert hashed | {CHECKS} == {path.relative_to(folder).as_posix() for path in folder.glob("**/*.jinja")}


def test_registry_contains_every_folder() -> None:
    assert {"forward_q_outer", "forward_kv_outer"} <= set(family_names())
    assert [family.name for family in families()] == list(family_names())
    for name in ("common", "forward", "os", "../common", ""):
        with pytest.raises(TableError, match="no kernel family"):
            find_family(name)


@pytest.mark.parametrize("head_dim", [1, 8, 16, 40, 64, 80, 96, 112, 128, 160, 192, 200, 256])
def test_head_chunks_cover_each_column_once(head_dim: int) -> None:
    for split_head_dim in (False, True):
        chunks = head_chunks(head_dim, split_head_dim)
        assert [chunk.start for chunk in chunks] == [
            sum(c.width for c in chunks[:i]) for i in range(len(chunks))
        ]
        assert all(chunk.width >= 16 and chunk.width & (chunk.width - 1) == 0 for chunk in chunks)
        assert columns(chunks) >= head_dim > chunks[-1].start
        assert [chunk.padded for chunk in chunks] == [
            chunk.start + chunk.width > head_dim for chunk in chunks
        ]
    assert columns(head_chunks(head_dim, True)) <= columns(head_chunks(head_dim, False))
