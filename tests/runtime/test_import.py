"""Tests of the import of flashtune: its modules, names and errors."""

import subprocess
import sys

import pytest

import flashtune
from flashtune.core import errors


def test_import_of_flashtune_loads_no_heavy_modules() -> None:
    program = "import sys, flashtune; print(*{'torch', 'triton', 'msgspec'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_public_names_are_listed_and_unknown_names_raise() -> None:
    assert set(flashtune.__all__) <= set(dir(flashtune))
    assert flashtune.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        flashtune.atention  # type: ignore[attr-defined]  # noqa: B018


def test_all_error_classes_are_exported() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.FlashtuneError)
    }
    assert classes <= set(flashtune.__all__)
    assert all(issubclass(getattr(flashtune, name), flashtune.FlashtuneError) for name in classes)
