"""Compares the parts of other libraries that flashtune's integrations rely on with those of another version.

    python -m scripts.host_contracts vllm WHEEL          # or a folder with the package `vllm`
    python -m scripts.host_contracts vllm WHEEL --write  # freezes this version's parts
    python -m scripts.host_contracts --newest            # downloads the newest wheels of all libraries by pip

It prints one line for each difference and fails if there is one. Sources are parsed, never imported. The
frozen parts are `tests/data/contracts/LIBRARY.json`: signatures without annotations, abstract methods, values
of constants and of enum members, and annotations of fields. For functions with closures that flashtune reads,
they are the source. For callers, they are the keywords of attention and mask functions, or the operators of
torch. Of torch, they are also the arguments of all operators of attention.

The files are also the list of the parts. To rely on another one, add its name with the value `null` to the
file (a class or a function with parts: `{"part": null}`), and freeze the version again. To drop one, delete
it from the file: `--write` refuses a version that lacks a listed part.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FROZEN = Path(__file__).resolve().parent.parent / "tests/data/contracts"
ABSTRACT = "abstract methods"
BASES = "bases"
# The text of a function and of its inner function.
SOURCE = "source"
# The keywords of calls in a function or class, by which transformers calls flashtune's functions.
TO_ATTENTION = "keywords of attention_interface"
TO_MASK = "keywords of mask_interface"
CALLED = {"attention_interface": TO_ATTENTION, "mask_interface": TO_MASK}
# The operators that a function calls.
OPERATORS = "operators of aten"
# The key of the schemas of torch's operators, among the modules.
OPERATOR_SCHEMAS = "aten"
# The file of torch's wheels with the schemas of operators, and those of attention.
SCHEMAS = "torchgen/packaged/ATen/native/native_functions.yaml"
SCHEMA = re.compile(r"^- func: (_\w*_attention_\w+|_scaled_dot_product_\w+)\((.*?)\) -> ", re.MULTILINE)
# The operators that GPUs of NVIDIA have, of which arguments are frozen too.
OF_GPUS = re.compile(r"_(scaled_dot_product_)?(flash|cudnn|efficient)_attention(?!_for_cpu)")
# Classes that flashtune's extend: a new abstract method breaks these.
EXTENDED = ("AttentionBackend", "AttentionImpl", "AttentionImplBase", "AttentionMetadataBuilder")
# Other base classes are the library's own matter.
KNOWN_BASES = ("AttentionImplBase", "Enum", "GeneralInterface", "IntEnum", "str")
# Names that some supported versions lack, and the first version that has them.
ADDED = {
    "transformers.masking_utils.remap_positions_for_packed_sequence": (5, 23),
    "aten._cudnn_attention_forward: Tensor? block_table=None": (2, 14),
    "aten._cudnn_attention_forward: Tensor? seqused_k=None": (2, 14),
    **dict.fromkeys(
        (
            f"{prefix}_cudnn_attention_forward_no_dropout_inplace"
            for prefix in (
                "aten.",
                "aten.names: ",
                f"torch.nn.attention.varlen._varlen_attn_out.{OPERATORS}: ",
            )
        ),
        (2, 15),
    ),
}
# Optional parameters that only some versions have, and that flashtune does not pass.
IGNORED = {"sdpa_attention_forward": "cache", "sdpa_mask": "allow_torch_fix"}

Contract = dict[str, Any]

LIBRARIES = tuple(sorted(path.stem for path in FROZEN.glob("*.json")))
# The names of a module, and the parts of classes and of some functions. Others have their signature.
Names = dict[str, tuple[str, ...]]


def frozen_contract(library: str) -> Contract:
    """Returns the frozen contract of a library."""
    frozen: Contract = json.loads((FROZEN / f"{library}.json").read_text(encoding="utf-8"))
    return frozen


def relied_names(library: str) -> dict[str, Names]:
    """Returns the names in each module that a library's frozen contract has, without the operators."""
    return {
        module: {name: tuple(part) if isinstance(part, dict) else () for name, part in names.items()}
        for module, names in frozen_contract(library)["modules"].items()
        if module != OPERATOR_SCHEMAS
    }


