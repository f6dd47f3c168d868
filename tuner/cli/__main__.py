"""`python -m flashtune.tuner.cli` is `flashtune`."""

from flashtune.tuner.cli import main

main(prog_name="flashtune")
