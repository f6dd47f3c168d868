"""Records and self-checks as JSON and back. Every field is checked against its bounds.

A record's config belongs to its family. It is decoded in a second stage, by the family's type.
"""

import hashlib
import math
import sys
from typing import Any, overload

import msgspec

from flashtune.core.config import Config
from flashtune.core.decoders import json_decoder
from flashtune.core.errors import TableError
from flashtune.core.record import Digest, Provenance, Record, Seconds, Verdict, Versions
from flashtune.core.target import TargetName
from flashtune.db.limits import MAX_VALUE_BYTES
from flashtune.templates.registry import find_family


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of a self-check of one kernel on one GPU under one set of versions."""

    digest: Digest
    target: TargetName  # Name of the GPU of the check.
    versions: Versions
    verdict: Verdict
    # Duration of a self-check of the loaded kernel. None if another command made the verdict.
    seconds: Seconds | None = None


# Baselines are not families: they have neither config nor kernel.
BASELINES = frozenset({"unfused", "sdpa"})
# A real record has about 1 KiB.
MAX_RECORD_BYTES = 256 * 1024
MAX_ERROR_TEXT = 200

# Errors that decoding JSON of any origin may raise.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NULL = b"null"


def _envelope_type() -> type[msgspec.Struct]:
    """Returns `Record` with a raw config. It is derived from `Record`, so the two cannot differ."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(Record):
        if field.name == "config":
            fields.append((field.name, msgspec.Raw))
        elif field.required:
            fields.append((field.name, field.type))
        else:
            fields.append((field.name, field.type, field.default))
    return msgspec.defstruct("Envelope", fields, forbid_unknown_fields=True, kw_only=True)


_ENVELOPE = msgspec.json.Decoder(_envelope_type())


def encode_record(record: Record) -> bytes:
    """Returns the record as compact JSON with its fields in a fixed order."""
    raw = _plain_json(msgspec.structs.replace(record, verdict=_finite(record.verdict)))
    decode_record(raw)
    return raw


def without_gpu(record: Record) -> Record:
    """Returns the record without the physical GPU and its clock, which tables and hashes omit."""
    if record.measurement is None:
        return record
    measurement = msgspec.structs.replace(record.measurement, gpu_uuid=msgspec.UNSET, clock_mhz=msgspec.UNSET)
    return msgspec.structs.replace(record, measurement=measurement)


def decode_record(raw: bytes) -> Record:
    """Returns the record in JSON that `encode_record` made, or in a row or file."""
    if len(raw) > MAX_RECORD_BYTES:
        raise TableError(
            f"a record of {len(raw)} bytes is too large for a record: the limit is {MAX_RECORD_BYTES}"
        )
    try:
        envelope = _ENVELOPE.decode(raw)
    except UNDECODABLE as error:
        raise TableError(f"invalid record: {brief(error)}") from error
    fields = msgspec.structs.asdict(envelope)
    fields["config"] = _decode_config(fields["family"], bytes(fields["config"]))
    record = Record(**fields)
    flaw = _contradiction(record)
    if flaw:
        raise TableError(f"a record contradicts itself: {flaw}")
    return record


def decode_stored(payload: object, problem_key: object, target: object) -> Record:
    """Returns the record of a row. It must match the row's problem and target."""
    if not isinstance(payload, str | None):
        raise TableError(f"a row holds {type(payload).__name__} where a record's JSON should be")
    record = decode_record(raw_bytes(payload))
    if (record.problem.key, record.target) != (problem_key, target):
        raise TableError(
            f"a record of {record.problem.key} on {record.target} is stored under another problem or target"
        )
    return record


def raw_bytes(payload: object) -> bytes:
    """Returns the bytes of a row's JSON. In a damaged row they are not valid UTF-8."""
    # The column cannot be NULL, but `bounded` returns NULL.
    if payload is None:
        raise TableError(f"a row has a value of more than {MAX_VALUE_BYTES} bytes")
    return str(payload).encode(errors="surrogateescape")


def encode_check(check: Check) -> bytes:
    """Returns the check as compact JSON."""
    raw = _plain_json(msgspec.structs.replace(check, verdict=_finite(check.verdict)))
    decode_check(raw)
    return raw


def decode_check(raw: bytes) -> Check:
    """Returns the check in JSON that `encode_check` made."""
    try:
        return json_decoder(Check).decode(raw)
    except UNDECODABLE as error:
        raise TableError(f"invalid self-check: {brief(error)}") from error


def fingerprint(value: msgspec.Struct | bytes) -> str:
    """Returns a hash over canonical JSON, 32 hex digits."""
    raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return hashlib.sha256(raw).hexdigest()[:32]


def brief(error: BaseException) -> str:
    """Returns an error's text on one line, shortened and without control codes."""
    text = "".join(sign if sign.isprintable() else "?" for sign in " ".join(str(error).split()))
    return text if len(text) <= MAX_ERROR_TEXT else f"{text[:MAX_ERROR_TEXT]}..."


def _decode_config(family_name: str, raw: bytes) -> Config | None:
    if family_name in BASELINES:
        if raw != _NULL:
            raise TableError(f"a record of {family_name} has a config, and a baseline takes none")
        return None
    config_type = find_family(family_name).config_type
    try:
        return json_decoder(config_type).decode(raw)
    except UNDECODABLE as error:
        raise TableError(f"a record's config is none of family {family_name}: {brief(error)}") from error


def _contradiction(record: Record) -> str:
    """Returns which fields of a record contradict one another; empty if none do."""
    problem, measurement = record.problem, record.measurement
    if record.gpu and record.gpu.name != record.target:
        return f"it is of {record.target}, and its facts are those of {record.gpu.name}"
    if not (problem.batch and problem.seqlen_q and problem.seqlen_kv):
        return f"its problem {problem.key} is empty, and no kernel computes it"
    if measurement and record.provenance is Provenance.MEASURED and not measurement.samples:
        return "its time was measured with 0 samples"
    return ""


def _plain_json(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise TableError(f"a text is not valid Unicode and cannot be stored: {brief(error)}") from error


@overload
def _finite(verdict: Verdict) -> Verdict: ...
@overload
def _finite(verdict: Verdict | None) -> Verdict | None: ...
def _finite(verdict: Verdict | None) -> Verdict | None:
    """Returns the verdict with infinite and NaN errors, which JSON cannot hold, as the largest float."""
    if verdict is None or math.isfinite(verdict.worst_ratio):
        return verdict
    return msgspec.structs.replace(verdict, worst_ratio=sys.float_info.max)
