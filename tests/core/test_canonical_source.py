"""Tests of the canonical form of sources."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashtune import templates
from flashtune.core import canonical_source as module
from flashtune.core.canonical_source import canonical_source, canonical_template

SOURCE = '''# A header.
#   More of it.

"""What the file computes."""

import triton

PTX = "bar.sync 1; // wait"
SIZES = (
    64,  # queries

    # keys
    128,
)


@triton.jit
def kernel(q, k):
    """What it does, "quoted" and \\"escaped\\"."""
    # A comment.
    tile = q + 1  # another

    asm = """
    add.u32 $0, $1;  # not a comment
    """
    if tile:
        'A single-quoted docstring statement.'
        return f"{tile!r}: # not a comment"
    joined = k + \\
        "kept"


def attention(q, k, scale=None, *, seed):
    """Runs the kernel."""
    return kernel(
q, k)
    # The end.


def launch_plan(q):
    return (q,)
'''

# Of `SOURCE`, under every Python.
PINNED = "221846e8af31105f"

GENERATED = Path(__file__).parents[2] / "kernels_generated"

NEUTRAL = [
    ("# A header.", "# Another header, don't mind the quote"),
    ('"""What the file computes."""', '"""Something else,\n\nover lines."""'),
    ("  # queries", ""),
    ("    # keys\n", "    # keys\n    # of a block\n"),
    ("    # A comment.\n", ""),
    ("\n\n@triton.jit", "\n\n\n\n@triton.jit"),
    (
        '    """Runs the kernel."""\n',
        '    """Runs the kernel."""\n    if q is None:\n        raise ValueError(q)\n',
    ),
    ("scale=None, *, seed", "scale=None, *, seed, dropout=0"),
    ("        'A single-quoted docstring statement.'\n", '        "Another one."  # and a comment\n'),
]

MEANINGFUL = [
    ("bar.sync 1; // wait", "bar.sync 1; // pass"),
    ('# not a comment\n    """', '# changed\n    """'),
    (": # not a comment", ": # changed"),
    ("@triton.jit", "@triton.jit()"),
    ("    64,", "    32,"),
    ("    tile = q + 1", "        tile = q + 1"),
    ("        return f", "    return f"),
    ('"kept"', '"changed"'),
    ("scale=None", "scale=print(1)"),
    ("def attention(", "@print\ndef attention("),
    # From Python 3.12 on these are code behind a string within a replacement field.
    ("    # A comment.\n", '    # A comment.\n    f"{"#"}"; print(1)\n'),
    ("    # The end.\n", '    # The end.\n    x = f"{"("}"\nprint(1)\n    #)\n'),
    ("    # The end.\n", '    # The end.\n    x = f"{ {{1}, 2}, { " # "}"; print(1)\n'),
    ("def attention(", "def attend("),
    ("return (q,)", "return (q, 1)"),
    ("import triton\n", 'import triton\n"docstring"; print(1)\n'),
    ("import triton\n", 'import triton\n"docstring".join(())\n'),
    ("import triton\n", 'import triton\nf"{print(1)}"\n'),
    ("    # A comment.\n", "    # f'\n    f'{f\"{1}\"}'\n"),
    ("    # A comment.\n", "    f'{q:{k}}'\n"),
    ("# A header.", "# coding: utf-7"),
    ("    # The end.\n", "    # The end.\nprint(1)\n"),
]


# Runs the module alone, with the standard library only.
PROGRAM = """
import hashlib, pathlib, runpy, sys
forms = runpy.run_path(sys.argv[1])
digest = hashlib.sha256()
for name in sys.argv[2:]:
    form = forms["canonical_template" if name.endswith(".jinja") else "canonical_source"]
    digest.update(form(pathlib.Path(name).read_text("utf-8")).encode())
print(digest.hexdigest())
"""


def test_canonical_form_does_not_depend_on_python_version() -> None:
    digest = hashlib.sha256(canonical_source(SOURCE).encode()).hexdigest()
    assert digest[:16] == PINNED


