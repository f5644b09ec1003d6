"""The time of a search: which runs may begin, and the forecast of its cost."""

import pytest
import searches
import small_models
from fake_clock import FakeClock

import kbatch
from kbatch.page.numbers import duration_text
from kbatch.search.search_progress import SearchTime


@pytest.fixture
def clock():
    return FakeClock()


def test_fits_allows_runs_that_end_in_time_and_the_first_run(clock):
    spent = SearchTime(60, now=clock)
    spent.expected_s = {16: 20.0, 32: 10.0}
    clock.now_s += 100
    assert spent.fits(16) and spent.left_s() == -40
    spent.begin()
    clock.now_s += 15
    spent.ended(32, 0.5, seconds=10.6)  # Twice as slow as the plan says, after 0.6 s of tracing.
    assert (spent.training_s(32), spent.training_s(16)) == (20, 40)
    clock.now_s += 7
    assert spent.fits(16)  # 38 s are left, and a search may end 3 s late.
    clock.now_s += 2
    assert not spent.fits(16) and spent.fits(32)
    clock.now_s += 36.5  # A run of 1 s would still end within these 3 s.
    assert not spent.fits(32) and not spent.fits(32, 0.05)


@pytest.mark.parametrize("budget_s", [None, 100.0])
def test_search_left_s_follows_from_measured_runs_after_the_first(clock, budget_s):
    spent = SearchTime(budget_s, now=clock)
    spent.expected_s, spent.trainings_left = {32: 10.0}, {32: 6.0}
    left_s = []
    # The first run traces for 20 s, short runs take 1 s each besides their epochs.
    for share, seconds in ((0.2, 22.0), (0.2, 3.0), (0.2, 3.0), (0.8, 9.0), (1.0, 11.0)):
        spent.ended(32, share, seconds)
        left_s.append(spent.search_left_s())
    assert left_s[0] is None
    assert left_s[1:3] == pytest.approx([5.6 * 15, 5.4 * 15])
    assert left_s[3:] == pytest.approx([4.6 * 11.25, 3.6 * 11.125])
    spent.ended(32, 5.0, seconds=50.0)  # More than was expected.
    assert spent.search_left_s() is None


def test_forecast_includes_the_compilations_of_xla(clock):
    spent = SearchTime(now=clock)
    spent.expected_s, spent.trainings_left = {16: 6.0, 32: 6.0}, {16: 2.0, 32: 1.0}
    spent.compile_left_s = 10.0
    assert "21 to 36 s" in spent.price()  # About 18 s of training, 10 of XLA, and 0.6 of tracing.
    spent.ended(16, 1.0, seconds=10.6, compile_s=4.0)
    spent.ended(32, 1.0, seconds=10.0, compile_s=4.0)
    assert spent.training_s(16) == pytest.approx(6.0)
    assert spent.search_left_s() == pytest.approx(6.0 + 2.0)


def test_training_s_without_a_plan_follows_from_earlier_runs(clock):
    spent = SearchTime(60, now=clock)
    spent.ended(32, 0.2, seconds=4.0)
    assert spent.training_s(64) == 20
    clock.now_s += 45
    assert not spent.fits(64)
    assert SearchTime(now=clock).fits(64)
    spent.ended(64, 0.2, seconds=0.4, start_s=10.0)  # A longer run takes no longer to start.
    assert spent.fits(64)
    clock.now_s += 8
    assert not spent.fits(64)


def test_price_names_sizes_trainings_and_time():
    spent = SearchTime()
    spent.expected_s = dict.fromkeys(range(6), 93.0)
    spent.trainings_left = dict.fromkeys(range(6), 10 / 6)
    cost = "Plan: 6 batch sizes, about 10 complete trainings, 12 to 19 min"
    assert spent.price() == f"{cost}. Give `time_budget_s` to limit the time."
    limited = SearchTime(600)
    limited.trainings_left = {32: 2}
    ends = "The search ends after 10 min (`time_budget_s`)."
    assert limited.price() == f"Plan: 1 batch size, about 2 complete trainings. {ends}"
    texts = [duration_text(9, 15), duration_text(119), duration_text(5000, 9000)]
    assert texts == ["9 to 15 s", "119 s", "1.4 to 2.5 h"]


def test_search_with_an_update_budget_has_no_forecast(tmp_path, capsys):
    fit = {"epochs": 500, "verbose": 1, "callbacks": [kbatch.UpdateBudget(20)]}
    given = {"dtype_policy": "float32", "steps_per_execution": "auto"}
    hypermodel = searches.hypermodel(small_models.linear, batch_sizes=(8,), **given)
    searches.search(tmp_path, hypermodel, kbatch.BatchSizeTuner, fit=fit, objective="val_loss")
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Plan: 1 batch size, about 1 complete training. Give `time_budget_s`")


def test_grid_ends_with_its_budget_and_continues_later(tmp_path, capsys):
    def sizes(**given):
        tuner = searches.quick(
            tmp_path,
            searches.stock(batch_sizes=(8, 16, 32), base_batch_size=16),
            kbatch.BatchSizeTuner,
            fit={"verbose": 1},
            **given,
        )
        trials = sorted(tuner.study.trials, key=lambda trial: trial.trial_id)
        return [trial.batch_size for trial in trials]

    assert sizes(time_budget_s=1e-3) == [16]
    assert "1 of 3 trials" in capsys.readouterr().out
    assert sizes(time_budget_s=600) == [16, 32, 8]
