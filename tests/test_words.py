"""The words: phrases that make a sentence hard to read, and how often others may occur."""

import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

from kbatch.records import notes

ROOT = Path(__file__).parent.parent
# Whole words; those in lower case also with a capital.
BANNED = ("None for", "None where", "anew", "likewise", "told apart", "tells apart", "but for")
BANNED += ("all the same", "mend", "mends", "mended", "likelier", "so many", "stands beside")
BANNED += ("nobody checked", "of one's own")
CODE = [path for end in ("py", "pyi", "html", "md") for path in ROOT.glob(f"kbatch/**/*.{end}")]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for end in ("md", "ipynb") for path in ROOT.glob(f"[dn]o*/**/*.{end}")),
]
# Comments and texts; Python 3.12 has a token for the text of an f-string.
SAID = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}
# Sentences that begin with "What" and are no questions.
WHAT = r'(?:"""|[.:!?]\s+|# |")What\b(?![^.?\n]*\?)'


@functools.cache
def text_of(path):
    """Return a text whose sentences are not broken by the ends of lines; of code, what is said."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = "\n".join(token.string for token in tokens if token.type in SAID)
    return re.sub(r"\n\s*#?\s*", " ", text)


def count(pattern, paths):
    found = {str(path.relative_to(ROOT)): len(re.findall(pattern, text_of(path))) for path in paths}
    return {path: number for path, number in found.items() if number}


@pytest.mark.parametrize("phrase", BANNED)
def test_no_sentence_has_a_banned_phrase(phrase):
    case = "(?i)" if phrase.islower() else ""
    found = count(rf"{case}\b{phrase}\b", CODE + DOCS)
    assert found == {}, "write the sentence again, with a subject and a verb"


@pytest.mark.parametrize(("pattern", "most"), [(r"(?i)(?<![.\w])where\b", 120), (WHAT, 25)])
def test_where_and_what_are_rare(pattern, most):
    found = count(pattern, CODE)
    assert sum(found.values()) < most, found


TEXTS = {code: text for code, text in notes.KINDS.items() if isinstance(text, str)}


@pytest.mark.parametrize("code", TEXTS)
def test_the_text_of_a_note_is_short(code):
    fixed = re.sub(r"\{[^{}]*\}", "", TEXTS[code])
    assert len(fixed) <= 160 and len(re.findall(r"[.!?](?:\s|$)", TEXTS[code])) <= 2
