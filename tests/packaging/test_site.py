"""Tests of the documentation site, and of the examples that its reference has."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.code_blocks import ROOT, code_blocks, pages

REFERENCE = ("docs/api/index.md", "docs/api/testing.md", "docs/api/integrations.md")
LISTS = (
    "flashtune",
    "flashtune.testing",
    "flashtune.integrations.torch",
    "flashtune.integrations.transformers",
    "flashtune.integrations.flash_attn",
    "flashtune.integrations.flash_attn.flash_attn_3",
    "flashtune.integrations.flash_attn.flash_attn_4",
)
OTHERS = (
    "flashtune.integrations.wait",
    "flashtune.integrations.vllm.register",
    "flashtune.integrations.sglang.register",
)
# A heading, the docstring and an example.
SECTION = re.compile(
    r"^### .*\n+```\{eval-rst\}\n\.\. auto(?:function|class):: (\S+)\n(?:   .*\n)*```\n(?:(?!^#).*\n)*?```py",
    re.MULTILINE,
)


def public_names(module: str) -> list[str]:
    """Returns the public names of a module that have docstrings."""
    names = vars(importlib.import_module(module))
    functions = [name for name in names if name.startswith("flash_attn_")]
    return [name for name in names.get("__all__", functions) if not name.startswith("_")]


@pytest.mark.slow
def test_site_builds_without_warnings_or_broken_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--conf-dir", "docs", "."]
    build = subprocess.run([*command, tmp_path / "site"], cwd=ROOT, capture_output=True, text=True)
    assert (build.returncode, build.stderr) == (0, "")
    for page in pages():
        assert (tmp_path / "site" / page).with_suffix(".html").is_file(), page
    assert (tmp_path / "site/index.html").is_file()


def test_reference_has_an_example_of_every_public_name() -> None:
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in REFERENCE)
    names = {f"{module}.{name}" for module in LISTS for name in public_names(module)}
    assert set(SECTION.findall(text)) == {*names, *OTHERS}


def test_quoted_code_is_in_its_file() -> None:
    blocks = [block for page in pages() for block in code_blocks(ROOT / page) if block.source]
    assert len(blocks) > 3
    for block in blocks:
        assert block.text in (ROOT / block.source).read_text(encoding="utf-8"), block.place
