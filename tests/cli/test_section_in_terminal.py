"""What the report says of a record, printed in a terminal."""

import io

from input_profile_factory import make_profile, make_remedy
from rich.console import Console

from kbatch.cli.arguments import print_section
from kbatch.input_pipeline.report import input_section


def printed(section):
    """The section on a terminal of 100 columns."""
    console = Console(file=io.StringIO(), width=100)
    print_section(console, section)
    return console.file.getvalue()


def test_answer_tables_and_notes_are_printed_whole():
    section = input_section(make_profile(remedies=(make_remedy("cache [now]", 2.5),)))
    text = printed(section)
    assert text.startswith(section.headline)
    for line in (*section.lead, *section.details, *(f"Note: {n.text}" for n in section.notes)):
        assert f"\n{line}\n" in text
    for table in section.tables:
        assert f"\n{table.title}\n" in text
        assert all(title in text for title in table.headers if title != "Code")
    assert "cache [now]" in text
    assert "…" not in text


def test_code_stands_in_one_piece_below_its_table():
    name = "Z" * 120
    section = input_section(make_profile(remedies=(make_remedy(name, 2.5),)))
    assert f"\n{name}: code of {name}\n" in printed(section)
    assert "…" not in printed(section)
