"""Tests of the modules that an import of flashtune loads, in new processes."""

import json
import subprocess
import sys
import textwrap

import pytest

HEAVY = ("optuna", "sqlalchemy", "alembic", "click", "jinja2", "rich", "pebble")


def run(program: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=False, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


@pytest.mark.slow
def test_runtime_imports_no_heavy_modules() -> None:
    told = run(
        f"""
        import json, sys, torch, triton
        before = {{name for name in {HEAVY} if name in sys.modules}}
        import flashtune
        flashtune.attention, flashtune.plan, flashtune.explain, flashtune.table_hash, flashtune.__version__
        flashtune.table_hash("nvidia-h200")
        print(json.dumps(sorted(name for name in {HEAVY} if name in sys.modules and name not in before)))
        """
    )
    assert json.loads(told) == []


def test_import_of_flashtune_loads_no_heavy_modules() -> None:
    told = run("import sys, flashtune; print(*{'torch', 'triton', 'msgspec'} & set(sys.modules))")
    assert told == ""


def test_public_names_are_listed_and_unknown_names_raise() -> None:
    import flashtune

    assert set(flashtune.__all__) <= set(dir(flashtune))
    assert flashtune.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        flashtune.atention  # type: ignore[attr-defined]  # noqa: B018


def test_all_error_classes_are_exported() -> None:
    import flashtune
    from flashtune.core import errors

    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.FlashtuneError)
    }
    assert classes <= set(flashtune.__all__)
    assert all(issubclass(getattr(flashtune, name), flashtune.FlashtuneError) for name in classes)
