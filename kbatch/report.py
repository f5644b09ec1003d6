"""Write a report of one or several results, in HTML or Markdown."""

from collections.abc import Sequence
from pathlib import Path

from kbatch.errors import InputError
from kbatch.page.document import document_files
from kbatch.page.result import Result
from kbatch.records.json_codec import write_whole_file
from kbatch.study.comparison import Comparison, compare
from kbatch.study.study import Study


def _with_comparison(results: Sequence[Result]) -> tuple[list[Result], str]:
    """Put the comparison of several studies before them, or say why they are not compared."""
    contents: list[Result] = []
    for result in results:  # The studies of a comparison follow it.
        studies = result.studies if isinstance(result, Comparison) else ()
        contents += [result, *(study for study in studies if study not in results)]
    studies = [result for result in contents if isinstance(result, Study)]
    if len(studies) < 2 or any(isinstance(result, Comparison) for result in contents):
        return contents, ""
    try:
        return [compare(studies), *contents], ""
    except InputError as error:
        return contents, f"The studies are not compared. {error}"


def write_report(results: Result | Sequence[Result], path: str | Path) -> tuple[Path, ...]:
    """Write a report: the answer, then figures, table, notes, and conditions of the measurement.

    A report of several studies begins with the table of `kbatch.compare`. HTML is one file that
    needs no network. Markdown has its figures in separate files, `<name>-<figure>.png`.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.write_report(study, "digits.html")
    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> kbatch.write_report([study, profile], "digits.md")
    >>> kbatch.write_report(kbatch.compare(adam, sgd), "optimizers.html")

    Args:
        results: A `Study`, a `Comparison`, or a result of a function that measures, or a list of
            these, which gives one document.
        path: String or path. File to write, with suffix `.html` or `.md`.

    Returns:
        The written files, the report last.

    Raises:
        ValueError: If the suffix is another one, or a study or the list is empty.
        OSError: If a file cannot be written.
    """
    contents = list(results) if isinstance(results, Sequence) else [results]
    if not contents or not all(isinstance(result, Result) for result in contents):
        raise ValueError(
            "A report needs a result, such as `tuner.study` or a profile, or a list of results. "
            f"Received: results={results!r}."
        )
    path = Path(path)
    if path.suffix.lower() not in (".html", ".md"):
        raise ValueError(
            "`path` must end in `.html` (one file) or `.md` (with figures in separate files). "
            f"Received: path={str(path)!r}."
        )
    contents, refusal = _with_comparison(contents)
    files = document_files(contents, path, refusal)
    for file, data in files.items():
        write_whole_file(file, data)
    return tuple(files)
