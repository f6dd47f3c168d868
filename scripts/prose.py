"""Checks the prose of pages, docstrings and comments: sentence length and words with a standard term.

    python -m scripts.prose                # fails if a file has more findings than it may have
    python -m scripts.prose FILES          # lists the findings of these files
    python -m scripts.prose --write        # lowers the numbers of allowed findings to the present ones

`scripts/prose_allowed.toml` has the numbers of findings that files may have. Files that it does not name may
have none.
"""

import argparse
import ast
import io
import os
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "scripts/prose_allowed.toml"
PAGES = ("README.md", "CONTRIBUTING.md", "Makefile", "docs/*.md", "docs/*/*.md")
# Generated from the help texts of commands, which are checked where they are written.
GENERATED = frozenset({"docs/cli.md"})
CODE = ("flashtune", "tuner", "templates", "db", "benchmarks", "examples", "scripts", "tests")
MAX_WORDS = 25

# Patterns of words that have a plain or a standard alternative, and the advice.
WORDS = {
    r"\bnobody\b": "use 'no' and a noun",
    r"\bbeside\b": "use 'next to', 'in addition to' or 'in the same run'",
    r"\bstand-?ins?\b|\bstands? in for\b": "use 'fallback' or 'replaces'",
    r"\b(is|are|be|was|were) told\b|\btells? apart\b": "use 'gets', 'knows' or 'differs'",
    r"^(?:What|Who|Whom|Whose)\b(?!.*\?)": "name the thing",
    r"\b(?:of|for|from|by|to|with|as|than) (?:what|whom|who)\b": "name the thing",
    r"\bgo(?:es)? (?:by|past)\b": "use 'depends on' or 'bypasses'",
    r"\blaid\b": "use 'stored' or 'added'",
}
RULES = tuple((re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in WORDS.items())

NOT_PROSE = tuple(
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (r"^```.*?^```", r"<!--.*?-->", r"^\s*\|.*?\|\s*$", r"^#+ .*?$", r"^    .*?$")
)
COMMENTS = re.compile(r"\{#-?(.*?)-?#\}|((?:^[ \t]*#[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"noqa|type:|fmt:|ruff:|pyright:|mypy:|pragma:")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SPAN = re.compile(r"``[^`]+``|`[^`\n]+`|\{\{.*?\}\}")
END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))")
WORD = re.compile(r"[A-Za-z0-9][\w'./%-]*")


class Finding(NamedTuple):
    """A sentence that breaks a rule."""

    path: str
    sentence: str
    advice: str


def main() -> None:
    """Prints findings, and exits with 1 if a file has more than it may have."""
    parser = argparse.ArgumentParser(description="Checks the prose of pages, docstrings and comments.")
    parser.add_argument("--write", action="store_true", help="lower the allowed counts to the present ones")
    parser.add_argument("files", nargs="*", help="the files to list; all if left out")
    options = parser.parse_args()
    findings = {path: tuple(findings_of(ROOT / path)) for path in (options.files or checked_files())}
    if options.files:
        for listed in findings.values():
            print("\n".join(f"{finding.path}: {finding.sentence!r}: {finding.advice}" for finding in listed))
        return
    counts = {path: len(listed) for path, listed in findings.items() if listed}
    allowed = allowed_counts()
    if options.write:
        lowered = {path: min(counts.get(path, 0), most) for path, most in sorted(allowed.items())}
        lines = (f'"{path}" = {most}\n' for path, most in lowered.items() if most)
        ALLOWED.write_text("".join(lines), "utf-8")
        return
    failed = excess(counts, allowed)
    for path in failed:
        print(
            "\n".join(f"{finding.path}: {finding.sentence!r}: {finding.advice}" for finding in findings[path])
        )
    if failed:
        sys.exit(f"{len(failed)} files have more findings than {ALLOWED.relative_to(ROOT)} allows")


def excess(counts: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """Returns the files with more findings than they may have."""
    return sorted(path for path, count in counts.items() if count > allowed.get(path, 0))


def allowed_counts() -> dict[str, int]:
    """Returns the number of findings that each file may have; files that are not named may have none."""
    return tomllib.loads(ALLOWED.read_text("utf-8"))


def checked_files() -> list[str]:
    """Returns the paths of all pages and modules that are checked."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    # Folders behind links are not walked.
    modules = [
        Path(folder, name)
        for package in CODE
        for folder, _, names in os.walk(ROOT / package)
        for name in names
        if name.endswith((".py", ".jinja"))
    ]
    paths = {path.relative_to(ROOT).as_posix() for path in (*pages, *modules)}
    return sorted(paths - GENERATED)


def findings_of(path: Path) -> Iterator[Finding]:
    """The sentences of a page, or of a file's docstrings and comments, that break a rule."""
    source = path.read_text("utf-8")
    name = str(path.relative_to(ROOT))
    for text in texts_of(path.suffix, source):
        for sentence in sentences(text):
            words = len(WORD.findall(sentence))
            if words > MAX_WORDS:
                yield Finding(name, sentence, f"{words} words: at most {MAX_WORDS}")
            for pattern, advice in RULES:
                if match := pattern.search(sentence):
                    yield Finding(name, sentence, f"{match.group(0).strip()!r}: {advice}")


def count_words() -> int:
    """Returns the words of README and docs, without code, tables, headings, the tutorial and references."""
    pages = (
        path
        for pattern in ("README.md", "docs/*.md", "docs/integrations/*.md")
        for path in ROOT.glob(pattern)
    )
    texts = (path.read_text("utf-8") for path in pages if path.name not in ("cli.md", "tutorial.md"))
    return sum(len(sentence.split()) for text in texts for sentence in sentences(text))


def texts_of(suffix: str, source: str) -> list[str]:
    """Returns the texts of a file that are prose."""
    if suffix == ".md":
        return [source]
    if suffix == ".py":
        return [*docstrings(source), *comments(source)]
    # Templates and the Makefile have comments of whole lines.
    parts = ("".join(groups) for groups in COMMENTS.findall(source))
    return [re.sub(r"^[ \t]*#+ ?", "", part, flags=re.MULTILINE) for part in parts]


def comments(source: str) -> list[str]:
    """Returns the comments of a module; those on adjacent lines that start in one column are one text."""
    texts: list[str] = []
    last = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#! ")
        if token.type != tokenize.COMMENT or DIRECTIVE.match(text):
            continue
        if texts and token.start == (last[0] + 1, last[1]):
            texts[-1] += f"\n{text}"
        else:
            texts.append(text)
        last = token.start
    return texts


def docstrings(source: str) -> list[str]:
    """Returns all docstrings of a module."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return [text for text in texts if text]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text in Markdown, or of a docstring, without code, tables, headings and links."""
    for pattern in NOT_PROSE:
        text = pattern.sub("\n\n", text)
    text = SPAN.sub("code", LINK.sub(r"\1", text))
    for sentence in END.split(text):
        if words := sentence.split():
            yield " ".join(words)


if __name__ == "__main__":
    main()
