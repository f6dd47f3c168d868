"""Tests of docs/fleets.md as far as a machine without a cluster allows."""

import os
import subprocess
from pathlib import Path

import click
import pytest

from flashtune.tuner.cli import main
from scripts.code_blocks import ROOT, code_blocks

BLOCKS = {block.needs: block.text for block in code_blocks(ROOT / "docs/fleets.md")}


def test_manifest_is_a_job_whose_command_has_valid_options() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    job = yaml.safe_load(BLOCKS["Kubernetes"])
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("OnFailure", "Never")
    (container,) = pod["containers"]
    program, name, *arguments = container["command"]
    assert program == "flashtune"
    command = main.get_command(click.Context(main), name)
    assert command is not None
    command.make_parser(click.Context(command)).parse_args(arguments)
    (variable,) = container["env"]
    assert variable["name"] == "FLASHTUNE_DB"


def test_ssh_loop_starts_a_worker_on_each_host(tmp_path: Path) -> None:
    """Each host is a local shell, and the worker a script that writes its arguments and its database."""
    programs = {
        "ssh": '#!/bin/bash\nmkdir -p "$1" && cd "$1" && bash -c "$2"\n',
        "flashtune": '#!/bin/bash\necho "$@ on $FLASHTUNE_DB"; touch done\n',
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FLASHTUNE_DB": "a b"}
    script = BLOCKS["ssh"] + "until ls gpu1/done gpu2/done gpu3/done > /dev/null 2>&1; do sleep 0.05; done\n"
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60)
    for host in ("gpu1", "gpu2", "gpu3"):
        log = (tmp_path / host / "worker.log").read_text()
        assert log == "worker --devices all --exit-when-empty on a b\n"
