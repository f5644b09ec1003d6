"""The page that a run of the GPU checks leaves behind."""

import re


class Check:
    """One check: how it ended, how long it took and what it measured."""

    def __init__(self, nodeid):
        self.name = re.sub(r"\[(.*)\]$", r" (\1)", nodeid.rpartition("::")[2])
        self.name = self.name.removeprefix("test_").replace("_", " ")
        self.outcome = "passed"
        self.facts = {}
        self.reason = ""

    def add(self, report):
        """Takes the report of its set-up, call or end."""
        self.facts |= dict(report.user_properties)
        if report.outcome != "passed" and self.outcome == "passed":
            self.outcome = report.outcome
            self.reason = _last_line(report.longrepr)


def _last_line(longrepr):
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message.splitlines()[0]
    if isinstance(longrepr, (tuple, list)):  # Of a skip: file, line and reason.
        return str(longrepr[-1])
    lines = [line for line in str(longrepr).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def file_name(environment):
    """Names the page after the GPU and TensorFlow."""
    words = f"{environment['devices'][0]} tensorflow {environment['versions']['tensorflow']}"
    return re.sub(r"[^a-z0-9.]+", "-", words.lower().replace("gpu:0", "")).strip("-")


def page(checks, environment, seconds):
    """Writes the page in Markdown.

    Args:
        checks: The checks, in order.
        environment: An `EnvironmentRecord` as a dict.
        seconds: How long all took.
    """
    outcomes = [check.outcome for check in checks]
    counts = [f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes)]
    devices, day = ", ".join(environment["devices"]), environment["created_at"][:10]
    versions = environment["versions"] | {"system": environment["platform"]}
    lines = [
        "---",
        "orphan: true",
        "---",
        "",
        f"# GPU checks: {devices}, TensorFlow {environment['versions']['tensorflow']}",
        "",
        f"`make test-gpu`, {day}: {', '.join(counts)}, in {seconds:.0f} s.",
        "",
        "| | |",
        "|---|---|",
        f"| devices | {devices} |",
        *(f"| {name} | {value} |" for name, value in versions.items()),
        "",
        "| Check | Outcome | Seconds | Measured |",
        "|---|---|---:|---|",
    ]
    for check in checks:
        facts = [
            f"{name}: {', '.join(map(str, found)) if isinstance(found, list) else found}"
            for name, found in check.facts.items()
            if name not in ("environment", "seconds")
        ]
        found = "; ".join([*([check.reason] if check.reason else []), *facts])
        cells = (check.name, check.outcome, f"{check.facts['seconds']:.0f}", found)
        lines.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text):
    # What would end a cell or begin a tag.
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;")[:400]
