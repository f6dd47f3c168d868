"""Tests of the frozen contracts of other libraries, and of flashtune's classes against them."""

import importlib
import inspect
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from flashtune import FlashtuneWarning, UsageError
from flashtune.integrations import sglang, sglang_backend, transformers_masks, vllm
from scripts import host_contracts
from tests.support import host_stubs
from tests.support.runtime import forget_all

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = host_contracts.LIBRARIES
VLLM = "vllm.v1.attention.backend"
SGLANG = "sglang.srt.layers.attention.base_attn_backend"
# Our class, and the frozen classes whose methods it replaces.
CLASSES = [
    ("vllm", "Backend", ((VLLM, "AttentionBackend"),)),
    ("vllm", "Builder", ((VLLM, "AttentionMetadataBuilder"),)),
    (
        "vllm",
        "Impl",
        ((VLLM, "AttentionImpl"), ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl")),
    ),
    ("sglang", "Backend", ((SGLANG, "AttentionBackend"),)),
]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_library_has_the_frozen_contract(library: str) -> None:
    try:
        folder = metadata.distribution(library).locate_file("")
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    contract = host_contracts.contract_of(library, Path(str(folder)))
    assert host_contracts.differences(host_stubs.contract(library), contract) == []


@pytest.mark.parametrize(("library", "name", "hosts"), CLASSES, ids=["backend", "builder", "impl", "sglang"])
def test_methods_take_the_arguments_of_the_host(
    library: str, name: str, hosts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_stubs.install(library, monkeypatch)
    module = importlib.import_module(f"flashtune.integrations.{library}_backend")
    ours = module.backend_class() if library == "sglang" else getattr(module, name)
    assert not inspect.isabstract(ours)
    compared = 0
    for file, host in hosts:
        for method, text in host_stubs.contract(library)["modules"][file][host].items():
            own = vars(ours.__bases__[0]).get(method)
            function = getattr(own, "__func__", own)
            if not inspect.isfunction(function):
                continue
            kind = "" if function is own else f"{type(own).__name__} "
            assert text.startswith(f"{kind}("), f"{host}.{method} is {text}"
            wanted = parameter_names(text)
            parameters = [*inspect.signature(function).parameters]
            assert parameters[: len(wanted)] == wanted, f"{host}.{method} takes {text}"
            compared += 1
    assert compared > 3


def parameter_names(text: str) -> list[str]:
    """The names of a frozen signature's parameters."""
    inner = text[text.index("(") + 1 : text.rindex(")")]
    names = (part.strip().partition("=")[0].lstrip("*") for part in inner.split(","))
    return [name for name in names if name]


def test_older_versions_may_lack_what_was_added_later() -> None:
    frozen = host_stubs.contract("transformers")
    name = next(iter(host_contracts.ADDED))
    module, _, function = name.rpartition(".")
    parts = {key: part for key, part in frozen["modules"][module].items() if key != function}
    older: dict[str, Any] = {"version": "5.17.0", "modules": {**frozen["modules"], module: parts}}
    assert host_contracts.differences(frozen, older) == []
    assert host_contracts.differences(frozen, {**older, "version": "5.23.0"}) == [f"{name} is gone"]


MASKS = '''
def and_masks(*mask_functions: Callable, kind=None) -> Callable:
    """Returns whether all hold."""
    def and_mask(q: int, kv: int) -> bool:
        """Returns whether all hold."""
        return all(mask(q, kv) for mask in mask_functions)
    return and_mask

def sdpa_mask(batch_size: int, q_length=1, *, allow_torch_fix=True, device="cpu", **kwargs): ...

def create_causal_mask(config):
    return mask_interface(batch_size=1, mask_function=and_masks(), **options)
'''
AND_MASKS = """def and_masks(*mask_functions, kind=None):

    def and_mask(q, kv):
        return all((mask(q, kv) for mask in mask_functions))
    return and_mask"""


def test_functions_are_frozen_as_signature_or_source_or_keywords(tmp_path: Path) -> None:
    contract = masks_of(MASKS, tmp_path)
    assert contract["modules"]["transformers.masking_utils"] == {
        "and_masks": {"source": AND_MASKS},
        "sdpa_mask": "(batch_size, q_length=1, *, device='cpu', **kwargs)",
        "create_causal_mask": {"keywords of mask_interface": ["batch_size", "mask_function"]},
    }
    lines = host_contracts.differences(host_stubs.contract("transformers"), contract)
    assert "transformers.masking_utils.create_causal_mask.keywords of mask_interface: config is gone" in lines
    assert "transformers.masking_utils.sliding_window_overlay is gone" in lines


def test_torch_is_not_frozen_without_the_list_of_operators() -> None:
    present = host_stubs.contract("torch")
    modules = {name: part for name, part in present["modules"].items() if name != "aten"}
    assert host_contracts.absent("torch", present) == []
    assert host_contracts.absent("torch", {**present, "modules": modules}) == ["aten"]


def test_new_parameters_are_named(tmp_path: Path) -> None:
    frozen = masks_of(MASKS, tmp_path)
    changed = MASKS.replace("allow_torch_fix=True", "brand_new").replace("kind=None", "kind")
    both = host_contracts.differences(frozen, masks_of(changed, tmp_path))
    of_masks, of_sdpa = (line.removeprefix("transformers.masking_utils.") for line in both)
    assert of_masks.startswith(
        f"and_masks.source was {AND_MASKS} and is def and_masks(*mask_functions, kind)"
    )
    assert of_sdpa.endswith("and is (batch_size, q_length=1, *, brand_new, device='cpu', **kwargs)")


def masks_of(source: str, folder: Path) -> dict[str, Any]:
    """The contract of a version of transformers that has only these masks."""
    module = folder / "transformers/masking_utils.py"
    for parent in (module.parent, folder / "transformers-6.0.dist-info"):
        parent.mkdir(exist_ok=True)
    module.write_text(source, encoding="utf-8")
    return host_contracts.contract_of("transformers", folder)


def test_masks_take_what_transformers_passes() -> None:
    """The keywords of its calls are parameters, or ignored for the reasons here."""
    parts = host_stubs.contract("transformers")["modules"]["transformers.masking_utils"]
    taken = {*inspect.signature(transformers_masks.attention_mask).parameters}
    passed = {
        word
        for part in parts.values()
        if isinstance(part, dict)
        for word in part.get(host_contracts.TO_MASK, ())
    }
    # `config` is read from `others`. Additive masks alone have a type. Mask functions have the window.
    assert passed - taken == {"config", "dtype", "local_size"}


def test_signatures_are_frozen_without_annotations(tmp_path: Path) -> None:
    module = tmp_path / "vllm/v1/attention/backend.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "vllm-1.0.dist-info").mkdir()
    module.write_text(
        "class AttentionImpl(AttentionImplBase[T], Generic[T]):\n"
        "    supports_pcp: bool = False\n"
        "    @abstractmethod\n"
        "    def forward(self, layer: int, *, key: str = 'k') -> None: ...\n"
        "    @classmethod\n"
        "    def fused_output_quant_supported(cls): self.hidden = 1\n",
        encoding="utf-8",
    )
    contract = host_contracts.contract_of("vllm", tmp_path)
    assert contract["modules"]["vllm.v1.attention.backend"]["AttentionImpl"] == {
        "bases": ["AttentionImplBase"],
        "abstract methods": ["forward"],
        "forward": "(self, layer, *, key='k')",
        "fused_output_quant_supported": "classmethod (cls)",
    }


def test_registration_in_vllm_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = host_stubs.install("vllm", monkeypatch)["vllm.v1.attention.backends.registry"]
    paths: dict[str, str] = {}
    registry.AttentionBackendEnum = SimpleNamespace(__members__=paths)
    registry.register_backend = paths.setdefault
    vllm.register()
    vllm.plugin()
    assert paths == {"FLASHTUNE": "flashtune.integrations.vllm_backend.Backend"}
    module, _, name = paths["FLASHTUNE"].rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() == "FLASHTUNE"


def test_registration_in_sglang_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = host_stubs.install("sglang", monkeypatch)
    choices = ["triton"]
    makers: dict[str, Any] = {}
    modules["sglang.srt.arg_groups.choices"].ATTENTION_BACKEND_CHOICES = choices
    deterministic: list[list[str]] = [[], []]
    for name, names in zip(sglang.ADDERS, (choices, *deterministic), strict=True):
        setattr(modules["sglang.srt.arg_groups.choices"], name, names.extend)
    registry = modules["sglang.srt.layers.attention.attention_registry"]
    registry.register_attention_backend = lambda name: lambda made: makers.setdefault(name, made)
    sglang.register()
    sglang.register()
    assert choices == ["triton", "flashtune"]
    assert deterministic == [["flashtune"], ["flashtune"]]
    assert makers == {"flashtune": sglang_backend.make_backend}


@pytest.mark.parametrize(("library", "register"), [("vllm", vllm.register), ("sglang", sglang.register)])
def test_a_missing_or_old_library_is_named(
    library: str, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"{library} is not installed"):
        register()
    host_stubs.report_version(monkeypatch, library, "0.1")
    with pytest.raises(UsageError, match=f"{library} 0.1 is too old"):
        register()


@pytest.mark.parametrize(("library", "plugin"), [("vllm", vllm.plugin), ("sglang", sglang.plugin)])
def test_an_old_library_starts_with_a_warning(
    library: str, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_all()
    host_stubs.report_version(monkeypatch, library, "0.0.1")
    with pytest.warns(FlashtuneWarning, match=f"(?i)backend flashtune: {library} 0.0.1 is too old"):
        plugin()


@pytest.mark.parametrize(
    ("library", "host", "missing", "least"),
    [
        ("vllm", vllm, "vllm.v1.attention.backends.registry.register_backend", "0.33"),
        ("sglang", sglang, "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES", "0.5.23"),
    ],
    ids=["vllm", "sglang"],
)
def test_a_name_that_a_newer_library_lacks_is_named(
    library: str, host: Any, missing: str, least: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_stubs.install(library, monkeypatch)
    host_stubs.report_version(monkeypatch, library, "99.1")
    says = f"{library} 99.1 has no {missing}: install {library} {least} or a newer flashtune$"
    with pytest.raises(UsageError, match=f"^{says}"):
        host.register()
    forget_all()
    with pytest.warns(FlashtuneWarning, match=says):
        host.plugin()


def test_a_module_that_a_newer_library_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    host_stubs.install("vllm", monkeypatch)
    monkeypatch.delitem(sys.modules, vllm.REGISTRY)
    with pytest.raises(UsageError, match=f"vllm 0.33.0 has no {vllm.REGISTRY}: install vllm 0.33"):
        vllm.register()


@pytest.mark.parametrize(
    ("library", "module", "group"),
    [
        ("vllm", "vllm.plugins", "DEFAULT_PLUGINS_GROUP"),
        ("sglang", "sglang.srt.plugins", "GENERAL_PLUGINS_GROUP"),
    ],
    ids=["vllm", "sglang"],
)
def test_entry_points_warn_instead_of_raising(library: str, module: str, group: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = host_stubs.contract(library)["modules"][module][group].removeprefix("= ").strip("'")
    points = project["entry-points"][name]
    assert points == {"flashtune": f"flashtune.integrations.{library}:plugin"}
    assert metadata.EntryPoint("flashtune", points["flashtune"], name).load().__name__ == "plugin"


def test_extra_constraint_and_page_agree_on_versions_of_kernels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extra,) = project["optional-dependencies"]["kernels"]
    assert extra in project["optional-dependencies"]["dev"]
    pinned = re.search("^kernels==(.+)$", (ROOT / "constraints/common.txt").read_text("utf-8"), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in Requirement(extra).specifier
    page = (ROOT / "docs/integrations/hub_kernel.md").read_text(encoding="utf-8")
    assert f"`{extra}`" in page
    table = pytest.importorskip("transformers.dependency_versions_table")
    assert f"`{table.deps['kernels']}`" in page
