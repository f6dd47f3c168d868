"""The meaning of each key of a shape, for `flashtune shapes` and docs/shapes.md."""

from flashtune.core.features.table import FEATURES

EXAMPLES = ("heads=32,seqlen=4096,head_dim=128,causal", "heads=8,head_dim=64|128,seqlen=512..4096")

GRAMMAR = (
    "A shape is a list of keys with values, joined by commas. Flags have no value. head_dim=64|128 is a "
    "list, and seqlen=512..4096 is every doubling from 512 to 4096. Lists and ranges multiply."
)

# Backquotes mark code in Markdown.
PLAIN_KEYS = {
    "heads": "query heads",
    "kv_heads": "KV heads, a divisor of `heads`. Default: `heads`",
    "head_dim": "head dim of queries and keys",
    "value_head_dim": "head dim of values and outputs. Default: `head_dim`",
    "seqlen": "tokens of a sequence, or `seqlen_q` and `seqlen_kv` for queries and keys",
    "batch": "sequences. Default: 1",
    "tokens": "tokens of all sequences, in place of `batch`",
    "dtype": "`bf16` (default), `fp16`, `fp32`, `tf32` or `e4m3`",
    "causal": "flag or `bottom_right`: the last query sees every key; `top_left`; `none` (default)",
    "backward": "flag: the gradients in place of the output",
}


def shape_keys() -> dict[str, str]:
    """Returns the meaning of each key: first those of plain attention, then those of features."""
    return PLAIN_KEYS | {key: text for feature in FEATURES.values() for key, text in feature.keys.items()}
