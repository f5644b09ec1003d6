"""The comparison of several studies, and their common figures and reports."""

import dataclasses
import re

import numpy as np
import pytest
from figure_samples import several
from matplotlib.text import Text
from records_factory import make_environment, make_execution, make_search, make_study, make_trial

import kbatch
from kbatch.cli.main import SHARED_FIGURES, STUDY_FIGURES, main
from kbatch.records.notes import Note
from kbatch.records.training_run import Outcomes
from kbatch.report import write_report
from kbatch.study.comparison import differences
from kbatch.study.trial import Objective


def study_of(name, *accuracies, seconds=2.0, search=None, key="k", **changed):
    """A study of two sizes with a run for each accuracy. The larger size is much worse."""

    def trial(size, less):
        runs = []
        for seed, accuracy in enumerate(accuracies):
            blocks = np.random.default_rng(seed).uniform(-0.01, 0.01, 40)
            values = tuple(accuracy - less + blocks - blocks.mean())
            outcomes = Outcomes("val_accuracy", 1000, 25, key, values, step=0.001)
            given = {"seed": seed, "train_s": seconds, "window_examples": (), "outcomes": outcomes}
            given |= {"window_durations_s": ()} | changed
            runs.append(make_execution(size, accuracies=(accuracy - less,) * 2, **given))
        return make_trial(size, *runs)

    return make_study(trial(64, 0.0), trial(256, 0.3), name=name, search=search)


A = study_of("adam", 0.900, 0.902, 0.898, 0.901)
B = study_of("sgd", 0.950, 0.953, 0.949, 0.951, seconds=4.0, optimizer="SGD")
C = study_of("ftrl", 0.901, 0.899, 0.902, 0.899, optimizer="Ftrl")
RACE = make_search(strategy="race", batch_sizes=[64, 256], base_batch_size=64, epochs=2)
ONCE = study_of("once", 0.95)
A_AGAIN = dataclasses.replace(A, name="again")


def gains(comparison):
    """The gain of each study over the first one in points, with both ends of the interval."""
    name = "better by (points)"
    return comparison.to_dataframe()[[name, f"{name}, low", f"{name}, high"]].astype(float)


def test_compare_table_names_differences_gain_and_noise():
    comparison = kbatch.compare(A, B, C)
    table = comparison.table().set_index("study")
    assert list(table["optimizer"]) == ["Adam", "SGD", "Ftrl"]
    assert "dtype policy" not in table and "keras" not in table
    assert list(table["batch size"]) == [64, 64, 64]
    assert list(table["verdict"]) == [
        "base of the comparison",
        "more accurate, 2.0 times slower",
        "no difference beyond the noise, as fast",
    ]
    assert "sgd is more accurate by 5.05 points and trains 2.0 times slower" in comparison.answer
    assert "ftrl shows no difference in validation accuracy beyond the noise" in comparison.answer


def test_compare_answer_of_many_studies_is_one_sentence():
    assert kbatch.compare(C, A, B, ONCE, A_AGAIN).answer == (
        "Compared with ftrl by validation accuracy: no difference beyond the noise with adam and "
        "again; more accurate with sgd; not known with once."
    )


def test_compare_gain_is_difference_of_shown_values():
    there, back = (gains(kbatch.compare(*pair)).loc[1] for pair in ((A, B), (B, A)))
    np.testing.assert_allclose(there.to_numpy(), -back.to_numpy()[[0, 2, 1]])
    shown = kbatch.compare(A, B).table()["judged (95 % interval)"]
    assert there.iloc[0] == pytest.approx(100 * (shown[1] - shown[0]))
    assert there.iloc[1] < there.iloc[0] < there.iloc[2]


def test_compare_intervals_widen_with_more_studies():
    two, three = (gains(kbatch.compare(*each)).loc[1] for each in ((A, B), (A, B, C)))
    assert three.iloc[2] > two.iloc[2]
    assert three.iloc[0] == two.iloc[0]


def test_compare_pairs_runs_with_common_seeds():
    def seeded(first, name):
        runs = [dataclasses.replace(e, seed=first + e.seed) for e in B.trials[0].executions[::-1]]
        trial = dataclasses.replace(B.trials[0], executions=tuple(runs))
        return make_study(trial, B.trials[1], name=name)

    # Equal runs cancel if they are paired by their seeds, in any order.
    for first, width in ((0, 0.0), (100, 0.1)):
        _, low, high = gains(kbatch.compare(B, seeded(first, "other"))).loc[1]
        assert low <= 0 <= high
        assert (high - low > width) if first else (high - low < 0.9)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ONCE, "not known (once has one training run)"),
        (
            study_of("short", 0.95, 0.95, search=RACE, length="short"),
            "not known (not trained to the end)",
        ),
        (study_of("d", 0.95, 0.96, 0.95, key="z"), "not known (validation examples not compared)"),
    ],
)
def test_compare_verdict_unknown_noise(other, words):
    comparison = kbatch.compare(A, other)
    assert comparison.table()["verdict"][1].startswith(words)
    assert "is not known" in comparison.answer and "more accurate" not in comparison.answer


