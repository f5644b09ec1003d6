import functools
import re
from pathlib import Path

import pytest
from html_page import Page
from records_factory import make_study, make_trial

from kbatch.page.document import document_files
from kbatch.report import write_report
from kbatch.study.comparison import compare
from kbatch.study.study import Study

HTML = Path("report.html")
HOSTILE = "<script>alert('x')</script> a|b\nsecond `<i>line</i>` *here* [x](y) ` *there*"


@functools.cache
def plain_html():
    """Return the page of a study, drawn once for all tests that read it."""
    return document_files([make_study()], HTML)[HTML].decode()


def render_markdown(study):
    """Return the text of a report in Markdown."""
    return document_files([study], Path("report.md"))[Path("report.md")].decode()


def hostile_study():
    trials = make_trial(16), make_trial(32, status="failed", failure=HOSTILE)
    return make_study(*trials, name="<b>digits|", problems=(HOSTILE,))


def test_html_is_well_formed_and_starts_with_the_decision():
    words = (page := Page(plain_html())).text
    assert page.open == []
    assert words.index("Train with batch size 64 ") < words.index("learning rate") > 0
    assert words.index("Started") > words.index("How it was measured")
    # The code to use is visible without a click.
    assert words.index("decision.apply(build)") < words.index("How it was measured")


def test_html_needs_no_network():
    page = Page(text := plain_html())
    assert len(text.encode()) < 1_000_000
    assert not any(map(page.found, ("link", "iframe", "object")))
    addresses = [tag[n] for _, tag in page.tags for n in {"src", "srcset", "href"} & tag.keys()]
    assert [address for address in addresses if not address.startswith(("#", "data:"))] == []
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text


def test_html_is_accessible():
    page = Page(plain_html())
    assert page.found("html") == [{"lang": "en"}]
    figures = page.found("img")
    assert len(figures) == len(page.found("figure")) == 4
    said = "Charts of throughput and validation accuracy by batch size. Train with batch size 64 "
    assert figures[0]["alt"] == f"{said}and learning rate 0.001 (not certain)."
    assert all(re.fullmatch(r"Charts? of \w[^:]*\. [A-Z].*\.", each["alt"]) for each in figures)
    headers = [a for a in page.found("th") if a["scope"] == "col"]
    assert {a["aria-sort"] for a in headers} == {"none"}
    assert len([a for a in page.found("th") if a["scope"] == "row"]) == 7 + 7
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_html_escapes_texts():
    page = Page(document_files([study := hostile_study()], HTML)[HTML].decode())
    assert len(page.found("script")) == 1
    assert page.found("b") == page.found("i") == []
    assert "<script>alert('x')</script> a|b second <i>line</i> *here* [x](y) ` *there*" in page.text
    cells = Page(study._repr_html_() + compare(study, make_study())._repr_html_())
    assert "<b>digits|" in cells.text and not any(map(cells.found, ("script", "b", "i")))


def test_markdown_tables_are_well_formed():
    text = render_markdown(make_study())
    assert "sh\npython examples/digits.py --seed 0\n" in text
    assert "| Host memory | 64.0 GiB |" in text and "| tensorflow | 2.21.0 |" in text
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert [len(block.splitlines()) for block in blocks] == [2 + 7, 2 + 7, 2 + 15, 2 + 9]
    for block in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(counts) == 1
    assert "\n\n\n" not in text
    text = render_markdown(make_study(make_trial(16), make_trial(64)))  # Figures without notes.
    assert "\n\n\n" not in text and not re.search(r"(?m)^CPU, .* Keras", text)


def test_markdown_escapes_texts():
    text = render_markdown(hostile_study())
    assert "<script>" not in text
    assert r"\<script\>alert('x')\</script\> a\|b second `<i>line</i>` \*here\*" in text
    assert r"`<i>line</i>` \*here\* \[x\](y) \` \*there\*" in text


@pytest.mark.parametrize(
    ("results", "name", "word"),
    [
        (make_study(), "report.txt", r"report\.txt"),
        (make_study(), "report", "report"),
        (Study("digits", ()), "report.html", r"tuner\.search"),
        (Study("digits", ()), "report.md", r"tuner\.search"),
        *(
            (results, "report.html", "A report needs a result")
            for results in ("a study", None, 3, [], [make_study(), "another"])
        ),
    ],
)
def test_write_report_invalid_arguments(tmp_path, results, name, word):
    with pytest.raises(ValueError, match=word):
        write_report(results, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
