"""Reports of what was measured: one HTML file, or Markdown with its figures beside it."""

from collections.abc import Sequence
from pathlib import Path

from kbatch.records.whole_files import write_whole_file
from kbatch.report.content import Reported
from kbatch.report.html_page import render_html
from kbatch.report.markdown_page import markdown_files


def write_report(
    study_or_profiles: Reported | Sequence[Reported], path: str | Path
) -> tuple[Path, ...]:
    """Writes what was found: the decision first, then table, figures, caveats, environment.

    HTML is one file that needs no network. Markdown has its figures in files beside it,
    `<name>-<figure>.png`.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.write_report(study, "digits.html")
    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> kbatch.write_report([study, profile], "digits.md")

    Args:
        study_or_profiles: A `Study`, a `TrainingProfile`, an `InferenceProfile`, an
            `InputPipelineProfile` or a `MaxBatchSizeResult`, or a list of them, which makes one
            document with a section each.
        path: File to write, with suffix `.html` or `.md`.

    Returns:
        The files written, the report last.

    Raises:
        ValueError: If the suffix is another one, a study is empty or the list is.
        OSError: If the folder cannot be written, with what to do.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".html":
            files = {path: render_html(study_or_profiles).encode()}
        case ".md":
            files = markdown_files(study_or_profiles, path)
        case _:
            raise ValueError(
                "A report's `path` must end in `.html` (one file) or `.md` (with figures beside "
                f"it). Received: path={str(path)!r}."
            )
    for file, data in files.items():
        write_whole_file(file, data)
    return tuple(files)
