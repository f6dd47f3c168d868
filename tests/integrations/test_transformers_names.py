"""Tests of the registration in transformers that need no transformers."""

import sys

import pytest

from flashtune.core.errors import UsageError
from flashtune.integrations import transformers as integration
from tests.support.host_stubs import report_version


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
