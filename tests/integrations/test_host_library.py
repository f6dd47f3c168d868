"""Tests of the import of host libraries, their versions, and the registration in a missing one."""

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from flashtune import UsageError
from flashtune.integrations import transformers as integration
from flashtune.integrations import wait
from flashtune.integrations.host_library import host_attribute, host_library
from tests.support.host_stubs import report_version

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a version of a distribution in front of others."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, version: str) -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return install


def test_an_installed_library_is_imported() -> None:
    assert host_library("msgspec", "0.1") is msgspec


@pytest.mark.parametrize(
    ("found", "least", "below", "says"),
    [
        ("5.9", "5.10", None, "too old: install msgspec >= 5.10"),
        ("6.0.1", "5.10", "6", "too new: install msgspec >= 5.10, < 6"),
        ("6.0rc1", "5.10", "6.0", "too new"),
    ],
)
def test_other_versions_are_named(
    install: Install, found: str, least: str, below: str | None, says: str
) -> None:
    install("msgspec", found)
    with pytest.raises(UsageError, match=says):
        host_library("msgspec", least, below)


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.13", "2.12.9"])
def test_versions_in_the_range_are_taken(install: Install, found: str) -> None:
    install("msgspec", found)
    assert host_library("msgspec", "2.11", "2.14") is msgspec


def test_a_missing_library_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"^nothing-of-this-name is not installed: install"):
        host_library("nothing_of_this_name.part", "1.0", distribution="nothing-of-this-name")


def test_a_library_that_does_not_import_is_named(install: Install) -> None:
    install("no_such_module", "1.0")
    with pytest.raises(UsageError, match="no_such_module cannot be imported"):
        host_library("no_such_module", "1.0")


def test_a_module_that_a_newer_version_lacks_is_named() -> None:
    version = metadata.version("msgspec")
    says = f"^msgspec {version} has no msgspec.gone: install msgspec 0.1 or a newer flashtune$"
    with pytest.raises(UsageError, match=says):
        host_library("msgspec.gone", "0.1")
    with pytest.raises(UsageError, match=says):
        host_library("msgspec.gone.inner", "0.1")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "from host_of_test.v1 import moved_helper",
            "cannot import name 'moved_helper' from 'host_of_test.v1'",
        ),
        (
            "from host_of_test.v1.registry import later\nlater = 1",
            "cannot import name 'later' from partially",
        ),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
    ],
    ids=["name", "circle", "other"],
)
def test_the_error_of_a_module_that_is_there_is_told(
    source: str, says: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "host_of_test/v1"
    package.mkdir(parents=True)
    (package / "registry.py").write_text(source, encoding="utf-8")
    install("host_of_test", "1.0")
    for name in ("host_of_test", "host_of_test.v1"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError, match=rf"^host_of_test.v1.registry cannot be imported \({says}"):
        host_library("host_of_test.v1.registry", "1.0")


def test_a_name_that_a_newer_version_lacks_is_named() -> None:
    assert host_attribute("msgspec.json", "encode", "0.1") is msgspec.json.encode
    says = r"^msgspec \S+ has no msgspec.json.gone: install msgspec 0.1 or a newer flashtune$"
    with pytest.raises(UsageError, match=says):
        host_attribute("msgspec.json", "gone", "0.1")
    with pytest.raises(UsageError, match=r"is too new: install msgspec >= 0\.1, < 0\.2$"):
        host_attribute("msgspec.json", "gone", "0.1", "0.2")


def test_nothing_is_waited_for_without_calls() -> None:
    assert wait(0.0)


@pytest.mark.parametrize("name", ["flashtune", "my_flash", "sdpa", "eager", "", "org/kernel", "a|b"])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(UsageError, match=r"name is .*: .*pass"):
        integration.register(name)


def test_a_missing_library_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    report_version(monkeypatch, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UsageError, match=r"^transformers is not installed: install transformers >= 5.17, < 6$"
    ):
        integration.register()


@pytest.mark.parametrize(("version", "age"), [("5.16.2", "old"), ("6.0.0", "new")])
def test_other_versions_give_one_sentence(monkeypatch: pytest.MonkeyPatch, version: str, age: str) -> None:
    report_version(monkeypatch, "transformers", version)
    with pytest.raises(UsageError, match=f"is too {age}: install transformers >= 5.17, < 6$"):
        integration.register()
