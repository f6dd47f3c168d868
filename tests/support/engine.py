"""Builds the C++ program of examples/engine."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "examples/engine/bundle_forward.cpp"


def build(folder: Path, libraries: Path) -> Path:
    """Returns the program, built by the command in its header. `libraries` has the driver's library.

    Skips the test if the compiler or a header is missing.
    """
    import triton

    include = Path(triton.__file__).parent / "backends/nvidia/include"
    stated = re.search(r"^//   (g\+\+ .*)$", SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert stated is not None
    if shutil.which("g++") is None or not (include / "cuda.h").exists():
        pytest.skip("needs g++ and cuda.h")
    for header in ("lzma.h", "zlib.h"):
        command = ["g++", "-E", "-x", "c++", "-include", header, "/dev/null"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"needs {header}")
    program = folder / "bundle_forward"
    words = {"CUDA/include": str(include), "bundle_forward.cpp": str(SOURCE), "bundle_forward": str(program)}
    command = [words.get(word, word) for word in shlex.split(stated[1])]
    subprocess.run([*command, f"-L{libraries}", "-Wall", "-Wextra", "-Werror"], check=True)
    return program
