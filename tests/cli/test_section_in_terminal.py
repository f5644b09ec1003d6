"""What the report says of a record, printed in a terminal."""

import io

from inference_factory import make_profile
from kbatch.inference.report import inference_section
from rich.console import Console

from kbatch.cli.arguments import print_section


def printed(section):
    """The section on a terminal of 250 columns."""
    console = Console(file=io.StringIO(), width=250)
    print_section(console, section)
    return console.file.getvalue()


def test_answer_tables_and_notes_are_printed_whole():
    section = inference_section(make_profile())
    text = printed(section)
    assert text.startswith(section.headline)
    for line in (*section.lead, *section.details, *(f"Note: {n.text}" for n in section.notes)):
        assert f"\n{line}\n" in text
    for table in section.tables:
        assert f"\n{table.title}\n" in text
        assert all(title in text for title in table.headers if title != "Code")
    assert "…" not in text
