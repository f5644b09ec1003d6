"""What the figure of the gradient noise scale shows, computed before anything is drawn."""

from typing import NamedTuple

from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.number_text import counted, listed
from kbatch.study.conditions import caption, conditions_of
from kbatch.study.empty_study import refuse_empty
from kbatch.study.figures.best_of_size import best_of_size, best_of_size_note
from kbatch.study.figures.incomplete import incomplete_text
from kbatch.study.noise_text import noise_scale_text
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord


class NoiseCurve(NamedTuple):
    """The noise scale of one trial.

    Attributes:
        batch_size: Examples of one optimizer update.
        trial_id: keras-tuner's identifier.
        runs: For each execution its epochs, from 1, and the noise scale of each, in examples;
            epochs where it is lost in noise are left out.
        late: The noise scale of the late half, in examples.
    """

    batch_size: int
    trial_id: str
    runs: tuple[tuple[tuple[int, float], ...], ...]
    late: NoiseScale


class NoiseScaleInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        curves: One a batch size, ascending.
        epochs: Most epochs of a trial.
        notes: What is shown and how far it may be trusted.
        incomplete: Which trials have no result, an empty text where all have one.
        conditions: Device, versions and budget.
    """

    name: str
    curves: tuple[NoiseCurve, ...]
    epochs: int
    notes: tuple[str, ...]
    incomplete: str
    conditions: str


def noise_scale_info(study: Study) -> NoiseScaleInfo:
    """Computes the noise scale over training of the best measured trial of each batch size.

    Args:
        study: A study with at least one trial.

    Raises:
        ValueError: If the study is empty or no noise scale was measured, with what to run.
    """
    refuse_empty(study)
    measured = Study(study.name, tuple(t for t in study.trials if t.noise_scale is not None))
    curves = tuple(
        NoiseCurve(size, trial.trial_id, _runs(trial), scale)
        for size, trial in best_of_size(measured).items()
        if (scale := trial.noise_scale) is not None
    )
    if not curves:
        raise ValueError(
            "No noise scale was measured: it is where gradients are accumulated. Search with "
            "`kbatch.BatchSizeHyperModel(..., micro_batch_size=n)`, n a part of the batch sizes. "
            f"Received: {counted(len(study.trials), 'trial')} without gradient moments."
        )
    return NoiseScaleInfo(
        name=study.name,
        curves=curves,
        epochs=max(
            epoch for curve in curves for run in curve.runs for epoch, _ in run or ((1, 0),)
        ),
        notes=(
            "Lines: by epoch, without epochs whose gradient is lost in noise. Right: the late half "
            "of training, with its 95 % interval; an arrow stands for a lower bound, where there "
            "is no more.",
            *best_of_size_note(measured),
        ),
        incomplete=incomplete_text(study),
        conditions=caption(conditions_of(study)),
    )


def alt_text(info: NoiseScaleInfo) -> str:
    """Describes the figure in sentences, for those who do not see it."""
    scales = listed(
        f"{noise_scale_text(curve.late)} at batch size {curve.batch_size:,}"
        for curve in info.curves
    )
    sentences = (
        f"A chart of the gradient noise scale over {counted(info.epochs, 'epoch')}, on a "
        f"logarithmic axis. In the late half of training it is {scales}. {info.incomplete}"
    )
    return sentences.strip()


def _runs(trial: TrialRecord) -> tuple[tuple[tuple[int, float], ...], ...]:
    curves = [execution.noise_scale_curve for execution in trial.executions]
    # Its axis is logarithmic, which has no place for 0.
    return tuple(
        tuple((point.epoch + 1, point.value) for point in curve if point.value) for curve in curves
    )
