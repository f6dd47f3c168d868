"""A test that lists the mutable state of modules outside of `flashtune.runtime.session.SESSION`."""

import ast
from collections.abc import Iterator
from pathlib import Path

from flashtune.runtime.session import SESSION

ROOT = Path(__file__).parents[1] / "flashtune"
# Packages that other packages see through a link.
LINKED = ("db", "templates", "tuner")
CONTAINERS = ("dict", "set", "list", "defaultdict", "deque", "WeakKeyDictionary", "Counter")
LOCKS = ("ModuleLock", "Lock", "RLock", "Condition", "Event", "local")
CACHES = ("cache", "lru_cache")

# The exceptions, each with its reason.
STATE = {
    "launch/compilation.py _lock": "guards the import of rendered files and Triton's interpreter",
    "launch/compilation.py parsing": "guards Python's parser, which all sessions share",
    "launch/tma_descriptors.py _thread": "descriptors of one thread's launches",
    "core/decoders.py _building": "guards the types of msgspec, which all sessions share",
    "request/functions/block_lists.py _lists_of": "weak: lists live as long as the program's masks",
    "request/functions/block_lists.py _bands_of": "weak: comparisons live as long as the program's masks",
    "request/functions/block_lists.py _refused": "counts of masks by kind, up to the limit of `keep`",
    "request/functions/built_in.py _windows": "the first windows of functions, up to MAX_KEPT",
    "request/functions/tracing.py _expressions": "by captured values, up to MAX_KNOWN; tensors are weak",
    "request/functions/warm_calls.py _warm": "weak: records live as long as the program's functions",
    "core/files.py _lock_files": "a forked child closes them",
    "core/notices.py _seen_messages": "warnings of modules below all sessions",
}
# Dictionaries with entries that `core.caches.keep` does not add.
ADDED_DIRECTLY = {
    "core/expressions/builder.py self._places": "nodes of one expression, up to MAX_BUILT",
    "core/expressions/builder.py self._splits": "nodes of one expression, up to MAX_BUILT",
    "integrations/torch.py self._libraries": "an entry for each operator",
    "integrations/torch.py self._overrides": "an entry for each operator",
    "kv_cache/block_manager.py self._holdings": "entries are removed with their sequences",
    "launch/bundles.py self._loaded": "loaded kernels stay loaded",
    "launch/bundles.py self._open": "an entry for each architecture",
    "launch/kernel_cache.py self._binaries": "loaded kernels stay loaded",
    "launch/kernel_cache.py self._started": "entries are removed when they are waited for",
    "launch/tma_descriptors.py self._together": "cleared at MAX_ADDRESSES",
    "launch/workspaces.py self._addresses": "an entry for each workspace that is kept",
    "request/functions/tracing.py self.lines": "of one trace",
    "request/functions/tracing.py self.operands": "of one trace",
    "request/functions/tracing.py self.tracer.constants": "of one trace",
    "request/functions/tracing.py tracer.operands": "of one trace",
    "runtime/background.py self._streams": "an entry for each device",
    "runtime/backward_executors.py self._launches": "cleared at MAX_LAUNCHES",
}
FUNCTIONS = {
    "core/machine.py set_ptxas_path": "sets a variable of the environment once",
    "core/machine.py ptxas_version": "the version that a program prints",
    "core/constant_tensors.py constants": "CUDA graphs may read the tensors",
    "dispatch/forecast.py _span": "a function of its arguments, a third of a selection's time",
    "dispatch/sdpa.py _unfused_leads": "a function of its arguments, in each call of SDPA in float32",
    "dispatch/sdpa_times.py _schedule_ms": "a function of its arguments, a seventh of a selection's time",
    "dispatch/tables.py tuned_records": "decisions do not change in a process",
    "integrations/host_library.py host_subclass": "a class is defined once",
    "integrations/operator_overrides.py _allocators": "a function of its arguments, in each served call",
    "core/expressions/derivative.py derivatives": "a function of its argument, up to MAX_KEPT",
    "runtime/visible_lists.py _listing": "loaded kernels stay loaded",
    "request/functions/closures.py _names_of": "a function of its argument, in each call; up to MAX_CODES",
    "core/layouts.py strides_of": "a function of its arguments, in each call of queries in another order",
    "request/functions/call.py _numbers": "captured numbers on a device, up to MAX_KEPT",
    "launch/compilation.py interpreting": "Triton reads the variable once",
    "launch/compilation.py hash_compiler": "Triton's files are hashed once",
}


def module_trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] not in LINKED:
            yield str(name), ast.parse(path.read_text())


def called(node: ast.expr | None) -> str:
    """Returns the name of the function that an expression calls or refers to."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_state(name: str, value: ast.expr | None) -> bool:
    """Returns whether a module's name is a lock or a changeable container. Constants are upper-case."""
    if isinstance(value, ast.Call) and called(value) in LOCKS:
        return True
    display = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    is_container = isinstance(value, display) or (isinstance(value, ast.Call) and called(value) in CONTAINERS)
    return is_container and not name.isupper() and name != "__all__"


def is_kept(path: str, target: ast.expr) -> bool:
    """Returns whether a name is an attribute's or that of a module's state, and not a local variable's."""
    return isinstance(target, ast.Attribute) or f"{path} {ast.unparse(target)}" in STATE


def test_modules_have_no_other_mutable_state() -> None:
    names = set()
    for path, tree in module_trees():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if is_state(ast.unparse(target), node.value):
                    names.add(f"{path} {ast.unparse(target)}")
    assert names == {*STATE}


def test_entries_of_caches_are_added_by_a_function_with_a_limit() -> None:
    nodes = [(path, node) for path, tree in module_trees() for node in ast.walk(tree)]
    caches = {
        called(node.target)
        for path, node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
        if is_kept(path, node.target)
    }
    kept = {name for name, value in vars(SESSION).items() if isinstance(value, dict)}
    assert kept | {"_verdicts", "_seen_messages"} <= caches
    added = {
        f"{path} {ast.unparse(node.value)}"
        for path, node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        if called(node.value) in caches and is_kept(path, node.value)
    }
    assert added == {*ADDED_DIRECTLY}


def test_no_other_functions_keep_their_results() -> None:
    names = {
        f"{path} {node.name}"
        for path, tree in module_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(called(decorator) in CACHES for decorator in node.decorator_list)
    }
    assert names == {*FUNCTIONS}
