"""Tests of the frozen contracts of serving libraries, and of flashtune's classes against them."""

from __future__ import annotations

import importlib
import inspect
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashtune import FlashtuneWarning, UsageError
from flashtune.core import notices
from flashtune.integrations import sglang, sglang_backend, vllm
from scripts import host_contracts
from tests.support import host_stubs

LIBRARIES = sorted(host_contracts.RELIED)
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
def test_frozen_contracts_have_all_names(library: str) -> None:
    frozen = host_stubs.contract(library)["modules"]
    for module, names in host_contracts.RELIED[library].items():
        for name, members in names.items():
            assert {*members} <= {*frozen[module][name]} if members else name in frozen[module]


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


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_folder_and_a_wheel_are_read_alike(library: str, tmp_path: Path) -> None:
    written = [*write_package(library, tmp_path)]
    found = host_contracts.contract_of(library, tmp_path)
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        for path in written:
            wheel.write(path, path.relative_to(tmp_path).as_posix())
    assert host_contracts.contract_of(library, tmp_path / "w.whl") == found
    assert found["version"] == "9.1.0"
    assert len(found["modules"]) == 1


def write_package(library: str, folder: Path) -> Iterator[Path]:
    info = folder / f"{library}-9.1.0.dist-info/METADATA"
    module = [*host_contracts.RELIED[library]][1]
    source = folder / f"{module.replace('.', '/')}.py"
    for path, text in ((info, ""), (source, "class AttentionBackend:\n    def forward(self, q: int): ...\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        yield path


def test_differences_name_the_change() -> None:
    def made(**members: Any) -> dict[str, Any]:
        host = {"bases": [], "abstract methods": ["a"], "run": "(self, x)", **members}
        return {"version": "1", "modules": {"pkg.mod": {"Host": host, "f": "(x)"}}}

    frozen = made()
    assert host_contracts.differences(frozen, made()) == []
    assert host_contracts.differences(frozen, made(run="(self, x, y)")) == [
        "pkg.mod.Host.run was (self, x) and is (self, x, y)"
    ]
    assert host_contracts.differences(frozen, made(**{"abstract methods": ["a", "b"]})) == [
        "pkg.mod.Host.abstract methods: b is new"
    ]
    gone = made()
    del gone["modules"]["pkg.mod"]["f"]
    assert host_contracts.differences(frozen, gone) == ["pkg.mod.f is gone"]


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
    found = host_contracts.contract_of("vllm", tmp_path)
    assert found["modules"]["vllm.v1.attention.backend"]["AttentionImpl"] == {
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
    modules["sglang.srt.arg_groups.choices"].add_attention_backend_choices = choices.extend
    registry = modules["sglang.srt.layers.attention.attention_registry"]
    registry.register_attention_backend = lambda name: lambda made: makers.setdefault(name, made)
    sglang.register()
    sglang.register()
    assert choices == ["triton", "flashtune"]
    assert makers == {"flashtune": sglang_backend.make_backend}


@pytest.mark.parametrize(("library", "register"), [("vllm", vllm.register), ("sglang", sglang.register)])
def test_a_missing_or_old_library_is_named(
    library: str, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"{library} is not installed"):
        register()
    monkeypatch.setattr(metadata, "version", lambda _: "0.1")
    with pytest.raises(UsageError, match=f"{library} 0.1 is too old"):
        register()


def test_an_old_vllm_starts_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_seen_messages", set())
    monkeypatch.setattr(metadata, "version", lambda _: "0.32.1")
    with pytest.warns(FlashtuneWarning, match="FLASHTUNE: vllm 0.32.1 is too old"):
        vllm.plugin()
