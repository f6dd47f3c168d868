"""Tests of the prose check."""

from pathlib import Path

import pytest

from scripts import prose

PAGE = """# A heading that nobody reads

A tile is one block of queries. See [the guide of nobody](guide.md).

| nobody | in a table |
| --- | --- |

```console
$ nobody
```

- Run `nobody` once
- An item
  on two lines.
"""


def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> list[str]:
    """The advice for a file with this text."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / name).write_text(text, "utf-8")
    return [finding.advice for finding in prose.findings_of(tmp_path / name)]


def test_sentences_leave_out_headings_code_tables_and_link_targets() -> None:
    assert list(prose.sentences(PAGE)) == [
        "A tile is one block of queries.",
        "See the guide of nobody.",
        "- Run code once",
        "- An item on two lines.",
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "Nobody tuned the shape.",
        "What a call costs.",
        "The mask is laid over the scores.",
        "A record that stands in for the selection.",
        "The launcher is told of the strides.",
        " ".join(["word"] * 26) + ".",
    ],
)
def test_sentences_that_break_a_rule_are_found(
    sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(findings(tmp_path, monkeypatch, "page.md", f"A page.\n\n{sentence}\n")) == 1
    code = f'def f():\n    """Returns it.\n\n    {sentence}\n    """\n'
    assert len(findings(tmp_path, monkeypatch, "module.py", code)) == 1


@pytest.mark.parametrize("sentence", ["What is a tile?", " ".join(["word"] * 25) + ".", "Returns a tile."])
def test_plain_sentences_pass(sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(tmp_path, monkeypatch, "page.md", sentence) == []


def test_files_with_more_findings_than_allowed_fail() -> None:
    assert prose.excess({"a": 2, "b": 1, "c": 3}, {"a": 2, "c": 2}) == ["b", "c"]


def test_all_pages_and_packages_are_checked() -> None:
    files = prose.checked_files()
    assert {"README.md", "docs/design.md", "flashtune/core/problem.py", "tuner/candidates.py"} <= set(files)
    assert "docs/cli.md" not in files


def test_pages_have_fewer_words_than_their_limit() -> None:
    assert 10_000 < prose.count_words() <= 28_000