def contract_of(library: str, path: Path) -> Contract:
    """Returns the relied parts of a wheel, or of a folder that contains the package, without absent ones."""
    root = zipfile.Path(path) if path.is_file() else path
    modules = {}
    for module, names in relied_names(library).items():
        file = root / f"{module.replace('.', '/')}.py"
        if not file.is_file():
            file = root / f"{module.replace('.', '/')}/__init__.py"
        if file.is_file():
            parts = dict(_parts(ast.parse(file.read_text(encoding="utf-8")), names))
            modules[module] = {
                name: _chosen(name, parts[name], names[name]) for name in sorted(names) if name in parts
            }
    schemas = root / SCHEMAS
    if library == "torch" and schemas.is_file():
        texts = dict(SCHEMA.findall(schemas.read_text(encoding="utf-8")))
        arguments = {name: text.split(", ") for name, text in texts.items() if OF_GPUS.match(name)}
        modules[OPERATOR_SCHEMAS] = {"names": sorted(texts), **arguments}
    infos = [each.name for each in root.iterdir() if each.name.endswith(".dist-info")]
    versions = [info.split("-")[1] for info in infos if info.split("-")[0] == library]
    return {"version": versions[0].removesuffix(".dist"), "modules": modules}


def differences(frozen: Contract, present: Contract) -> list[str]:
    """Returns one sentence for each part that is gone or differs.

    New abstract methods and new keywords have one too. Older versions may lack what was `ADDED` later.
    """
    version = tuple(int(number) for number in re.findall(r"\d+", present["version"]))
    lacking = [f"{name} is gone" for name, first in ADDED.items() if version < first]
    lines = _differences("", frozen["modules"], present["modules"])
    return [line for line in lines if line not in lacking]


def absent(library: str, present: Contract) -> list[str]:
    """Returns the relied names and members that a version lacks, with their modules."""
    names: list[str] = []
    for module, listed in relied_names(library).items():
        parts = present["modules"].get(module, {})
        for name, members in listed.items():
            if name not in parts:
                names.append(f"{module}.{name}")
                continue
            present_members = parts[name] if isinstance(parts[name], dict) else {}
            names += [f"{module}.{name}.{member}" for member in members if member not in present_members]
    if OPERATOR_SCHEMAS in frozen_contract(library)["modules"].keys() - present["modules"].keys():
        names.append(OPERATOR_SCHEMAS)
    return names


def _differences(name: str, frozen: Any, present: Any) -> Iterator[str]:
    if isinstance(frozen, dict) and isinstance(present, dict):
        for key, value in frozen.items():
            inner = f"{name}.{key}" if name else key
            if key in present:
                yield from _differences(inner, value, present[key])
            else:
                yield f"{inner} is gone"
    elif isinstance(frozen, list) and isinstance(present, list):
        for item in sorted({*frozen} ^ {*present}):
            yield f"{name}: {item} is {'new' if item in present else 'gone'}"
    elif frozen != present:
        yield f"{name} was {frozen} and is {present}"


def _chosen(name: str, part: Any, members: tuple[str, ...]) -> Any:
    if not isinstance(part, dict):
        return part
    kept = {
        member: part[member]
        for member in sorted(members)
        if member in part and member not in (BASES, ABSTRACT)
    }
    if BASES not in part:
        return kept
    abstract = {ABSTRACT: part[ABSTRACT]} if name in EXTENDED else {}
    return {BASES: [base for base in part[BASES] if base in KNOWN_BASES], **abstract, **kept}


def _parts(module: ast.Module, names: Names) -> Iterator[tuple[str, Any]]:
    """Yields functions and constants as text. Classes, and functions with listed parts, are dicts."""
    for node in module.body:
        match node:
            case ast.ClassDef(name=name) if name in names:
                yield name, _class_parts(node)
            case ast.FunctionDef(name=name) if names.get(name):
                yield name, {OPERATORS: _operators(node), SOURCE: _text(node), **_keywords(node)}
            case _:
                yield from _texts(node)


