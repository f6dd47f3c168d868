"""Packs a bundle into a wheel of data, such as flashtune-kernels-sm90, in which flashtune finds it.

python -m scripts.kernels_wheel FILE --out dist
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from flashtune.bundle.bundle_file import open_bundle
from flashtune.core import VERSION
from flashtune.core.errors import BundleError, FlashtuneError
from flashtune.launch.bundles import FILE, PACKAGE

# The most that a package may have, so that it is downloaded in seconds.
MAX_BYTES = 40_000_000

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Compiled kernels of flashtune for GPUs of the architecture {arch}"
license = "Apache-2.0"

[tool.setuptools]
packages = ["{package}"]
package-data = {{ "*" = ["{file}"] }}
"""


def make_wheel(file: Path, out: Path) -> str:
    """Writes the wheel of a bundle into a folder, and returns a sentence about its kernels."""
    bundle = open_bundle(file)
    arch, written = bundle.index.arch, bundle.index.flashtune
    if written != VERSION:
        raise BundleError(
            f"{file} was written by flashtune {written}, and flashtune {VERSION} uses none of its kernels: "
            "build it again"
        )
    if file.stat().st_size > MAX_BYTES:
        raise BundleError(
            f"{file} has {file.stat().st_size / 1e6:.1f} MB, and a wheel of kernels has at most "
            f"{MAX_BYTES / 1e6:g} MB: build it of fewer shapes (flashtune/tuner/tables/bundles.py)"
        )
    bundle.check_all()
    entries = [*bundle.entries()]
    compilers = sorted({f"Triton {entry.triton} with ptxas {entry.ptxas}" for entry in entries})
    package = PACKAGE.format(arch.removeprefix("sm_"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / FILE).write_bytes(file.read_bytes())
        project = PROJECT.format(
            name=package.replace("_", "-"), version=VERSION, arch=arch, package=package, file=FILE
        )
        (folder / "pyproject.toml").write_text(project, encoding="utf-8")
        command = [sys.executable, "-m", "build", "--quiet", "--no-isolation", "--wheel"]
        subprocess.run([*command, "--outdir", str(out), name], check=True, stdout=subprocess.DEVNULL)
    verified = sum(bool(entry.verified_on) for entry in entries)
    return f"{len(entries)} kernels for {arch}, {verified} of them verified, by {' and '.join(compilers)}"


def main() -> None:
    """Packs the file that the command line names."""
    parser = argparse.ArgumentParser(description="Packs a bundle into a wheel.")
    parser.add_argument("file", type=Path, help="a bundle")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="a folder for the wheel")
    options = parser.parse_args()
    try:
        print(f"{options.out} has a wheel of {make_wheel(options.file, options.out)}")
    except FlashtuneError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
