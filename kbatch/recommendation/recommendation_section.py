"""What a report says of a recommendation."""

from kbatch.document.content import Fact, Figure, Note, Section
from kbatch.document.environment import environment_facts
from kbatch.document.number_text import setting
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.recommendation.limits_figure import HEIGHT_IN, alt_text, limits_info, plot_limits
from kbatch.recommendation.recommendation_certainty import certainty_lines
from kbatch.recommendation.recommendation_limits import binding_line, limit_lines
from kbatch.recommendation.recommendation_record import Recommendation
from kbatch.recommendation.recommendation_text import (
    LEARNING_RATE_COST,
    answer_line,
    cost_rows,
    cost_title,
    trained_sizes,
)
from kbatch.recommendation.settings_line import settings_line

_COLUMNS = (
    Column("Batch size", True),
    Column("Micro-batch size", True),
    Column("Samples/s", True),
    Column("Updates", True),
    Column("Seconds", True),
    Column("Relative time", True),
)


def recommendation_section(recommendation: Recommendation) -> Section:
    """Computes what a report says of a recommendation."""
    environment = recommendation.environment
    return Section(
        kind="recommendation",
        name=recommendation.model_name,
        headline=answer_line(recommendation),
        lead=(*settings_line(recommendation), *binding_line(recommendation)),
        details=tuple(limit_lines(recommendation)),
        conditions="",
        figures=(_figure(recommendation),),
        tables=_tables(recommendation),
        notes=tuple(Note("", "", line) for line in _notes(recommendation)),
        command=environment.command if environment else None,
        settings=_settings(recommendation),
        environment=environment_facts(environment),
    )


def _figure(recommendation: Recommendation) -> Figure:
    return Figure(
        "limits",
        "The limits of the batch size",
        HEIGHT_IN,
        lambda ax: plot_limits(recommendation, ax),
        alt_text(limits_info(recommendation)),
    )


def _tables(recommendation: Recommendation) -> tuple[Table, ...]:
    texts = cost_rows(recommendation)
    if not texts:
        return ()
    rows = []
    for i, (row, cost) in enumerate(zip(texts, trained_sizes(recommendation), strict=True)):
        keys = (
            cost.batch_size,
            cost.micro_batch_size,
            cost.samples_per_second.value,
            cost.updates.value,
            cost.seconds.value,
            cost.relative_time.value,
        )
        cells = tuple(Cell(text, key) for text, key in zip(row, keys, strict=True))
        rows.append(Row(str(i), "", cost.batch_size == recommendation.batch_size, cells))
    title = cost_title(recommendation)
    return (Table(title, _COLUMNS, tuple(rows), best_means="the recommendation"),)


def _notes(recommendation: Recommendation) -> list[str]:
    choices = [LEARNING_RATE_COST] if trained_sizes(recommendation) else []
    return [*choices, *certainty_lines(recommendation)]


def _settings(recommendation: Recommendation) -> tuple[Fact, ...]:
    return (
        Fact("optimizer", recommendation.optimizer),
        Fact("learning rate of the model", _rate(recommendation)),
        Fact("batch size that it suits", f"{recommendation.base_batch_size:,}"),
        Fact("learning-rate rule", recommendation.learning_rate_rule or "none"),
        Fact("dtype policy", recommendation.dtype_policy),
        Fact("budget", f"{setting(recommendation.budget_s)} s"),
    )


def _rate(recommendation: Recommendation) -> str:
    rate = recommendation.base_learning_rate
    if recommendation.scheduled:
        return "a schedule"
    return "n/a (not a single number)" if rate is None else setting(rate)
