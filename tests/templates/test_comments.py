"""Tests that comments, docstrings and wrappers do not affect digests and versions."""

import re
from importlib import resources

import jinja2
import jinja2.meta
import pytest

from flashtune.core.canonical_source import _TEMPLATE, canonical_template
from flashtune.core.kernel import Kernel
from flashtune.templates import registry
from flashtune.templates.docstring_rows import remove_absent_rows
from flashtune.templates.registry import PACKAGE, TEMPLATE, family_names, template_hash
from tests.support.golden_kernels import COMBINATIONS, kernel_of
from tests.templates.conftest import ReadBy


def read(name: str) -> str:
    return resources.files(PACKAGE).joinpath(*name.split("/")).read_text(encoding="utf-8")


def all_templates() -> list[str]:
    names = set[str]().union(*(registry._imported(f"{name}/{TEMPLATE}") for name in family_names()))
    return sorted(names)


def reworded(text: str) -> str:
    """The template with every comment, docstring and Jinja comment changed."""
    return _TEMPLATE.sub(_reworded, text)


def _reworded(token: re.Match[str]) -> str:
    value = token.group()
    if value.startswith("{#"):
        return re.sub(r"-?#}$", lambda end: f" It's changed. {end.group()}", value)
    if token.lastgroup == "comment":
        return value.replace("# ", "# It's changed. ", 1)
    # Docstrings begin with a capital letter or a tag; strings within calls do not.
    return re.sub(r'^"""(?=[A-Z]|\{\{)', '"""It\'s changed. ', value)


def kernels() -> dict[str, Kernel]:
    """A kernel of each family. The canonical forms of all templates are compared below."""
    of_family = {combination.family: name for name, combination in COMBINATIONS.items()}
    return {name: kernel_of(name) for name in of_family.values()}


@pytest.mark.slow
def test_comments_do_not_affect_versions_and_digests(read_by: ReadBy) -> None:
    versions = {name: template_hash(name) for name in family_names()}
    before = kernels()
    read_by(lambda name: reworded(read(name)))
    after = kernels()
    assert {name: template_hash(name) for name in family_names()} == versions
    assert {name: kernel.digest for name, kernel in after.items()} == {
        name: kernel.digest for name, kernel in before.items()
    }
    assert all(after[name].source != before[name].source for name in before)


@pytest.mark.parametrize("name", all_templates())
def test_every_template_has_a_comment_to_change(name: str) -> None:
    text = read(name)
    assert reworded(text) != text
    assert canonical_template(reworded(text)) == canonical_template(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", all_templates())
def test_changed_code_changes_the_canonical_form(name: str) -> None:
    text = read(name)
    changes = (
        ("{% set changed = 1 %}{% ", "{% "),
        ("{{ 1 + ", "{{ "),
        ("tl.changed.", "tl."),
        ("gl.changed.", "gl."),
    )
    tried = 0
    for match in re.finditer(r"(?m)^ *(?:[\w, ]+ = |return )?(?:\{% |\{\{ |tl\.|gl\.).*$", text):
        line = match.group()
        new = next(line.replace(old, new, 1) for new, old in changes if old in line)
        changed = text[: match.start()] + new + text[match.end() :]
        if not _is_free(text, match.start()):
            tried += 1
            assert canonical_template(changed) != canonical_template(text), line
    assert tried


def _is_free(text: str, position: int) -> bool:
    """Whether a place lies in a wrapper, a docstring or a comment."""
    before = re.findall(r"(?m)^(?:def|@|[A-Z]|\w+ =|import|from).*$", text[:position])
    in_wrapper = bool(before) and before[-1].startswith("def attention")
    spans = (
        token.span() for token in _TEMPLATE.finditer(text) if token.lastgroup in {"string", "comment", "tag"}
    )
    return in_wrapper or any(start < position < end for start, end in spans)


@pytest.mark.parametrize("name", all_templates())
def test_hash_covers_every_template_reference(name: str) -> None:
    environment = jinja2.Environment()
    references = set(jinja2.meta.find_referenced_templates(environment.parse(read(name))))
    assert references == set(registry.IMPORT.findall(read(name)))


SOURCE = '''"""Computes a sum.

Config       lpt True
Names
  x, y       numbers
  z          a number that
             the code lacks
  *_tile     a block
  *_desc     a descriptor
Tunables
  BLOCK      numbers of a block
  WIDTH      columns: absent
  lpt        the longest first
  packed     not set
  maxnreg    not set: absent
"""

BLOCK = 64


def add(x, y):
    """Returns z and WIDTH.

    x   a number
    w   a number
    """
    # A z.
    q_tile = """
    name   code
    """
    return x + y, q_tile
'''


def test_rows_of_absent_names_are_removed() -> None:
    result = remove_absent_rows(SOURCE, {"LPT": True, "PACKED": False})
    removed = [line for line in SOURCE.splitlines() if line not in result.splitlines()]
    assert [line.split()[0] for line in removed] == ["z", "the", "*_desc", "WIDTH", "packed", "maxnreg", "w"]
    kept = [line for line in SOURCE.splitlines() if line not in removed]
    assert result.splitlines() == kept


def test_a_row_needs_all_of_its_names() -> None:
    source = '"""Adds.\n\n  x, y   numbers\n  x      a number\n"""\n\nx = 1\n'
    assert remove_absent_rows(source, {}) == '"""Adds.\n\n  x      a number\n"""\n\nx = 1\n'


def test_comments_and_docstrings_are_no_code() -> None:
    source = '"""Uses y.\n\n  y   a number\n"""\n\n# y\nx = 1  # y\n'
    assert "a number" not in remove_absent_rows(source, {})


def test_other_strings_are_unchanged() -> None:
    source = 'x = 1\ny = """\n  z   text\n"""\n'
    assert remove_absent_rows(source, {}) == source