def other_pythons() -> dict[tuple[int, ...], Path]:
    """The oldest and the newest Python on this machine, from 3.11 on, that are not the present one."""
    folders = [*map(Path, os.get_exec_path()), *Path.home().glob(".pyenv/versions/*/bin")]
    pythons: dict[tuple[int, ...], Path] = {}
    for path in sorted({path for folder in folders for path in folder.glob("python3.[0-9][0-9]")}):
        command = [str(path), "-I", "-c", "import sys; print(*sys.version_info[:3])"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        version = tuple(map(int, said.split()))
        if version >= (3, 11) and version != sys.version_info[:3]:
            pythons.setdefault(version, path)
    return {version: pythons[version] for version in (min(pythons), max(pythons))} if pythons else {}


@pytest.mark.slow
def test_other_pythons_give_the_same_forms() -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("there is no other Python from 3.11 on")
    files = sorted(map(str, GENERATED.rglob("*.py")))
    files += sorted(map(str, Path(templates.__path__[0]).rglob("*.jinja")))
    assert len(files) > 60
    command = ["-I", "-c", PROGRAM, str(module.__file__), *files]
    paths = [Path(sys.executable), *pythons.values()]
    digests = {path: subprocess.check_output([str(path), *command], text=True) for path in paths}
    assert len(set(digests.values())) == 1, digests


def test_generated_kernels_have_a_canonical_form_of_their_own() -> None:
    for path in GENERATED.rglob("*.py"):
        source = path.read_text("utf-8")
        assert len(canonical_source(source)) < len(source), path


@pytest.mark.parametrize(("old", "new"), NEUTRAL)
def test_comments_docstrings_and_wrapper_are_ignored(old: str, new: str) -> None:
    assert old in SOURCE
    assert canonical_source(SOURCE.replace(old, new, 1)) == canonical_source(SOURCE)


@pytest.mark.parametrize(("old", "new"), MEANINGFUL)
def test_code_strings_and_indentation_change_canonical_form(old: str, new: str) -> None:
    assert old in SOURCE
    changed = SOURCE.replace(old, new, 1)
    assert canonical_source(changed) != canonical_source(SOURCE)


def test_decorated_wrapper_changes_canonical_form() -> None:
    kernel = "@triton.jit\ndef kernel(q):\n    return q\n"
    wrapped = kernel.replace("@triton.jit\n", "@triton.jit\ndef attention(): pass\n")
    assert canonical_source(wrapped) != canonical_source(kernel)


def test_canonicalisation_is_idempotent() -> None:
    assert canonical_source(canonical_source(SOURCE)) == canonical_source(SOURCE)


@pytest.mark.parametrize("character", "\t\r\f\v\0\x1c\x1d\x1e\x85\u2028\u2029\ufeff")
def test_sources_with_other_characters_are_not_changed(character: str) -> None:
    source = f"# comment{character}\nx = 1\n"
    assert canonical_source(source) == source


@pytest.mark.parametrize("source", ["", "'", '"""', "(", ")))\nx", "#", "\\", "x = '", "{% if", "'\\"])
def test_incomplete_sources_have_a_canonical_form(source: str) -> None:
    assert isinstance(canonical_source(source), str)
    assert isinstance(canonical_template(source), str)


def test_malformed_sources_take_linear_time() -> None:
    start = time.process_time()
    for source in ("'" * 200_000, '"\\' * 100_000, '"""' + '\\"' * 100_000, "(" * 200_000, "#{% " * 50_000):
        canonical_source(source)
    assert time.process_time() - start < 5


def test_templates_keep_control_tags_within_comments_and_docstrings() -> None:
    template = '"""{% if a %}One{% endif %}"""\n# {{ b }}{% if c %} two {% endif %}\nx = {{ y }}\n'
    canonical = canonical_template(template)
    assert canonical == canonical_template(template.replace("One", "Two").replace(" two ", " three "))
    for old in ("if a", "if c", "{{ y }}"):
        assert canonical != canonical_template(template.replace(old, old.replace("if ", "if not ").upper()))


def test_quotes_and_brackets_in_tags_do_not_open_strings() -> None:
    template = "x = {{ \"'\" if y else '(' }}  # first\n# second\n"
    assert canonical_template(template) == canonical_template(template.replace("second", "third"))
