"""`Kernel`: rendered source and its specialization. The digest is computed over the source's canonical form.

A changed comment, docstring or header leaves the digest and the template version unchanged. The lexer is our
own, because those of the standard library differ between Python versions: 3.12 splits f-strings into tokens,
and `ast.dump` of one file differs between 3.11, 3.12 and 3.13.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec

from flashtune.core.config import LaunchOptions
from flashtune.core.extra_inputs import Side
from flashtune.core.problem import Dtype

if TYPE_CHECKING:
    from torch import Tensor

# A template engine's tag: kept in templates, and never found in Python.
_JINJA_TAG = r"\{%.*?%\}|\{\{.*?\}\}|\{\#.*?\#\}"
_NO_TAG = r"(?!)"

# Functions that make a rendered file usable alone. The runtime never calls them. Python evaluates defaults
# on import, so that a signature with anything but names and constants counts.
_WRAPPER = re.compile(rf"def attention(?:_backward)?\((?:{_JINJA_TAG}|[\w\s,=*])*\):", re.DOTALL)

# Line ends and encodings that the lexer does not know but Python does.
_UNUSUAL = "\r\f\0\ufeff"
_ENCODING = re.compile(r"(?:.*\n)?[ \t]*#.*?coding[:=]")


def _lexer(tag: str) -> re.Pattern[str]:
    # No two alternatives match at the same character. The most frequent one comes first, for speed.
    return re.compile(
        rf"""
        (?P<code>[^\s"'\#\\(){{}}\[\]]++(?:[ ]++[^\s"'\#\\(){{}}\[\]]++)*+)
        | (?P<tag>{tag})
        | (?P<string>
            \"\"\"(?:\\.|{tag}|(?!\"\"\")[^\\])*+(?:\"\"\"|\\?\Z)
            | '''(?:\\.|{tag}|(?!''')[^\\])*+(?:'''|\\?\Z)
            | "(?:\\.|{tag}|[^"\\\n])*+(?:"|(?=\n)|\\?\Z)
            | '(?:\\.|{tag}|[^'\\\n])*+(?:'|(?=\n)|\\?\Z)
          )
        | (?P<comment>\#(?:{tag}|[^\n])*+)
        | (?P<newline>\n)
        | (?P<open>[(\[{{])
        | (?P<close>[)\]}}])
        | (?P<space>[ \t]+)
        | (?P<other>\\\n | .)
        """,
        re.VERBOSE | re.DOTALL,
    )


# Strings with replacement fields; from Python 3.12 on a field may hold quotes and comments of its own.
_FORMATTED = re.compile(
    r"""\b(?:[fFtT][rR]?|[rR][fFtT])(?P<quote>\"{3}|'{3}|"|')(?P<text>(?:\\.|(?!(?P=quote)).)*+)""", re.DOTALL
)
_PYTHON = _lexer(_NO_TAG)
_TEMPLATE = _lexer(_JINJA_TAG)
_CONTROL_TAG = re.compile(r"\{%.*?%\}", re.DOTALL)


@functools.lru_cache(maxsize=64)
def canonical_source(source: str) -> str:
    """Returns a Python source without comments, docstrings, blank lines and stand-alone wrappers.

    A string that is a whole statement counts as a docstring. Every other string is kept as it is, inline PTX
    included. The result is for comparison; it need not be valid Python. A source with a carriage return,
    a form feed, a null character, a byte-order mark or an encoding declaration is returned unchanged.
    """
    if any(sign in source for sign in _UNUSUAL) or _ENCODING.match(source):
        return source
    if any(map(_may_nest, _FORMATTED.finditer(source))):
        return source
    return "\n".join(_statements(source, _PYTHON))


def _may_nest(string: re.Match[str]) -> bool:
    """Whether a replacement field holds a quote, a comment or a line end, or does not end in the string."""
    depth = 0
    for part in re.finditer(r"\{\{|\}\}|[{}]|[\"'\#\\\n]", string["text"]):
        sign = part.group()
        if depth == 0:
            depth = int(sign == "{")
        elif sign in {"{", "{{"}:
            depth += len(sign)
        elif sign in {"}", "}}"}:
            depth = max(depth - len(sign), 0)
        else:
            return True
    return depth > 0


def canonical_template(text: str) -> str:
    """Returns a Jinja template of Python code likewise; control tags count wherever they occur."""
    return "\n".join(_statements(text, _TEMPLATE))


def _statements(text: str, lexer: re.Pattern[str]) -> Iterator[str]:
    """The logical lines that count. Indentation is kept; layout within brackets is not."""
    in_wrapper = decorated = False
    for line, is_string in _logical_lines(text, lexer):
        indented = line[0] in " \t"
        if in_wrapper:
            in_wrapper = indented or line.startswith("{%")
        if not in_wrapper and not decorated and _WRAPPER.match(line):
            in_wrapper = True
        # A decorator's function is no wrapper: without it the decorator would apply to the next one.
        decorated = line.startswith("@")
        if in_wrapper or is_string:
            yield from _control_tags(line, lexer)
        else:
            yield line


def _control_tags(text: str, lexer: re.Pattern[str]) -> list[str]:
    return _CONTROL_TAG.findall(text) if lexer is _TEMPLATE else []


def _logical_lines(text: str, lexer: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Logical lines without comments, and whether each is a string alone."""
    parts: list[str] = []
    kinds: list[str] = []
    space = ""
    depth = 0
    for token in lexer.finditer(text):
        kind, value = str(token.lastgroup), token.group()
        if kind == "tag" and value.startswith("{#"):
            continue
        if kind == "space":
            space = space or value
        elif kind == "comment":
            # A control tag within a comment decides about the lines after it too.
            tags = _control_tags(value, lexer)
            parts += tags
            kinds += ["tag"] * len(tags)
        elif kind == "newline" and depth > 0:
            space = "\n"
        elif kind == "newline":
            if parts:
                yield "".join(parts), kinds == ["string"]
            parts, kinds, space = [], [], ""
        else:
            depth = max(depth + (kind == "open") - (kind == "close"), 0)
            parts.append(space + value)
            kinds.append(kind)
            space = ""
    if parts:
        yield "".join(parts), kinds == ["string"]


MAX_INT32 = 2**31 - 1
POINTER_ALIGNMENT = 16


class Alignment(enum.IntEnum):
    """The power of two that divides every stride (in elements) of a kernel's tensors.

    16 and 8 also promise pointers on 16-byte borders; 1 promises nothing.
    """

    ANY = 1
    EIGHT = 8
    SIXTEEN = 16


class Specialization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a kernel assumes of the tensors it is launched on.

    Attributes:
        alignment: Alignment class of pointers and strides.
        index_bits: Width of strides and offsets; 64 where an offset exceeds 2^31 - 1 elements.
        lse: Whether the log-sum-exp of each row is written; of a backward pass, whether a gradient of it
            comes in.
    """

    alignment: Alignment = Alignment.SIXTEEN
    index_bits: Annotated[int, msgspec.Meta(ge=32, le=64, multiple_of=32)] = 32
    lse: bool = False

    def takes_descriptors(self, dtype: Dtype) -> bool:
        """Whether TMA can address the tensors: strides are multiples of 16 bytes."""
        return self.alignment * dtype.itemsize >= POINTER_ALIGNMENT


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run-time argument: Triton's type (`*bf16`, `i32`, `fp32`) and what divides its value."""

    name: str
    type: str
    divisibility: int = 1


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another kernel of the same source, launched before or after the one that it belongs to.

    A prologue fills the workspace; its grid and integers come from the module's own `prologue_plan`. An
    epilogue makes the output of the workspaces; likewise, `epilogue_plan`. Both take what `launch_plan` does.
    Of a backward pass each step takes what its arguments name, as the kernel itself does.

    Attributes:
        entry: Name of the jitted function in the source.
        arguments: Run-time arguments in order. A prologue's: v, workspace, integers. An epilogue's: out, lse,
            workspaces, integers.
        options: Launch options of the compiler.
    """

    entry: str
    arguments: tuple[Argument, ...]
    options: LaunchOptions


# `omit_defaults` keeps digests when an optional field is added; `dict` holds the cached digest.
class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Rendered source of (family, problem's static features, config), and its specialisation.

    Attributes:
        family: The family's name.
        entry: Name of the jitted function in the source.
        source: The rendered Python file.
        arguments: Run-time arguments in order: q, k, v, out, lse, side inputs (by their names in `Side`),
            workspaces, scale, numbers of `Side` where there are some, integers; descriptors instead of q, k,
            v, out and what a prologue wrote. Of a backward pass: what `BackwardTensors` and `Side` name, and
            `workspace_0` and so on, in any order, then integers; descriptors come first.
        options: Launch options of the compiler.
        specialization: What is assumed of the tensors.
        prologue: What is launched before it, if anything.
        epilogue: What is launched after it, if anything.
    """

    family: str
    entry: str
    source: str
    arguments: tuple[Argument, ...]
    options: LaunchOptions
    specialization: Specialization
    prologue: Step | None = None
    epilogue: Step | None = None

    @property
    def takes_descriptors(self) -> bool:
        """Whether tensors are passed as descriptors, which the module's `descriptors` makes."""
        return any(argument.type.startswith("tensordesc") for argument in self.arguments)

    @property
    def side(self) -> tuple[str, ...]:
        """Names of the side inputs that it takes, in order."""
        return self._named(self.arguments)

    @property
    def all_side(self) -> tuple[str, ...]:
        """Names of the side inputs that it or a step of it takes, in the order of `Side`."""
        steps = (self.prologue, self.epilogue)
        taken = {*self.side, *(name for step in steps if step for name in self._named(step.arguments))}
        return tuple(name for name in Side._fields if name in taken)

    @property
    def first(self) -> Kernel | None:
        """The prologue as a kernel by itself: it compiles like any other."""
        return self._alone(self.prologue)

    @property
    def last(self) -> Kernel | None:
        """The epilogue as a kernel by itself."""
        return self._alone(self.epilogue)

    @staticmethod
    def _named(arguments: tuple[Argument, ...]) -> tuple[str, ...]:
        return tuple(argument.name for argument in arguments if argument.name in Side._fields)

    def _alone(self, step: Step | None) -> Kernel | None:
        if step is None:
            return None
        return Kernel(self.family, step.entry, self.source, step.arguments, step.options, self.specialization)

    @functools.cached_property
    def digest(self) -> str:
        """Hash over everything that decides what is launched, 32 hex digits.

        Comments, docstrings and the stand-alone wrapper of the source do not count; see `canonical_source`.
        """
        counted = msgspec.structs.replace(self, source=canonical_source(self.source))
        return hashlib.sha256(msgspec.json.encode(counted)).hexdigest()[:32]


def specialization_of(tensors: tuple[Tensor, ...], lse: bool, bias: Tensor | None = None) -> Specialization:
    """The narrowest specialisation that is right for these tensors.

    Args:
        tensors: q, k, v and out as [batch, heads, seqlen, head_dim], last dimension contiguous.
        lse: Whether the log-sum-exp is wanted.
        bias: What lies over the scores: nothing is promised of its strides, but offsets must reach its end.
    """
    combined = 16
    pointers = 0
    repeats = False
    extent = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
        reach = 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
            # A dimension of one element is never stepped over: its stride means nothing, but it
            # is passed to the kernel and so must keep the promise made of it.
            combined |= stride
            reach += max(size - 1, 0) * abs(stride)
            extent = max(extent, abs(stride))
        # The copy engine takes no rows that all lie in one place.
        repeats |= tensor.shape[2] > 1 and tensor.stride(2) == 0
        # A tile may run past the end of a sequence before it is masked: leave it room.
        extent = max(extent, reach + 1024 * tensor.stride(2) + tensor.shape[3])
    if bias is not None:
        reach = sum((size - 1) * stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
        # Likewise a tile of both queries and keys.
        extent = max(extent, reach + 1024 * (bias.stride(2) + 1))
    if repeats or pointers % POINTER_ALIGNMENT:
        alignment = Alignment.ANY
    elif combined % 16 == 0:
        alignment = Alignment.SIXTEEN
    elif combined % 8 == 0:
        alignment = Alignment.EIGHT
    else:
        alignment = Alignment.ANY
    return Specialization(alignment, 64 if extent > MAX_INT32 else 32, lse)