def _keywords(node: ast.AST) -> dict[str, list[str]]:
    """Returns the keywords that are passed to attention and mask functions, if these are called."""
    members: dict[str, set[str]] = {}
    for each in ast.walk(node):
        match each:
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if name in CALLED:
                passed = members.setdefault(CALLED[name], set())
                passed.update(keyword.arg for keyword in keywords if keyword.arg is not None)
    return {member: sorted(passed) for member, passed in members.items()}


def _operators(node: ast.AST) -> list[str]:
    """Returns the names after `torch.ops.aten`."""
    operators: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Attribute(attr="aten"), attr=name):
                operators.add(name)
    return sorted(operators)


def _class_parts(node: ast.ClassDef) -> dict[str, Any]:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    # Attributes that methods set come first, so that declarations of the class replace them.
    parts: dict[str, Any] = {name: "attribute" for method in methods for name in _set_on_self(method)}
    for item in node.body:
        parts.update(_texts(item))
    parts |= _keywords(node)
    parts[BASES] = [ast.unparse(base).partition("[")[0] for base in node.bases]
    parts[ABSTRACT] = sorted(method.name for method in methods if "abstractmethod" in _decorators(method))
    return parts


def _texts(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef):
        kinds = [kind for kind in ("staticmethod", "classmethod", "property") if kind in _decorators(node)]
        parameters = _text(node.args)
        if node.name in IGNORED:
            parameters = re.sub(rf", {IGNORED[node.name]}=\w+", "", parameters)
        yield node.name, " ".join([*kinds, f"({parameters})"])
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, f"= {ast.unparse(node.value)}"
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        value = "" if node.value is None else f" = {ast.unparse(node.value)}"
        yield node.target.id, f": {ast.unparse(node.annotation)}{value}"


def _set_on_self(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def _text(node: ast.arguments | ast.FunctionDef) -> str:
    """Returns parameters, or a whole function, as text without annotations and docstrings."""
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            each.annotation = None
        elif isinstance(each, ast.FunctionDef):
            each.returns = None
            each.body = each.body[ast.get_docstring(each) is not None :]
    return ast.unparse(node)


def newest_wheel(library: str, folder: Path) -> Path:
    """Returns the newest wheel for this machine, downloaded into a folder."""
    options = ("--quiet", "--no-deps", "--dest", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "download", *options, library], check=True)
    (wheel,) = folder.glob(f"{library}-*.whl")
    return wheel


def compare(library: str, path: Path) -> int:
    """Prints the differences of a version from the frozen one, and returns their number."""
    frozen = frozen_contract(library)
    present = contract_of(library, path)
    lines = differences(frozen, present)
    print(f"{library} {present['version']}: {len(lines)} differences from {frozen['version']}")
    for line in lines:
        print(f"  {line}")
    return len(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compares or freezes, and returns 1 if there is a difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("library", nargs="?", choices=LIBRARIES)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--newest", action="store_true")
    options = parser.parse_args(arguments)
    if options.newest:
        count = 0
        for library in [options.library] if options.library else LIBRARIES:
            with tempfile.TemporaryDirectory() as folder:
                count += compare(library, newest_wheel(library, Path(folder)))
        return int(count > 0)
    if options.library is None or options.path is None:
        parser.error("pass a library and its wheel or folder, or --newest")
    if options.write:
        present = contract_of(options.library, options.path)
        if names := absent(options.library, present):
            sys.exit(
                f"error: {options.library} {present['version']} lacks {', '.join(names)}: if flashtune no "
                f"longer needs them, delete them in {FROZEN / options.library}.json and freeze again"
            )
        document = json.dumps(present, indent=1)
        (FROZEN / f"{options.library}.json").write_text(document + "\n", encoding="utf-8")
        return 0
    return int(compare(options.library, options.path) > 0)


if __name__ == "__main__":
    sys.exit(main())