def test_compare_use_names_study_with_one_run():
    first = kbatch.compare(ONCE, A)  # The base may be the one with a single run.
    assert first.table()["verdict"][1].startswith("not known (once has one training run), ")
    assert "only once in once (batch size 64, learning rate 0.001)." in first.use
    assert "adam" not in first.use and "executions_per_trial=3" in first.use
    both = kbatch.compare({"a, b": ONCE, "c": ONCE})
    assert "a, b and c have one training run each), and c trains as fast" in both.answer
    assert "executions_per_trial" not in kbatch.compare(A, B).use


@pytest.mark.parametrize("times_s", [(1.0, 2.0, 6.0, 7.0), (0.5, 9.0)])
def test_compare_scattered_times_show_no_speed(times_s):
    name, trials = "slow", []
    for trial in A.trials:
        pairs = zip(trial.executions, times_s, strict=False)
        runs = tuple(dataclasses.replace(run, train_s=seconds) for run, seconds in pairs)
        trials.append(dataclasses.replace(trial, executions=runs))
    comparison = kbatch.compare(A, make_study(*trials, name=name))
    assert comparison.table()["verdict"][1].endswith(", difference in speed not known")
    assert comparison.answer.endswith(", and the difference in speed is not known.")
    assert kbatch.compare(ONCE, A).answer.endswith(", and adam trains as fast (one run).")


def test_compare_studies_of_one_size_have_no_doubt():
    search = make_search(batch_sizes=[64], base_batch_size=64)
    studies = [make_study(each.trials[0], name=each.name, search=search) for each in (A, B)]
    _, names = kbatch.plot_trials(studies).get_legend_handles_labels()
    assert " ".join(names[0].split()) == "adam (answer: batch size 64)"
    assert "not certain" not in " ".join((*names, studies[0].decide().reason))


def test_compare_shows_notes_of_studies_once(tmp_path):
    whole, slow = Note.of("own_step_whole", size=8), Note.of("too_short_to_time")
    one = study_of("one", 0.9, 0.91, 0.9, notes=(slow,))
    comparison = kbatch.compare(one, study_of("other", 0.9, 0.91, 0.9, notes=(slow, whole)))
    assert comparison.notes == (f"other: {whole}", f"one and other: {slow}")
    assert [note.code for note in comparison.notes] == ["own_step_whole", "too_short_to_time"]
    bare = kbatch.compare(*(Study(each.name, each.trials) for each in comparison.studies))
    report = write_report(bare, tmp_path / "report.md")[-1].read_text(encoding="utf-8")
    for text in (str(comparison), report):
        assert text.count("one and other: A training") == text.count("other: Batches") == 1
    assert kbatch.compare(A, ONCE).notes == ()  # How to be certain of a size does not matter here.


def test_compare_study_without_answer():
    failed = make_study(make_trial(64, status="failed"), name="failed")
    assert kbatch.compare(A, failed).answer == "Compared with adam, failed has no answer."
    assert "not known" in kbatch.compare(failed, A).table()["verdict"][1]


def test_compare_loss_lower_is_better():
    def with_loss(study):
        trials = []
        for trial in study.trials:
            runs, loss = [], Objective("val_loss", "min")
            for run in trial.executions:
                values = tuple(1.1 - value for value in run.outcomes.values)
                outcomes = dataclasses.replace(run.outcomes, metric="val_loss", values=values)
                runs.append(dataclasses.replace(run, outcomes=outcomes))
            trials.append(make_trial(trial.batch_size, *runs, objective=loss))
        return make_study(*trials, name=study.name)

    table = kbatch.compare(with_loss(A), with_loss(B)).table()
    assert table["better by"][1] == pytest.approx(0.0505)
    assert table["verdict"][1].startswith("better")


