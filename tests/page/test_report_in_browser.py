"""Reports in Chromium: at the widths of a phone, a tablet and a desktop, and sorted by a click."""

import html
import json
import re
import shutil
import subprocess

import pytest
from record_samples import RECORDS

from kbatch.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

# Runs `look` in each report, in a frame of each width, and writes the results.
HARNESS = """<!doctype html>
<body><script>
const look = (page) => {{ {look} }};
const found = {{}};
let waiting = 0;
for (const name of {names}) for (const width of {widths}) {{
  waiting += 1;
  const frame = document.createElement("iframe");
  frame.style = `width:${{width}}px;height:900px`;
  frame.onload = () => {{
    found[`${{name}} ${{width}}`] = look(frame.contentDocument);
    waiting -= 1;
    if (waiting === 0) {{
      const out = document.createElement("pre");
      out.id = "found"; out.textContent = JSON.stringify(found); document.body.append(out);
    }}
  }};
  frame.src = name + ".html";
  document.body.append(frame);
}}
</script>"""
WIDER = """
  const wider = (element) => element.scrollWidth - element.clientWidth;
  return [wider(page.documentElement), ...[...page.querySelectorAll(".scroll")].map(wider)];
"""
SORTED = """
  const rows = () => [...page.querySelectorAll("tbody tr")].map((row) => row.cells[0].dataset.sort);
  const press = (title) => [...page.querySelectorAll("thead button")]
    .find((button) => button.textContent === title).click();
  const found = {first: rows()};
  press("peak memory (MiB)"); found.rising = rows();
  press("peak memory (MiB)"); found.falling = rows();
  found.sorted = page.querySelector("[aria-sort=descending] button").textContent;
  return found;
"""


def browse(folder, names, widths, look):
    """Return the results of `look` for each report and width. Nothing may be logged."""
    page = HARNESS.format(look=look, names=json.dumps(names), widths=json.dumps(widths))
    (folder / "harness.html").write_text(page)
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-sync"),
            *("--disable-component-update", "--allow-file-access-from-files"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
            *("--virtual-time-budget=60000", "--dump-dom", (folder / "harness.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "CONSOLE" not in done.stderr
    return json.loads(html.unescape(re.search(r'id="found">(.*?)</pre>', done.stdout)[1]))


def test_page_fits_the_window(tmp_path):
    for name, record in RECORDS.items():
        write_report(record, tmp_path / f"{name}.html")
    found = browse(tmp_path, [*RECORDS], [360, 600, 1200], WIDER)
    assert len(found) == 3 * len(RECORDS)
    assert {name: wider for name, (wider, *_) in found.items() if wider} == {}
    assert {name: wider for name, wider in found.items() if "360" not in name and any(wider)} == {}


def test_notebook_cell_fits_the_window(tmp_path):
    for name, record in (RECORDS | {"decision": RECORDS["study"].decide()}).items():
        (tmp_path / f"{name}.html").write_text(f"<!doctype html>{record._repr_html_()}")
    look = WIDER.replace('".scroll"', '"div, pre"')
    found = browse(tmp_path, [*RECORDS, "decision"], [600, 1200], look)
    # A wide table scrolls in a narrow window only.
    wider = {name: parts if "1200" in name else parts[:1] for name, parts in found.items()}
    assert len(wider) == 2 * (1 + len(RECORDS)) and not any(map(any, wider.values())), wider


def test_page_columns_of_figures(tmp_path):
    write_report(RECORDS["study"], tmp_path / "study.html")
    look = """return [...page.querySelectorAll(".figures")].map((grid) => [grid.offsetWidth,
      ...[...grid.querySelectorAll("img")].map((img) => [img.offsetLeft, img.offsetWidth])]);"""
    found = browse(tmp_path, ["study"], [600, 1200], look)
    for grid, first, second, *_ in (one for one in found["study 1200"] if len(one) > 2):
        assert first[0] < first[0] + first[1] < second[0] and first[1] + second[1] > 0.9 * grid
    for grid, *images in found["study 600"]:
        assert {width for _, width in images} == {grid}


def test_page_table_is_sorted_by_a_click(tmp_path):
    write_report(RECORDS["largest batch"], tmp_path / "found.html")
    (found,) = browse(tmp_path, ["found"], [1200], SORTED).values()
    assert found == {
        "first": ["1", "40", "800", "4000", "2600", "2250", "2250"],
        "rising": ["1", "40", "800", "2250", "2250", "2600", "4000"],
        "falling": ["2600", "2250", "2250", "800", "40", "1", "4000"],
        "sorted": "peak memory (MiB)",
    }
