"""Patches of flashtune's integration of transformers."""

from typing import Any

import pytest
import torch

from flashtune.integrations import transformers as integration
from flashtune.integrations import transformers_jobs
from flashtune.integrations.transformers_jobs import Job


def serve_on_cpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Layers are served on the CPU, and padding of short ones is moved. A type counts as one of 16 bits."""
    monkeypatch.setattr(integration, "DEVICES", {"cpu"})
    monkeypatch.setattr(transformers_jobs, "HALF", (dtype,))
    move_padding(monkeypatch)


def move_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of short sequences is moved too."""
    monkeypatch.setattr(transformers_jobs, "MIN_MOVED", 2)


def note_served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that gets an entry for each call: whether flashtune serves it."""
    is_served: list[bool] = []
    original = integration.prepared

    def prepared(job: Job) -> Any:
        executor = original(job)
        is_served.append(executor is not None)
        return executor

    monkeypatch.setattr(integration, "prepared", prepared)
    return is_served
