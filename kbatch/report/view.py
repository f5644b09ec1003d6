"""A page on this machine that follows searches while they run, from their files alone."""

import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from kbatch.document.numbers import join_words, pluralize
from kbatch.records.json_codec import RecordError, printable, read_json
from kbatch.report.content import ReportContent, report_content
from kbatch.report.pages import render_page
from kbatch.study.names import at_most, outcome, trial_names
from kbatch.study.study import RECORD_NAME, UNFINISHED, Study, ended_part, load_study

HOST = "127.0.0.1"
_FILES = ("kbatch*.json", f"trial_*/{RECORD_NAME}", "trial_*/trial.json")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class SearchStatus(NamedTuple):
    name: str
    text: str
    failures: tuple[str, ...]  # A line each.


def view_server(projects: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Make the server of a page of searches, which only reads, for this machine's own browsers."""
    for project in projects:
        if not project.is_dir() or not any(project.glob("trial_*/trial.json")):
            load_study(project)  # It says where a study may lie instead.
    drawn = functools.lru_cache(maxsize=1)(view_page)  # When a file has changed and somebody looks.
    drawing = threading.Lock()  # matplotlib draws in one thread at a time.

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            # Another page's script may reach this address under a name of its own.
            name = (self.headers.get("Host") or "").partition(":")[0]
            if name not in (HOST, "localhost"):
                self.send_error(403)
            elif self.path == "/":
                with drawing:
                    page = drawn(tuple(projects), version_of(projects))
                self._send(page, "text/html")
            elif self.path == "/version":  # Changes when a file of a search does.
                self._send(version_of(projects), "text/plain")
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data))}
            for name, value in (headers | _HEADERS).items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # The browser has gone on.
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing: the page asks every two seconds."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise OSError(
            "`--port` must be a free port from 1 to 65535, or 0 for any that is free. "
            f"Received: --port {port} ({error})."
        ) from error


def version_of(projects: Sequence[Path]) -> str:
    """Return a text that changes when a record of a search does."""
    found = hashlib.sha256()
    for project in projects:
        for file in sorted(file for pattern in _FILES for file in project.glob(pattern)):
            try:
                state = file.stat()
            except FileNotFoundError:  # Deleted meanwhile.
                continue
            found.update(f"{file} {state.st_mtime_ns} {state.st_size}\n".encode())
    return found.hexdigest()[:16]


def view_page(projects: Sequence[Path], version: str) -> str:
    studies: list[Study | None] = []
    for project in projects:
        try:
            studies.append(load_study(project))
        except FileNotFoundError:  # It begins, or was deleted.
            studies.append(None)
    if len({project.name for project in projects}) < len(projects):
        pairs = zip(projects, studies, strict=True)
        studies = [study and dataclasses.replace(study, name=str(at)) for at, study in pairs]
    ended = [ended_part(study) for study in studies if study is not None]
    content = ReportContent("No trial has ended yet", (), ())
    if any(study.trials for study in ended):
        content = report_content([study for study in ended if study.trials])
    progress = [progress_of(*pair) for pair in zip(projects, studies, strict=True)]
    return render_page(content, "view.html", progress=progress, version=version)


def progress_of(project: Path, study: Study | None) -> SearchStatus:
    """Say how many trials of a search have ended, which have not, and which failed."""
    trials = () if study is None else study.trials
    names, running = trial_names(trials), []
    ended = {t.trial_id for t in trials if t.status not in UNFINISHED}
    stopped = {t.trial_id: names.name(t) for t in trials if t.status == "interrupted"}
    for file in sorted(project.glob("trial_*/trial.json")):
        try:
            state = read_json(file)
            if state["status"] == "RUNNING":
                values = state["hyperparameters"]["values"]
                running.append(printable(f"batch {values['batch_size']}"))
                ended.discard(state["trial_id"])
                stopped.pop(state["trial_id"], None)
        except (RecordError, LookupError, TypeError):  # Half written, or deleted meanwhile.
            continue
    failed = [t for t in trials if t.trial_id in ended and t.status != "completed"]
    text = f"{pluralize(len(ended), 'trial')} ended"
    asked = study.search.settings.get("batch_sizes") if study and study.search else None
    if isinstance(asked, list):
        sizes = {trial.batch_size for trial in trials if trial.trial_id in ended}
        text += f" ({sum(size in asked for size in sizes)} of {len(asked)} batch sizes)"
    if failed:
        text += f", {len(failed)} without a result"
    if stopped:
        text += f"; interrupted: batch {join_words(at_most(list(stopped.values())))}"
    if running:
        text += f"; running: {join_words(at_most(running))}"
        text += ", so the answer may change" if ended else ""
    times = []
    for file in project.glob(f"trial_*/{RECORD_NAME}"):
        with contextlib.suppress(FileNotFoundError):  # Deleted meanwhile.
            times.append(file.stat().st_mtime)
    if times:
        text += f". Last record at {datetime.fromtimestamp(max(times)):%H:%M:%S}"
    return SearchStatus(
        name=project.name if study is None else study.name,
        text=f"{text}.",
        failures=tuple(f"{names.name(t)}: {outcome(t)}, {t.failure}" for t in failed),
    )