def test_differences_found_in_records():
    def search(facts, versions=(), **settings):
        environment = make_environment(versions={"keras": "3.15.1", **dict(versions)})
        made = make_search(**settings)
        return dataclasses.replace(made, facts=facts, environment=environment)

    facts = {"optimizer": "Adam", "optimizer.epsilon": "1e-07", "x": "10 rows", "epochs": "2"}
    facts |= {"compile(loss).dtype_policy.dtype": "float32"}  # The policy has a column.
    other = {"optimizer": "SGD", "optimizer.momentum": "0.9", "x": "20 rows", "epochs": "2"}
    first = study_of("a", 0.9, search=search(facts, seed=1))
    second = study_of("b", 0.9, search=search(other, {"keras": "3.14.0"}, seed=2), optimizer="SGD")
    table = kbatch.compare(first, second).table()
    columns = list(table.columns)
    # Equal facts, seeds, and parts of another optimizer except its momentum are no differences.
    expected = ["optimizer", "optimizer.momentum", "x", "keras"]
    assert columns[1 : columns.index("batch size")] == expected
    assert list(table["optimizer.momentum"].fillna("")) == ["", "0.9"]
    assert list(table["x"]) == ["10 rows", "20 rows"]
    many = [search({f"argument {n}": value for n in range(9)}) for value in "12"]
    comparison = kbatch.compare(*(study_of(f"{n}", 0.9, search=s) for n, s in enumerate(many)))
    assert len([name for name in comparison.table() if name.startswith("argument")]) == 6
    assert comparison.use.endswith(
        "The studies also differ in argument 6, argument 7 and argument 8."
    )
    # Tuners of keras-tuner record no facts, so that facts are unknown and no difference.
    assert "x" not in kbatch.compare(first, study_of("c", 0.9)).table()


@pytest.mark.parametrize(
    ("sizes", "bases", "expected"),
    [
        (([64], [32]), (64, 32), set()),  # The column "batch size" shows them.
        (([64, 256], [32]), (64, 32), {"batch_sizes"}),
        (([64, 256], [64, 256]), (64, 256), {"base_batch_size"}),  # The user gave another base.
    ],
)
def test_differences_leave_out_what_follows_from_batch_sizes(sizes, bases, expected):
    studies = [
        study_of(
            str(number),
            0.9,
            search=make_search(
                batch_sizes=batch_sizes,
                base_batch_size=base,
                validation_batch_size=max(batch_sizes),
                base_added=number == 1,
            ),
        )
        for number, (batch_sizes, base) in enumerate(zip(sizes, bases, strict=True))
    ]
    assert differences(studies).keys() == expected


LOSS = make_study(make_trial(64, objective=Objective("val_loss", "min")), name="loss")
BAD = (
    ([], r"Give a study.*Received: \[\]"),
    ("results/adam", "load_study"),
    ([A, "results/sgd"], r"load_study.*Received: 'results/sgd'"),
    ([A, A], r"dict that names them.*two studies named 'adam'"),
    ([A, LOSS], r"same objective.*'adam' has val_accuracy \(max\).*'loss' has val_loss"),
)


def test_compare_refuses_bad_studies():
    empty = kbatch.Study("empty", ())
    more = ((A, "at least two"), ([A, None], "Received: None"), ([A, empty], "'empty' has no tria"))
    for given, words in (*BAD, *more):
        with pytest.raises(ValueError, match=words):
            kbatch.compare(given)
        with pytest.raises(ValueError, match=words):
            kbatch.compare(*given if isinstance(given, list) and given else [given])


def test_compare_dict_names_equal_studies():
    comparison = kbatch.compare({"first": A, "again": A})
    assert list(comparison.table()["study"]) == ["first", "again"]
    assert gains(comparison).loc[1].iloc[0] == 0
    named = [dataclasses.replace(A, name=name) for name in ("first", "again")]
    assert comparison == kbatch.compare(named)


FIGURES = [getattr(kbatch, f"plot_{name.replace('-', '_')}") for name in SHARED_FIGURES]


