"""Tests of the receipts of the shipped tables."""

import pytest

from flashtune.core.target import TARGETS
from flashtune.db.table import shipped_table
from tests.support.records import shipped_table_of

SHIPPED = [target.name for target in TARGETS if shipped_table(target.name)]


@pytest.mark.parametrize("name", SHIPPED)
def test_receipts_of_shipped_kernels_list_their_probes(name: str) -> None:
    table = shipped_table_of(name)
    verdicts = [record.verdict for record in table.records if record.config is not None]
    assert verdicts
    assert all(verdict is not None and verdict.passed and verdict.probes for verdict in verdicts)
