"""Tests of command lines that cannot be run: exit code 2, one sentence, and no file."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

SHAPE = "--shape heads=4,kv_heads=2,seqlen=256,head_dim=64"
SEARCH = f"search {SHAPE} --target a100"
EXPLAIN = "explain --target h200"
DECODE = f"{EXPLAIN} --model gpt2 --phase decode"
RENDER = "render --target h100 --model phi-2"
# Refused by the parser, which also prints the usage.
PARSED = [
    ("expalin", "did you mean 'explain'?"),
    ("show --jsn", "--json"),
    ("db merge", "Missing argument"),
    ("import", "Missing argument"),
    (f"bench {SHAPE} --peer nobody", "nobody"),
    (f"bench {SHAPE} --rounds 1", "--rounds"),
    ("bench --load missing.json", "missing.json"),
    ("bench --grid nothing", "nothing"),
    (f"{SEARCH} --trials 0", "--trials"),
    (f"{SEARCH} --seconds 0", "--seconds"),
    (f"{SEARCH} -q -v", "exclude each other"),
]
ERRORS = [
    ("show --target h900", "there is no target 'h900'"),
    ("show --records", "--shape"),
    ("doctor --target h900", "there is no target 'h900'"),
    ("import none.json", "none.json"),
    ("bench", "no shape given"),
    (f"bench {SHAPE} --peer flex --no-peers", "--no-peers"),
    ("explain --target h100 --shape heads=1,seqlen=64,head_dim=512", "no kernel family computes"),
    (f"{EXPLAIN} {SHAPE} --family nope", "there is no kernel family"),
    (EXPLAIN, "no shape given"),
    (f"{EXPLAIN} --model phi-2 --device 0", "use one of them"),
    (f"{SEARCH} --devices 0", "exclude each other: use one of them"),
    (f"bench {SHAPE} --device 0 --devices 0", "exclude each other: use one of them"),
    (f"search {SHAPE} --devices all", "--devices needs a GPU, and none is visible"),
    ("verify --devices 0,1", "--devices needs a GPU, and none is visible"),
    (f"{EXPLAIN} {SHAPE} --batch 2", "need --model"),
    (f"{SEARCH} --phase decode", "need --model"),
    ("show --hf-config none.json", "No such file"),
    (f"{EXPLAIN} --phase decode", "name them by --model"),
    (f"{DECODE} {SHAPE}", "shapes out"),
    (f"{EXPLAIN} --model gpt2 --plot x.html", "add --phase"),
    (f"{DECODE} --family forward_q_outer", "whole models"),
    (f"{DECODE} --seqlen none", "whole numbers"),
    (f"{EXPLAIN} --phase decode --model gpt9", "there is no model"),
    (f"{EXPLAIN} --phase decode --model bert-base", "bert-base is an encoder"),
    (f"{DECODE} --packed", "--packed is of prompts"),
    (f"{EXPLAIN} --model gpt2 --phase prefill --page-size 16", "add --phase decode"),
    (f"{RENDER} --seqlen 128|256", "given 2 shapes"),
    (f"{RENDER} --config block=1", "did you mean"),
    (f"{RENDER} --family nope", "there is no kernel family"),
    (f"{SEARCH} --family forward_sideways", "no kernel family 'forward_sideways'"),
    (f"search {SHAPE} --target voodoo-2", "no target 'voodoo-2'"),
    ("search --target h200", "--shapes-file or --from"),
    ("search --target h200 --top 3 --model gpt2", "name their file with --from"),
    ("search --target h200 --from none.jsonl", "cannot read the recorded calls none.jsonl"),
    ("warm --target a100", "no shape given"),
    ("verify --db nowhere.sqlite", "nowhere.sqlite"),
    ("verify --table x.json --db y.sqlite", "--table"),
    ("verify --write table.json", "--write needs the table's GPU"),
    ("verify --time", "go with --write"),
    ("verify --missing", "go with --write"),
]
WITHOUT_A_GPU = [
    (f"search {SHAPE}", "--target"),
    (f"bench {SHAPE}", "no GPU is visible here"),
    ("bench --grid paper", "no GPU is visible here"),
]
if not torch.cuda.is_available():
    ERRORS += WITHOUT_A_GPU


@pytest.mark.parametrize(("line", "words"), PARSED + ERRORS)
def test_usage_errors_are_one_sentence(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)

    result = run(*shlex.split(line))

    assert result.exit_code == 2
    assert words in result.stderr
    first, *others = result.stderr.strip().splitlines()
    assert first.startswith("Usage: flashtune" if (line, words) in PARSED else "flashtune: ")
    assert others == [] or (line, words) in PARSED
    assert list(tmp_path.iterdir()) == []
