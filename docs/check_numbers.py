"""Check that README.md and the pages of docs state the values of docs/data/numbers.json.

python docs/check_numbers.py

The file holds what the scripts printed: each entry has the command, how long it takes, the day, the
versions and the values. A comment in a page names a value. It stands after a number, as in
`0.53<!--search.grid-->`, or on a line of its own before lines such as those of a table.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md"))
MARK = re.compile(r"<!--(\w+)\.(\w+)-->")


def differences(text: str, entries: dict[str, dict]) -> Iterator[str]:
    """Yield a sentence for each value of a page that is not the recorded one."""
    for mark in MARK.finditer(text):
        name, key = mark.groups()
        value = entries.get(name, {}).get("values", {}).get(key)
        if value is None:
            yield f"{name}.{key} is not in numbers.json"
        elif isinstance(value, str):
            if not re.search(rf"(?<![\d.]){re.escape(value)}$", text[: mark.start()]):
                yield f"{name}.{key} is {value}, but the page says {text[: mark.start()][-20:]!r}"
        elif not text[mark.end() :].lstrip().startswith("\n".join(value) + "\n"):
            yield f"the lines after {name}.{key} are not the recorded ones"
    tables = re.findall(r"(?m)^(.*)\n+\|.*\n\|---", text)
    for before in tables if "# Performance" in text else ():
        name = MARK.match(before)
        if name is None:
            yield f"no comment names the table after {before!r}"


def conditions(entry: dict) -> str:
    """Return the sentence that a page has below the heading of a measured table."""
    return f"`{entry['command']}` ({entry['takes']}), {entry['date']}, {entry['on']}."


def main() -> None:
    """Exit with a line for each difference."""
    entries = json.loads((DOCS / "data" / "numbers.json").read_text(encoding="utf-8"))
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    wrong = [f"{name}: {text}" for name in pages for text in differences(pages[name], entries)]
    stated = {mark for text in pages.values() for mark in MARK.findall(text)}
    for name, entry in entries.items():
        if conditions(entry) not in pages["performance.md"]:
            wrong.append(f"performance.md: the conditions of {name} are: {conditions(entry)}")
        wrong += [
            f"no page states {name}.{key}" for key in entry["values"] if (name, key) not in stated
        ]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
