"""Run the demo, and put its page and figure into README.md and docs.

python docs/demo.py    half a minute on two quiet cores

Writes the printed page and the seconds into README.md and docs/data/numbers.json, the date into
docs/performance.md, and the figure into docs/images/trials.png.
"""

import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_numbers import conditions

DOCS = Path(__file__).parent
README, PERFORMANCE = DOCS.parent / "README.md", DOCS / "performance.md"
NUMBERS = DOCS / "data" / "numbers.json"


def main() -> None:
    """Run the demo and write what it shows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kbatch", "demo", "--output", folder]
        began_s = time.monotonic()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = f"{time.monotonic() - began_s:.0f} s"
        shutil.copy(Path(folder, "trials.png"), DOCS / "images" / "trials.png")
    page = re.split("(?m)^(?=Train with |Keep )", done.stdout)[-1]
    block = ["```text", *page.partition("\nfigure: ")[0].splitlines(), "```"]
    entries = json.loads(NUMBERS.read_text(encoding="utf-8"))
    date = f"{datetime.date.today():%-d %B %Y}"
    before = conditions(entries["demo"])
    entries["demo"] |= {"date": date, "values": {"page": block, "seconds": seconds}}
    performance = PERFORMANCE.read_text(encoding="utf-8")
    performance = performance.replace(before, conditions(entries["demo"]))
    PERFORMANCE.write_text(performance, encoding="utf-8")
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    NUMBERS.write_text(f"{text}\n", encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    lines = "<!--demo.page-->\n" + "\n".join(block)
    readme = re.sub(r"<!--demo\.page-->\n```text\n.*?\n```", lambda _: lines, readme, flags=re.S)
    readme = re.sub(r"\d+ s(?=<!--demo\.seconds-->)", seconds, readme)
    README.write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
