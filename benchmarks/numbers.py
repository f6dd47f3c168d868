"""Finds measured numbers in the documentation without a saved result.

    python -m benchmarks.numbers              # prints the exemptions, and every number without a source

A number counts as measured if it has a decimal point, a unit, a multiplication sign or a percent sign.
Counts of runs ("525 of 548", "862 mutants") are measured too. Such a number must come from a saved result,
through a table or a figure that `benchmarks/documents.py` writes. Otherwise it must be in the list of
exemptions, with a reason. Code, links and comments are not checked.
"""

import enum
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from flashtune.core.errors import TableError

ROOT = Path(__file__).resolve().parent.parent
EXEMPTIONS = Path(__file__).with_name("exempt_numbers.toml")
PAGES = (
    "README.md",
    "docs/*.md",
    "docs/integrations/*.md",
    "benchmarks/results/README.md",
    "benchmarks/results/axes.md",
    "benchmarks/results/hopper.md",
    "benchmarks/results/sram-audit.md",
    "benchmarks/results/tables.md",
)

# Not prose, or written by benchmarks/documents.py; in this order.
SKIPPED = tuple(
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (
        r"^```.*?^```",
        r"<!-- table ([\w-]+): .*?<!-- end of table \1 -->",
        r"<!-- figure [\w-]+ -->.*?<!-- end -->",
        r"<!--.*?-->",
        r"`[^`\n]*`",
        r"\]\([^)\n]*\)",
    )
)
# Names and their versions.
VERSION = re.compile(
    r"\b(?:torch|Triton(?:'s)?|Python|CUDA|cuDNN|ptxas|driver|Helion(?:\]\([^)]*\))?|compute-sanitizer|flash_attn"
    r"|Llama|Gemma|GPT-|numpy)\s*\d[\w.+-]*(?:(?:,| and| to| or)\s\d+\.[\w.+]*\d)*"
    # Those of compute-sanitizer, by year.
    r"|\b20\d\d\.\d+(?:\.\d+)*\b"
)
INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
# Counts in words; smaller ones are rarely measured.
IN_WORDS = r"(?:three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|hundred)"
NUMBER = rf"{INTEGER}(?:\.\d+)?(?:\s?(?:to|and|or|–|-|/|,)\s?{INTEGER}(?:\.\d+)?)*"
UNIT = (
    r"%|×|µs\b|us\b|ms\b|s\b|seconds?\b|minutes?\b|hours?\b|percent\b|times\b|TFLOP|GFLOP|GB/s|TB/s|[KMGT]iB\b"
    r"|[kKMGT]B\b|bytes?\b|GHz\b|cycles?\b|instructions?\b|bits an?\b"
)
COUNTED = (
    r"configs?|kernels?|records?|mutants?|problems?|shapes?|seeds?|tests?|cases?|checks?|launches|samples?"
    r"|searches|points?|candidates?|trials?|runs?|selections?|rows were|passed|failed|checked|refused"
    r"|GPUs?|families|versions|survived|anchors?|hazards?|errors?|mistakes?|tokens of|requests|steps|places"
)
MEASURED = re.compile(
    rf"(?<![\w.,/-])(?:{NUMBER}\s?-?(?:{UNIT})"
    rf"|{INTEGER}\.\d+"
    rf"|{INTEGER} of (?:the |these |its |all )?{INTEGER}"
    rf"|{INTEGER}(?:\s(?!when|where|for|in|the|a|on|at|of|is|and|or)[a-z][\w-]*){{0,2}}?\s(?:{COUNTED})\b)"
    rf"|\b(?i:{IN_WORDS})(?:\s[a-z][\w-]*)??\s(?:{COUNTED})\b"
    rf"|\blengths? {INTEGER}"
)


class Kind(enum.StrEnum):
    """Why a number needs no saved result."""

    LIMIT = "limit"
    DEFAULT = "default"
    DESIGN = "design"
    DEFINITION = "definition"
    ARITHMETIC = "arithmetic"
    SOURCE = "source"


class Exemption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exempt numbers of one page."""

    page: str  # The page's path, relative to the repository.
    kind: Kind  # Their kind.
    reason: str  # Their source.
    # Words of the page that contain them, with any line breaks; empty for the whole page.
    texts: tuple[str, ...] = ()


class Exemptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reviewed list."""

    exempt: tuple[Exemption, ...]


class Unbacked(msgspec.Struct, frozen=True):
    """A measured number without a saved result: where it is, and the words around it."""

    page: str
    line: int
    number: str
    around: str


def main() -> None:
    """Prints the exemptions and the numbers without a source; exits with 1 if there are any."""
    numbers: list[Unbacked] = []
    exemptions = read_exemptions(EXEMPTIONS)
    for exemption in exemptions:
        print(f"exempt, {exemption.kind}: {exemption.page}: {exemption.reason}")
        for text in exemption.texts:
            print(f"    {text}")
    for page in pages():
        numbers += unbacked(page, (ROOT / page).read_text(encoding="utf-8"), exemptions)
    for number in numbers:
        print(f"{number.page}:{number.line}: {number.number!r} has no saved result: ...{number.around}...")
    print(f"{len(exemptions)} exemptions; {len(numbers)} measured numbers without a saved result")
    if numbers:
        sys.exit(1)


def pages() -> tuple[str, ...]:
    """The pages that are checked, relative to the repository."""
    return tuple(sorted(path.relative_to(ROOT).as_posix() for glob in PAGES for path in ROOT.glob(glob)))


def read_exemptions(path: Path) -> tuple[Exemption, ...]:
    """The reviewed list."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Exemptions).exempt
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(f"{path} holds no exemptions: {error}") from error


def unbacked(page: str, text: str, exemptions: Sequence[Exemption]) -> list[Unbacked]:
    """The measured numbers of a page that are neither generated nor exempt."""
    prose = _blanked(text)
    allowed = [span for exemption in exemptions if exemption.page == page for span in _spans(exemption, text)]
    return [
        Unbacked(page, text.count("\n", 0, match.start()) + 1, match.group(), _around(text, match))
        for match in MEASURED.finditer(prose)
        if not any(start <= match.start() and match.end() <= end for start, end in allowed)
    ]


def unused(exemptions: Sequence[Exemption], root: Path = ROOT) -> list[str]:
    """Texts of exemptions that are on no page, or hold no measured number."""
    lines = []
    for exemption in exemptions:
        path = root / exemption.page
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        numbers = list(MEASURED.finditer(_blanked(text)))
        for words in exemption.texts or ("",):
            spans = list(_occurrences(words, text))
            held = any(a <= number.start() and number.end() <= b for a, b in spans for number in numbers)
            if not held:
                lines.append(f"{exemption.page}: {words or 'the whole page'}")
    return lines


def _spans(exemption: Exemption, text: str) -> Iterator[tuple[int, int]]:
    for words in exemption.texts or ("",):
        yield from _occurrences(words, text)


def _occurrences(words: str, text: str) -> Iterator[tuple[int, int]]:
    """Where words are on a page, however its lines are broken; all of it where there are none."""
    if not words:
        yield 0, len(text)
        return
    pattern = r"\s+".join(map(re.escape, words.split()))
    for match in re.finditer(pattern, text):
        yield match.span()


def _blanked(text: str) -> str:
    """The page with all but its prose replaced by spaces, so that places stay the same."""
    for pattern in (*SKIPPED, VERSION):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    return text


def _around(text: str, match: re.Match[str]) -> str:
    return " ".join(text[max(match.start() - 40, 0) : match.end() + 40].split())


if __name__ == "__main__":
    main()
