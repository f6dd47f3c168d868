"""A test that lists the mutable state of modules outside of `flashtune.runtime.session.SESSION`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "flashtune"
# Packages that other packages see through a link.
LINKED = ("db", "templates", "tuner")
CONTAINERS = (
    "dict",
    "set",
    "list",
    "defaultdict",
    "deque",
    "WeakKeyDictionary",
    "Counter",
)
LOCKS = ("ModuleLock", "Lock", "RLock", "Condition", "Event", "local")
CACHES = ("cache", "lru_cache")

# The exceptions, each with its reason.
STATE = {
    "integrations/flash_attn/patching.py _lock": "guards sys.modules",
    "integrations/flash_attn/patching.py _replaced": "modules to restore in sys.modules",
    "integrations/torch.py _changing": "guards torch's table of operators",
    "integrations/torch.py _removed": "overrides that other threads may still call",
    "launch/compilation.py _LOADING": "guards the import of rendered files",
    "launch/compilation.py _launching": "guards Triton's launchers",
    "launch/tma_descriptors.py _thread": "descriptors of one thread's launches",
    "launch/workspaces.py _kept": "GPU memory of launches, by stream",
    "core/files.py _lock_files": "a forked child closes them",
    "core/files.py _lock_faults": "file systems of folders, below all sessions",
    "core/notices.py _seen_messages": "warnings of modules below all sessions",
    "core/notices.py _telling": "guards warnings",
}
# Modules with caches.
OWNERS = (
    "core/files.py",
    "core/notices.py",
    "dispatch/masked_sdpa.py",
    "runtime/kernel_loader.py",
    "runtime/self_check.py",
    "runtime/session.py",
)
FUNCTIONS = {
    "api/merge_states.py _length": "CUDA graphs may read the tensor",
    "core/canonical_source.py canonical_source": "a function of its argument",
    "dispatch/forecast.py _span": "a function of its arguments",
    "dispatch/masked_sdpa.py _levels": "CUDA graphs may read the tensors",
    "dispatch/sdpa_times.py _schedule_ms": "a function of its arguments",
    "dispatch/masked_sdpa.py _unfused_leads": "a function of its arguments",
    "dispatch/tables.py tuned_records": "decisions do not change in a process",
    "dispatch/versions.py current_versions": "installed versions do not change",
    "integrations/operator_overrides.py _allocators": "a function of its arguments",
    "integrations/sglang_backend.py backend_class": "a class is defined once",
    "integrations/vllm_backend.py host_classes": "a class is defined once",
    "launch/compilation.py interpreting": "Triton reads the variable once",
    "launch/packed_tail.py _compiled": "loaded kernels stay loaded",
    "launch/tma_descriptors.py _maker": "a driver does not change",
    "request/quantization.py cached_ones": "CUDA graphs may read the tensor",
}


def module_trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] not in LINKED:
            yield str(name), ast.parse(path.read_text())


def called(node: ast.expr | None) -> str:
    """The name of the function that an expression calls or refers to."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_state(name: str, value: ast.expr | None) -> bool:
    """Whether a name of a module is a lock or a container that code may change. Constants are upper-case."""
    if isinstance(value, ast.Call) and called(value) in LOCKS:
        return True
    display = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    is_container = isinstance(value, display) or (isinstance(value, ast.Call) and called(value) in CONTAINERS)
    return is_container and not name.isupper() and name != "__all__"


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
    unbounded = set()
    for path, tree in module_trees():
        nodes = [*ast.walk(tree)]
        caches = {
            ast.unparse(node.target)
            for node in nodes
            if isinstance(node, ast.AnnAssign)
            if path in OWNERS and isinstance(node.value, ast.Dict)
        }
        unbounded |= {
            f"{path} {ast.unparse(node)}"
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            if ast.unparse(node.value) in caches
        }
    assert unbounded == set()


def test_no_other_functions_keep_their_results() -> None:
    names = {
        f"{path} {node.name}"
        for path, tree in module_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(called(decorator) in CACHES for decorator in node.decorator_list)
    }
    assert names == {*FUNCTIONS}