@pytest.mark.parametrize("plot", FIGURES)
def test_shared_figure_has_one_scale_and_legend_of_answers(plot):
    name = plot.__name__.removeprefix("plot_")
    first, second = several(name, 2).values()

    # The second study trained a thousand times as long.
    def as_long(run):
        epochs = [
            dataclasses.replace(e, updates=1000 * e.updates, train_s=1000 * e.train_s)
            for e in run.epochs
        ]
        windows = tuple(1000 * n for n in run.window_examples)
        return dataclasses.replace(run, window_examples=windows, epochs=tuple(epochs))

    longer = [
        dataclasses.replace(trial, executions=tuple(map(as_long, trial.executions)))
        for trial in second.trials
    ]
    studies = {"one": first, "other": make_study(*longer, make_trial(2, trial_id="small"))}
    limits = []
    for shown in (studies, dict(reversed(studies.items()))):
        axes = plot(shown)
        handles, names = axes.get_legend_handles_labels()
        decided = [one.decide() for one in shown.values()]
        doubts = ["" if decision.certified else ", not certain" for decision in decided]
        answers = [f"{d.batch_size}{doubt}" for d, doubt in zip(decided, doubts, strict=True)]
        names = [" ".join(name.split()) for name in names]
        expected = zip(shown, answers, strict=True)
        assert names == [f"{name} (answer: batch size {answer})" for name, answer in expected]
        assert (name == "learning_curves") != ("Rings: recommended" in axes.get_label())
        assert len({handle.get_color() for handle in handles}) == 2
        panels = [each for each in axes.figure.axes if each.axison]
        for panel in panels:
            colors = {handle.get_color() for handle in handles}
            drawn = [line for line in panel.lines if line.get_color() in colors]
            drawn = [line for line in drawn if len(line.get_xdata()) and line.get_marker() != "X"]
            assert {line.get_color() for line in drawn} == colors
            (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
            for x, y in (point for line in drawn for point in line.get_xydata()):
                assert left <= x <= right and low <= y <= high
        limits.append([(*panel.get_xlim(), *panel.get_ylim()) for panel in panels])
    np.testing.assert_allclose(*limits)


@pytest.mark.parametrize("plot", FIGURES)
def test_shared_figure_of_one_study_in_list(plot):
    (study,) = several(plot.__name__.removeprefix("plot_"), 1).values()
    contents = []
    for shown in (study, [study]):
        figure = plot(shown).figure
        lines = [line.get_xydata().tolist() for panel in figure.axes for line in panel.lines]
        contents.append((lines, [text.get_text() for text in figure.findobj(Text)]))
    assert contents[0] == contents[1]


@pytest.mark.parametrize("plot", FIGURES)
def test_shared_figure_refuses_bad_studies(plot):
    for given, words in BAD:
        with pytest.raises(ValueError, match=words):
            plot(given)


@pytest.mark.parametrize("name", [name for name in STUDY_FIGURES if name not in SHARED_FIGURES])
def test_figure_of_one_study_refuses_several(name):
    with pytest.raises(ValueError, match=r"Give a study.*Received: \["):
        getattr(kbatch, f"plot_{name.replace('-', '_')}")([A, B])


def test_cli_plot_of_several_studies(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, study in several("pareto", 2).items():
        dataclasses.replace(study, name=name).save(f"{name}.json")
    files = ["Adam.json", "SGD.json"]
    assert main(["plot", *files, "--figure", "pareto", "-o", "both.svg"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Compared with Adam, ") and printed.endswith("\nboth.svg\n")
    assert "Rings: recommended batch" in (tmp_path / "both.svg").read_text(encoding="utf-8")
    assert main(["plot", *files, "--figure", "noise-scale"]) == 1
    assert "shows one study" in capsys.readouterr().err


class Study(kbatch.Study):
    """A study without figures, because drawing them takes long."""

    def figures(self):
        return ()


A_BARE, B_BARE = (Study(one.name, one.trials, one.search) for one in (A, B))
PAIR = kbatch.compare(A_BARE, B_BARE)


@pytest.mark.parametrize(
    ("given", "suffix"),
    [([A_BARE, B_BARE], ".html"), (PAIR, ".md"), ([PAIR, A_BARE, B_BARE], ".md")],
)
def test_report_of_studies_begins_with_comparison(given, suffix, tmp_path):
    *_, path = write_report(given, tmp_path / f"report{suffix}")
    text = path.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    places = [text.index(words) for words in ("Compared with adam", "more accurate", "Study adam")]
    assert places == sorted(places)
    assert re.sub(r'alt="[^"]*|!\[[^]]*', "", text).count("Compared with adam,") == 1
    assert text.count("<article" if suffix == ".html" else "\n## ") == 3
    assert "\n\n\n" not in text or suffix == ".html"


def test_report_of_studies_with_equal_names_is_not_compared(tmp_path):
    for suffix in (".html", ".md"):
        *_, path = write_report([A_BARE, A_BARE], tmp_path / f"report{suffix}")
        text = path.read_text(encoding="utf-8")
        assert "not compared" in text and "base of the comparison" not in text


def test_cli_report_names_studies_by_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, study in (("adam", A), ("sgd", B)):
        failed = (make_trial(64, status="failed"),)  # Such a study has one figure.
        dataclasses.replace(study, trials=failed, name="digits").save(f"{name}.json")
    assert main(["report", "adam.json", "sgd.json", "-o", "report.md"]) == 0
    assert "| sgd.json |" in (tmp_path / "report.md").read_text(encoding="utf-8")
