import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from flashtune.core import VERSION
from flashtune.core.errors import FlashtuneError, StoreError, UsageError
from flashtune.core.target import TARGETS
from flashtune.templates.registry import families
from flashtune.tuner.cli import COMMANDS, main
from flashtune.tuner.cli.command import Command
from flashtune.tuner.cli.options import problem_options, target_options
from flashtune.tuner.cli.output import progress_lines
from flashtune.tuner.workloads.presets import MODELS
from scripts.reference import commands, reference
from tests.tuner.cli.conftest import Run

HEAVY = ("torch", "triton", "optuna", "sqlalchemy", "alembic", "jinja2", "rich", "msgspec", "numpy")


def test_help_imports_only_click() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from flashtune.tuner.cli import main\n"
        "result = CliRunner().invoke(main, ['--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lists_of_names_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from flashtune.tuner.cli import main\n"
        "for name in ('models', 'targets', 'families', 'shapes'):\n"
        "    main([name], standalone_mode=False)\n"
        "print([module for module in ('torch', 'triton', 'jinja2') if module in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def show_fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Result:
    @click.command("show")
    def command() -> None:
        raise error

    monkeypatch.setattr("flashtune.tuner.cli.commands.show.command", command)
    return CliRunner().invoke(main, ["show"])


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (FlashtuneError("the work failed"), 1, "flashtune: the work failed\n"),
        (StoreError("the disk is\nfull"), 1, "flashtune: the disk is full\n"),
        (StoreError("a row says \x1b[2J"), 1, "flashtune: a row says ?[2J\n"),
        (UsageError("no such thing"), 2, "flashtune: no such thing\n"),
        (KeyboardInterrupt(), 130, "flashtune: interrupted; finished results are stored\n"),
    ],
)
def test_errors_are_one_sentence_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, sentence: str
) -> None:
    result = show_fails(monkeypatch, error)
    assert result.exit_code == code
    assert result.stderr == sentence
    assert result.stdout == ""


def test_unexpected_exceptions_are_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    result = show_fails(monkeypatch, RuntimeError("a bug"))
    assert isinstance(result.exception, RuntimeError)


@click.command()
@problem_options()
@target_options
def probe(problems: tuple[object, ...], target: object, device: int | None) -> None:
    click.echo(f"{len(problems)} {getattr(target, 'name', '')} {device}")


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(probe, arguments)


def test_shapes_models_and_files_are_merged_without_duplicates() -> None:
    shape = "heads=32,kv_heads=8,seqlen=4096,head_dim=128,causal"
    line = f"--target H100 --shape {shape} --model llama-3.1-8b --shape heads=1,seqlen=1|2,head_dim=8"
    result = ask(*line.split())
    assert result.output == "3 nvidia-h100 None\n"


def test_training_adds_both_passes_of_shapes_and_models() -> None:
    shape = ("--shape", "heads=1,seqlen=1|2,head_dim=8", "--shape", "heads=1,seqlen=1,head_dim=8,backward")
    target = ("--target", "H100", "--phase", "training")
    assert ask(*target, *shape).output == "4 nvidia-h100 None\n"
    assert ask(*target, "--model", "llama-3.1-8b").output == "2 nvidia-h100 None\n"


def test_target_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_TARGET", "l4")
    assert ask("--model", "phi-2").output == "1 nvidia-l4 None\n"
    assert ask("--model", "phi-2", "--target", "a100").output == "1 nvidia-a100 None\n"
    # A device that the command line names is not contradicted by the environment.
    result = ask("--model", "phi-2", "--device", "99")
    assert "no GPU is visible" in str(result.exception)


def test_partial_model_name_suggests_models_with_that_prefix() -> None:
    result = ask("--target", "h100", "--model", "llama-3.1")
    assert "did you mean 'llama-3.1-8b', 'llama-3.1-70b' or 'llama-3.1-405b'?" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("search", "--target", "rtx"), ["rtx-4090", "rtx-5090"]),
        (("show", "--target", "h"), ["h100", "h200"]),
        (("doctor", "--target", "mi"), ["mi300x"]),
        (("render", "--model", "llama-3.1-"), ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]),
        (("search", "--family", "decode"), ["decode_latent_hopper", "decode_split_kv"]),
        (("explain", "--family", "forward_q"), ["forward_q_outer"]),
        (("fam",), ["families"]),
    ],
)
def test_shell_completion_of_names(words: tuple[str, ...], completed: list[str]) -> None:
    environment = {"_FLASHTUNE_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words))}
    environment["COMP_WORDS"] = " ".join(("flashtune", *words))
    result = CliRunner(env=environment).invoke(main, [], prog_name="flashtune")
    assert result.output.split() == [f"plain,{word}" for word in completed]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"analyze", "bundle", "db", "queue"}))
def test_help_examples_can_be_parsed(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, Command)
    assert command.examples
    for example in command.examples:
        program, called, *arguments = shlex.split(example)
        assert program == "flashtune"
        example_of = main.get_command(click.Context(main), called)
        assert example_of is not None
        assert example_of.make_context(called, arguments).args == []
    assert any(shlex.split(example)[1] == name for example in command.examples)


def test_options_are_grouped(run: Run) -> None:
    text = run("search", "--help").output
    places = [
        text.index(f"\n{title}:") for title in ("Shapes", "GPU", "Options", "Output", "General", "Examples")
    ]
    assert places == sorted(places)
    assert text.index("--shape SHAPE") < text.index("\nGPU:") < text.index("--device INDEX")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("targets", "--json"),
        # The output is longer than a buffer.
        ("show", "--shipped", "--json"),
    ],
)
def test_output_to_a_full_disk_raises_one_sentence(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flashtune.tuner.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "flashtune: cannot write the output: No space left on device; write it elsewhere\n"
    )


def test_models_targets_and_families_are_listed(run: Run) -> None:
    for name, listed in (("models", MODELS), ("targets", TARGETS), ("families", families())):
        told, rows = run(name), json.loads(run(name, "--json").stdout)
        assert told.exit_code == 0, told.output
        assert len(rows) == len(listed)
        assert len(told.stdout.splitlines()) > len(listed)
    assert "llama-3.1-8b" in run("models").stdout
    assert next(row for row in rows if row["name"] == "forward_hopper")["language"] == "gluon"
    lines = run("targets").stdout.splitlines()
    assert [line.split()[0] for line in lines if line.rstrip().endswith("ships")] == ["h100", "h200"]


def test_version_is_printed(run: Run) -> None:
    assert run("--version").stdout == f"flashtune {VERSION}\n"


def test_progress_without_a_terminal_has_a_line_in_twenty_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = itertools.count(0.0, 9.0)
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    show = progress_lines()
    for done in range(5):
        show("compiling", done, 5)
    assert capsys.readouterr().err == "flashtune: compiling: 2 of 5, about 27 s left\n"


PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
ALL = list(commands(click.Context(main, info_name="flashtune")))


def test_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "write it anew: python -m scripts.reference > docs/cli.md"
    )


@pytest.mark.parametrize(("name", "command", "ctx"), ALL, ids=[name for name, _, _ in ALL])
def test_every_command_and_option_has_help(name: str, command: click.Command, ctx: click.Context) -> None:
    assert command.help, name
    assert command.name == name.rpartition(" ")[2]
    for param in command.get_params(ctx):
        if isinstance(param, click.Option):
            assert param.help, f"{name} {param.name}"
