"""Callbacks that write to one path have one in each trial of a search."""

import keras
import pytest
import searches
import small_models as models

import kbatch


def test_each_trial_writes_its_own_checkpoint_and_log(tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "saved" / "{epoch}.weights.h5", save_weights_only=True
    )
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    fit = {"callbacks": [checkpoint, log], "epochs": 1}
    hypermodel = searches.stock(batch_sizes=(8, 32))
    tuner = searches.search(
        tmp_path, hypermodel, kbatch.BatchSizeTuner, fit=fit, executions_per_trial=2
    )
    study = kbatch.load_study(tuner)
    written = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("saved/**/*.h5"))
    assert written == [
        f"saved/000{trial}/execution{run}/1.weights.h5" for trial in (0, 1) for run in (0, 1)
    ]
    model = models.stock()
    for trial in study.trials:
        for number, run in enumerate(trial.executions):
            folder = tmp_path / trial.trial_id / f"execution{number}"
            rows = (folder / "log.csv").read_text().splitlines()
            names, values = rows[0].split(","), rows[1].split(",")
            loss = float(dict(zip(names, values, strict=True))["loss"])
            assert loss == pytest.approx(run.epochs[0].metrics["loss"])
            model.load_weights(tmp_path / "saved" / folder.relative_to(tmp_path) / "1.weights.h5")
            result = model.evaluate(*models.rows(40, seed=1), verbose=0, return_dict=True)
            assert result["accuracy"] == pytest.approx(run.epochs[0].metrics["val_accuracy"])
        # The paths of a trial are told once, in the words of all.
        assert [note for note in trial.notes if "<trial id>/execution<number>/log.csv" in note]
    told = {tuple(n for n in trial.notes if n.code == "own_path") for trial in study.trials}
    assert len(told) == 1


def test_a_backup_of_another_trial_is_refused(tmp_path):
    fit = {"callbacks": [keras.callbacks.BackupAndRestore(tmp_path / "backup")]}
    with pytest.raises(ValueError, match="leave out `BackupAndRestore`"):
        searches.search(tmp_path, searches.stock(), kbatch.BatchSizeTuner, fit=fit)
