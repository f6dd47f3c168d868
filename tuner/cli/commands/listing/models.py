"""`flashtune models`: the values of `--model`."""

from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import json_option
from flashtune.tuner.cli.output import print_json, print_rows


@flashtune_command("models", "flashtune models", "flashtune search --model llama-3.1-8b --seqlen 512..8192")
@json_option
def command(as_json: bool) -> None:
    """List the models that --model knows, with their attention layers.

    For other models, use --hf-config with their config.json.
    """
    from flashtune.tuner.workloads.models import MODEL_HEADS, model_row
    from flashtune.tuner.workloads.presets import MODELS

    if as_json:
        print_json(MODELS)
    else:
        print_rows(MODEL_HEADS[:-1], [model_row(model)[:-1] for model in MODELS])
