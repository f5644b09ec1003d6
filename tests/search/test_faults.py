"""Searches with damaged files, moved directories and failing displays."""

import json
import os
import shutil
import subprocess
import sys

import keras
import keras_tuner
import pytest
import searches
import small_models as models
from records_factory import make_trial, write_search

import kbatch
from kbatch.records.training_run import PLAN_NAME
from kbatch.search.files import search_lock

SIZES = (8, 16)


def run(directory, sizes=SIZES, **arguments):
    tuned = searches.stock(batch_sizes=sizes, base_batch_size=16)
    return searches.quick(directory, tuned, kbatch.BatchSizeTuner, **arguments)


@pytest.fixture(scope="module")
def ended_search(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended")
    run(folder, sizes=(16,))
    run(folder)  # Adds size 8 as the second trial.
    return folder


@pytest.fixture
def finished(ended_search, tmp_path):
    """A copy of the folder of a search that has ended."""
    shutil.copytree(ended_search / "search", tmp_path / "search")
    return tmp_path / "search"


def contents(folder, pattern="*"):
    return {f.relative_to(folder): f.read_bytes() for f in folder.rglob(pattern) if f.is_file()}


class ChangesDirectory(keras.callbacks.Callback):
    def __init__(self, to):
        super().__init__()
        self.to = to

    def on_epoch_begin(self, epoch, logs=None):
        os.chdir(self.to)


def test_search_keeps_directory_if_a_callback_changes_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run("results", fit={"callbacks": [ChangesDirectory(tmp_path / "elsewhere")]})
    study = kbatch.load_study(tmp_path / "results" / "search")
    assert [trial.status for trial in study.trials] == ["completed"] * 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


class Renames(keras.callbacks.Callback):
    """Renames a folder while the second trial trains."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        if any(self.folder.glob("search/trial_*1")):
            self.folder.rename(self.folder.with_name("renamed"))


def test_search_ends_if_its_directory_is_renamed_and_continues_after(tmp_path):
    folder = tmp_path / "results"
    with pytest.raises(ValueError, match=f"{folder}/search was moved, renamed or deleted"):
        run(folder, fit={"callbacks": [Renames(folder)]})
    assert not folder.exists()
    folder.with_name("renamed").rename(folder)
    tuner = run(folder, fit={"callbacks": [Renames(tmp_path / "none")]})
    assert [t.status for t in kbatch.load_study(tuner).trials] == ["completed"] * 2


def test_search_lock_excludes_search_in_same_process(tmp_path):
    with search_lock(tmp_path):
        with pytest.raises(ValueError, match="that this process uses"), search_lock(tmp_path):
            pass
        with search_lock(tmp_path / ".."):
            pass
    with search_lock(tmp_path):
        pass


def test_search_continues_if_live_plot_fails(tmp_path):
    (tmp_path / "taken").write_text("")
    live = kbatch.LivePlot(tmp_path / "taken" / "live.png", interval_s=0)
    with pytest.warns(UserWarning, match="`LivePlot` could not be shown"):
        tuner = run(tmp_path, sizes=(16,), fit={"callbacks": [live]})
    assert [t.status for t in kbatch.load_study(tuner).trials] == ["completed"]


def emptied(file):
    file.write_text("")


def says_another_size(file):
    state = json.loads(file.read_text())
    values = state["hyperparameters"]["values"]
    values["batch_size"] = 24 - values["batch_size"]
    file.write_text(json.dumps(state))


@pytest.mark.parametrize("damage", [emptied, says_another_size])
def test_search_resumes_from_records_if_trial_json_is_damaged(finished, damage, capsys):
    records = contents(finished, "kbatch.json")
    was = json.loads((finished / "trial_0000" / "trial.json").read_text())
    for file in finished.glob("trial_*/trial.json"):
        damage(file)
    for _ in range(2):
        tuner = run(finished.parent, fit={"verbose": 1})
        assert "continues with 2 trials" in capsys.readouterr().out
        assert contents(finished, "kbatch.json") == records
    now = json.loads((finished / "trial_0000" / "trial.json").read_text())
    for name in ("trial_id", "status", "score", "best_step"):
        assert now[name] == was[name]
    assert now["hyperparameters"]["values"]["batch_size"] == 16
    (best,) = tuner.get_best_hyperparameters()
    assert best.get("batch_size") == kbatch.load_study(tuner).decide().batch_size


def test_search_keeps_an_unreadable_record_under_another_name(finished):
    text = '{"kbatch_schema": 99, "kind": "TrialRecord"}'
    (finished / "trial_0001" / "kbatch.json").write_text(text)
    study = kbatch.load_study(run(finished.parent))
    assert [trial.status for trial in study.trials] == ["completed"] * 2
    assert (finished / "trial_0001" / "kbatch.json.unread").read_text() == text


def test_search_with_damaged_search_record_says_how_to_continue(finished):
    file, trials = finished / "kbatch.json", contents(finished, "trial_*/kbatch.json")
    file.write_text(file.read_text()[:100])
    (problem,) = kbatch.load_study(finished).problems
    with pytest.raises(ValueError, match=r"Move it to another folder, and run") as raised:
        run(finished.parent)
    assert "Move it to another folder, and run" in problem
    assert str(file) in problem
    assert str(file) in str(raised.value)
    file.unlink()
    run(finished.parent)
    assert contents(finished, "trial_*/kbatch.json") == trials


def test_report_of_settings_with_a_lone_surrogate(finished, tmp_path):
    file = finished / "kbatch.json"
    record = json.loads(file.read_text())
    record["record"]["settings"] |= {"a": ["\ud800"], "b": {"\ud800": {"\ud800": "\ud800"}}}
    file.write_text(json.dumps(record))
    study = kbatch.load_study(finished)
    assert str(study.search.settings).encode().count("\ufffd".encode()) == 4
    kbatch.write_report(study, tmp_path / "report.html")


def test_restore_takes_policy_of_records_if_plan_is_damaged(tmp_path):
    folder = write_search(tmp_path / "search", make_trial(8), make_trial(16))
    (folder / PLAN_NAME).write_text("{")
    hypermodel = kbatch.BatchSizeHyperModel(models.stock, (8, 16))
    hypermodel.restore(folder)
    assert hypermodel.policy_of(keras_tuner.HyperParameters()) == "mixed_float16"


def test_load_study_names_file_with_invalid_confidence(finished):
    file = finished / "kbatch.json"
    record = json.loads(file.read_text())
    record["record"]["settings"]["confidence"] = 1.95
    file.write_text(json.dumps(record))
    study = kbatch.load_study(finished)
    assert any(str(file) in text and "1.95" in text and ".." not in text for text in study.problems)
    assert study.decide().batch_size in SIZES


def test_resumed_search_names_damaged_checkpoint_and_removes_drafts(finished):
    for trial in finished.glob("trial_*"):
        (trial / "draft.weights.h5").write_bytes(b"half")
        (trial / ".kbatch.json.12-34").write_bytes(b"{")
    for file in finished.glob("trial_*/checkpoint.weights.h5"):
        file.write_bytes(file.read_bytes()[:500])
    tuner = run(finished.parent)
    assert not [*finished.rglob("draft.weights.h5"), *finished.rglob(".kbatch.json.*")]
    with pytest.raises(RuntimeError, match=r"checkpoint of trial .* cannot be read"):
        tuner.get_best_models()


@pytest.mark.parametrize(
    ("changed", "difference"),
    [({"epochs": 3}, "epochs=3, but 1"), ({"sizes": (8, 32)}, "but 16"), ({"seed": 7}, "seed=7")],
    ids=["epochs", "sizes", "seed"],
)
def test_search_without_search_record_refuses_other_arguments(finished, changed, difference):
    (finished / "kbatch.json").unlink()
    hypermodel = searches.stock(
        batch_sizes=changed.get("sizes", (8, 16)), seed=changed.get("seed", 0)
    )
    fit = {"epochs": changed.get("epochs", 1)}
    with pytest.raises(ValueError, match=difference):
        searches.quick(finished.parent, hypermodel, kbatch.BatchSizeTuner, fit=fit)


READS = """
import sys
sys.path[:0] = {path}
import searches, test_faults, kbatch
tuner = test_faults.run({folder!r})
print(kbatch.load_study(tuner).decide().batch_size, len(tuner.get_best_models()))
"""


@pytest.mark.slow
def test_ended_search_opens_on_read_only_disk(finished):
    script = READS.format(path=sys.path, folder=str(finished.parent))
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, str(finished), sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr or "unshare failed" in done.stderr:
        pytest.skip("needs the right to mount")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "1"
