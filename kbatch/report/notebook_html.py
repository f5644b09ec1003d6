"""What a notebook shows of a record: the decision, the tables, what to mind."""

from typing import Any

from markupsafe import Markup

from kbatch.report.content import section_of
from kbatch.report.templating import prose, templates
from kbatch.study.study_record import Study

_MOST_ROWS = 40


def notebook_html(record: Any) -> str | None:
    """Writes a record as a piece of HTML for the output of a cell.

    It has no style sheet and no script, which notebooks take away, and no colours, so that it
    suits light and dark pages.

    Args:
        record: A study, a profile or a result.

    Returns:
        The HTML; None for a record that has no report, whose text stands then.
    """
    try:
        section = section_of(record)
    except ValueError as error:
        # An object that is looked at must not raise: what is missing is said in its place.
        return Markup("<p>{}</p>").format(prose(str(error))) if isinstance(record, Study) else None
    return templates().get_template("notebook.html").render(section=section, most=_MOST_ROWS)
