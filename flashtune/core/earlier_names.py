"""Earlier names of stored fields, and the conversion of records with them.

Tables of schemas 1 and 2, databases before migration 0005, truth tables, files of recorded calls and measured
results have these names. Commands accept them too. Everything is written with the present names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

_PORTABLE = {
    "two_phases": "split_masked_loop",
    "decomposed": "split_head_dim",
    "heads_inner": "heads_innermost",
    "max_registers": "maxnreg",
    "products": "input_precision",
}
# The fields of configs, by family.
CONFIG_FIELDS: dict[str, dict[str, str]] = {
    "backward_fused": {**_PORTABLE, "turned": "transpose_dq"},
    "backward_hopper": {
        "eager": "early_dv",
        "late_wait": "defer_dp_wait",
        "product_first": "early_dk",
        "init": "init_accumulators",
        "delay": "defer_dq",
        "turns": "alternate_dq",
        "rotate": "stagger_start",
        "beside": "interleaved_heads",
    },
    "backward_split": {**_PORTABLE, "long_first": "lpt"},
    "decode_latent_hopper": {"splits": "num_splits", "late_values": "overlap_pv"},
    "decode_split_kv": {"splits": "num_splits", "decomposed": "split_head_dim"},
    "forward_hopper": {
        "groups": "num_consumer_groups",
        "rows": "rows_per_group",
        "halved": "split_epilogue",
        "late_wait": "defer_pv_wait",
        "lazy_rescale": "conditional_rescale",
        "decomposed": "split_head_dim",
        "pack": "pack_gqa",
        "section": "head_swizzle",
        "even": "balanced_grid",
    },
    "forward_kv_outer": {"decomposed": "split_head_dim", "max_registers": "maxnreg"},
    "forward_masked": {**_PORTABLE, "long_first": "lpt"},
    "forward_q_outer": {**_PORTABLE, "long_first": "lpt", "qk_ahead": "overlap_qk"},
}
# The values of a config's `order`.
ORDERS = {"long_first": "lpt", "alternate": "serpentine"}
# The fields of a problem, and the keys of a shape.
PROBLEM_FIELDS = {
    "first_tokens": "sink_tokens",
    "chunk": "attention_chunk",
    "packed": "total_q",
    "lengths": "seqlens_k",
    "latent": "mla",
}
# Baselines: the family of their records, and the names of their times.
BASELINES = {"standard": "unfused"}
# Tables of databases, by present name.
TABLES = {"fallbacks": "stand_ins"}


# Converts a decoded JSON object.
Convert = Callable[[dict[str, Any]], dict[str, Any]]


def present_record(raw: bytes) -> bytes:
    """Returns the JSON of a record with present names."""
    return _converted(raw, _record)


def present_call(raw: bytes) -> bytes:
    """Returns the JSON of a recorded call with present names."""
    return _converted(raw, lambda call: _changed(call, "problem", present_problem))


def present_truth_table(raw: bytes) -> bytes:
    """Returns the JSON of a truth table with present names."""
    return _converted(raw, _truth_table)


def present_bench_report(raw: bytes) -> bytes:
    """Returns the JSON of a report of `flashtune bench` with present names."""
    return _converted(raw, lambda report: _changed(report, "run", _bench_run))


def present_label(family: str, label: str) -> str:
    """Returns a config's label, as of `Config.label`, with present names. Other words stay."""
    return " ".join(_present_word(CONFIG_FIELDS.get(family, {}), word) for word in label.split(" "))


def present_config(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config, as decoded JSON, with present names."""
    return _changed(_renamed(config, CONFIG_FIELDS.get(family, {})), "order", _order)


def present_problem(problem: dict[str, Any]) -> dict[str, Any]:
    """Returns a problem or the keys of a shape, as decoded JSON, with present names."""
    return _renamed(problem, PROBLEM_FIELDS)


def present_measurement(measurement: dict[str, Any]) -> dict[str, Any]:
    """Returns a measurement, as decoded JSON, with present names of baselines."""
    named = _changed(measurement, "peers", _peers)
    return _changed(named, "shared", lambda times: [present_measurement(one) for one in times])


def _record(record: dict[str, Any]) -> dict[str, Any]:
    family = record["family"]
    present = _changed(record, "problem", present_problem)
    present = _changed(present, "config", lambda config: config and present_config(family, config))
    present = _changed(present, "measurement", lambda times: times and present_measurement(times))
    return {**present, "family": BASELINES.get(family, family)}


def _truth_table(table: dict[str, Any]) -> dict[str, Any]:
    names = CONFIG_FIELDS.get(table["family"], {})
    order = table["fields"].index("order") if "order" in table["fields"] else None
    rows = table["rows"]
    if order is not None:
        rows = [[[*row[0][:order], _order(row[0][order]), *row[0][order + 1 :]], *row[1:]] for row in rows]
    fields = [names.get(name, name) for name in table["fields"]]
    present = _changed(_changed(table, "problem", present_problem), "peers", _peers)
    return {**present, "fields": fields, "rows": rows}


def _bench_run(run: dict[str, Any]) -> dict[str, Any]:
    benches = [
        {
            **_changed(bench, "problem", present_problem),
            "rows": [_bench_row(row) for row in bench["rows"]],
            "left_out": _peers(bench["left_out"]),
        }
        for bench in run["benches"]
    ]
    return {**run, "benches": benches}


def _bench_row(row: dict[str, Any]) -> dict[str, Any]:
    (named,) = _peers([row])
    return {**named, "detail": present_label(row["detail"].split(" ")[0], row["detail"])}


def _present_word(names: dict[str, str], word: str) -> str:
    name, sign, value = word.partition("=")
    return f"{names.get(name, name)}={_order(value) if name == 'order' else value}" if sign else word


def _peers(peers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**peer, "name": BASELINES.get(peer["name"], peer["name"])} for peer in peers]


def _order(value: Any) -> Any:
    return ORDERS.get(value, value)


def _converted(raw: bytes, convert: Convert) -> bytes:
    """Returns converted JSON. Other bytes are returned unchanged, for the decoder to reject."""
    try:
        return msgspec.json.encode(convert(msgspec.json.decode(raw, type=dict[str, Any])))
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return raw


def _changed(fields: dict[str, Any], name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns fields with one of them changed, if it is there."""
    return {**fields, name: change(fields[name])} if name in fields else fields


def _renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns the fields with new names, in the same order.

    An earlier name remains if the present one is given too, so that the decoder rejects it.
    """
    return {
        names[name] if name in names and names[name] not in fields else name: value
        for name, value in fields.items()
    }
