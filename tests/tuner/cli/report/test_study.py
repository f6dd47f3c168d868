from collections import Counter
from pathlib import Path

import optuna
from optuna.trial import TrialState

from flashtune.core.record import Record
from tests.tuner.cli.conftest import Run
from tests.tuner.cli.report.conftest import CONFIGS, HOSTILE


def test_study_has_the_times_axes_and_failures_of_a_search(
    run: Run, searched: tuple[Record, ...], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    result = run("report", "--study", url)
    assert result.exit_code == 0, result.output
    name = f"nvidia-h200/{searched[0].problem.key}"
    assert optuna.get_all_study_names(url) == [name]
    study = optuna.load_study(study_name=name, storage=url)
    assert Counter(trial.state for trial in study.trials) == {
        TrialState.COMPLETE: len(CONFIGS),
        TrialState.PRUNED: 1,
        TrialState.FAIL: 1,
    }
    assert [trial.value for trial in study.trials] == [record.ms for record in searched]
    assert study.best_params == {"block_m": 128, "block_n": 64}
    assert study.trials[-2].user_attrs["sram_bytes"] == 300_000
    assert study.trials[-1].user_attrs["message"] == HOSTILE


def test_families_of_one_study_have_axes_of_their_own(
    run: Run, searched: tuple[Record, ...], tmp_path: Path
) -> None:
    from flashtune.db.store import open_store
    from flashtune.tuner.cli.html_report.study import trials_of
    from flashtune.tuner.tables.lookup import records_of
    from tests.support.records import make_record

    database = str(tmp_path / "flashtune.sqlite")
    problem = searched[0].problem
    with open_store(database) as store:
        store.add(make_record(problem, 0.4, family="forward_hopper", kernel="a" * 32))
    *_, trial = trials_of(records_of(problem, None, database))
    assert trial.params == {"family": "forward_hopper"}
    assert "forward_q_outer.block_m" in trials_of(records_of(problem, None, database))[0].params


def test_existing_study_is_refused(run: Run, searched: tuple[Record, ...], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert run("report", "--study", url).exit_code == 0
    result = run("report", "--study", url)
    assert result.exit_code == 2
    assert "name a new storage" in result.output


def test_storage_that_cannot_be_written_is_one_sentence(
    run: Run, searched: tuple[Record, ...], tmp_path: Path
) -> None:
    result = run("report", "--study", f"sqlite:///{tmp_path / 'missing' / 'study.db'}")
    assert result.exit_code == 1
    assert "cannot write the studies" in result.output
