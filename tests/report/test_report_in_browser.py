import html
import json
import re
import shutil
import subprocess

import pytest
from records_factory import make_study, make_trial

from kbatch.page.result import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

# The report in a frame as wide as a telephone or a desk, its buttons pressed.
HARNESS = """<!doctype html>
<iframe id="frame" src="report.html" style="width:{width}px;height:900px">
</iframe><script>
frame.onload = () => {{
  const page = frame.contentDocument;
  const rows = () => [...page.querySelectorAll("tbody tr")].map((row) => row.cells[0].dataset.sort);
  const press = (title) => [...page.querySelectorAll("thead button")]
    .find((button) => button.textContent === title).click();
  const found = {{
    overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    first: rows(),
  }};
  press("Samples/s"); found.slowest = rows();
  press("Samples/s"); found.fastest = rows();
  found.sorted = page.querySelector("[aria-sort=descending] button").textContent.trim();
  press("Status"); found.status = rows();
  const out = document.createElement("pre");
  out.id = "found"; out.textContent = JSON.stringify(found); document.body.append(out);
}};
</script>"""


def browse(folder, *arguments):
    return subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-sync"),
            *("--disable-component-update", "--allow-file-access-from-files"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *arguments),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_fits_sorts_and_logs_no_error(tmp_path, width):
    trials = [make_trial(size, rate=rate) for size, rate in ((16, 3000), (32, 1000), (64, 2000))]
    study = make_study(*trials, make_trial(128, status="failed", failure="word" * 60))
    write_report(study, tmp_path / "report.html")
    (tmp_path / "harness.html").write_text(HARNESS.format(width=width))
    done = browse(tmp_path, "--dump-dom", (tmp_path / "harness.html").as_uri())
    assert "CONSOLE" not in done.stderr
    found = json.loads(html.unescape(re.search(r'id="found">(.*?)</pre>', done.stdout)[1]))
    assert found == {
        "overflow": 0,
        "first": ["16", "32", "64", "128"],
        "slowest": ["32", "64", "16", "128"],
        "fastest": ["16", "64", "32", "128"],
        "sorted": "Samples/s",
        "status": ["16", "64", "32", "128"],
    }


def test_a_page_of_many_trials_loads_the_images_of_its_marks(tmp_path):
    trials = (make_trial(16, trial_id=f"{k}", hyperparameters={"k": k}) for k in range(501))
    write_report(make_study(*trials), tmp_path / "report.html")
    assert "<image " in (tmp_path / "report.html").read_text()
    done = browse(tmp_path, "--dump-dom", (tmp_path / "report.html").as_uri())
    assert "CONSOLE" not in done.stderr
