"""Read documents and questions from files, split documents into chunks, and tokenize text into words.

A question-answer set (`read_qa_set`) gives both: a document for each page, and questions with their pages.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.files import read_file, read_json_lines, read_parquet
from groupwise.records import is_unicode

WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
STOP_WORDS = frozenset(
    WORD.findall(
        "a an and are as at be been but by can could did do does for from had has have how i if in into is "
        "it its me my no not of on or our should so such than that the their them then there these they "
        "this to was we were what when where which who whom why will with would you your"
    )
)


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text in singular form, without stop words."""
    words = (word.lower() for word in WORD.findall(text))
    return [singular(word) for word in words if word not in STOP_WORDS]


def singular(word: str) -> str:
    """Drop a plural or possessive ending. Conservative, so that distinct medical terms stay distinct."""
    word = word.removesuffix("'s").removesuffix("’s")
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


BOILERPLATE = 12
"""An answer shared by this many questions is boilerplate."""
SYNONYMS = 3
"""Maximum number of synonyms in the context line."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document; searches return its id."""

    id: str
    text: str
    context: str = ""
    """A line that is prepended to every chunk."""


@dataclass(frozen=True, slots=True)
class RetrievalQuestion:
    """A question and the documents that answer it."""

    text: str
    documents: tuple[str, ...]
    answers: tuple[str, ...] = ()
    held_out: bool = False


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a JSONL file, gzipped or not, or of a Parquet file."""
    return (row for _, row in located_rows(path))


def located_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the same rows, each with its location: "rows.jsonl, line 3"."""
    for where, row in read_file(path, read_parquet if path.suffix == ".parquet" else read_json_lines):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected a dict of columns, got {type(row).__name__}")
        if not is_unicode(row):
            raise ConfigError(f"{where}: the text is not valid Unicode")
        yield where, row


def text_in(row: Mapping[str, Any], column: str, *, where: str) -> str | None:
    """Return the text of a column, or None if it is missing; raise ConfigError for other types."""
    value = row.get(column)
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{where}: `{column}` must be text; got {str(value)[:40]}")


def read_documents(path: Path) -> list[Document]:
    """Read one document {id, text, …} per row; `category`, `group` and `synonyms` make the context."""
    documents: dict[str, Document] = {}
    for where, row in located_rows(path):
        name, text = row.get("id"), text_in(row, "text", where=where)
        if name is None or text is None:
            raise ConfigError(f"{where}: a document requires `id` and `text`; it has {sorted(row)}")
        if str(name) in documents:
            raise ConfigError(f"{where}: the id {name} occurs twice")
        documents[str(name)] = Document(str(name), text, context_line(row, where=where))
    return list(documents.values())


def read_questions(path: Path) -> list[RetrievalQuestion]:
    """Read one question {question, documents} per row."""
    questions = []
    for where, row in located_rows(path):
        text, documents = row.get("question"), row.get("documents")
        if not isinstance(text, str) or not isinstance(documents, list) or not documents:
            raise ConfigError(
                f"{where}: a question requires `question` and a list `documents`; it has {sorted(row)}"
            )
        answers = (str(row["answer"]),) if row.get("answer") else ()
        questions.append(RetrievalQuestion(text, tuple(map(str, documents)), answers, held_out=True))
    return questions


def context_line(row: Mapping[str, Any], *, where: str) -> str:
    """Return the context line of a row.

    Example: {"category": "", "group": "Disorders", "synonyms": ["a", "b"]} ->
    "Semantic Group: Disorders | Synonyms: a, b"
    """
    synonyms = row.get("synonyms") or []
    synonyms = synonyms.split("|") if isinstance(synonyms, str) else synonyms
    if not isinstance(synonyms, list):
        raise ConfigError(
            f"{where}: `synonyms` must be a list, or text separated by |; got {str(synonyms)[:40]}"
        )
    parts = (
        ("Category", row.get("category") or ""),
        ("Semantic Group", row.get("group") or row.get("umls_semantic_group") or ""),
        ("Synonyms", ", ".join(str(synonym) for synonym in synonyms[:SYNONYMS])),
    )
    return " | ".join(f"{name}: {value}" for name, value in parts if value)


@dataclass(frozen=True, slots=True)
class QaSet:
    """The documents and questions of a question-answer set."""

    documents: tuple[Document, ...]
    questions: tuple[RetrievalQuestion, ...]


def read_qa_set(path: Path, *, pages: Mapping[str, str] | None = None) -> QaSet:
    """Read rows of a question, an answer and the page they come from.

    A document is a page (`doc`, or else its URL), regardless of the number of questions about it. Its text is
    the fetched page, or all of its answers. The gold documents of a question are all pages that contain it.
    Lists of links and boilerplate answers are indexed, but are not targets of questions.
    """
    rows: list[tuple[str, dict[str, Any]]] = []
    contexts: list[str] = []
    for where, row in located_rows(path):
        question, answer = (text_in(row, column, where=where) for column in ("question", "answer"))
        if question and answer:
            rows.append((page_of(row, where=where), row))
            contexts.append(context_line(row, where=where))
    if not rows:
        raise ConfigError(f"{path}: no row has a question and an answer")
    rows = split_by_url(rows)
    by_page: dict[str, list[dict[str, Any]]] = defaultdict(list)
    first_context: dict[str, str] = {}
    for (name, row), context in zip(rows, contexts, strict=True):
        by_page[name].append(row)
        first_context.setdefault(name, context)
    documents = []
    for name, members in by_page.items():
        url = url_of(members[0])
        text = pages.get(url) if pages is not None else join_answers(row["answer"] for row in members)
        if text:
            documents.append(Document(name, text, first_context[name]))
    names = {document.id for document in documents}
    return QaSet(tuple(documents), tuple(questions_of(rows, names)))


def page_of(row: Mapping[str, Any], *, where: str) -> str:
    """Return the name of a row's page. Ids repeat across sources, so the URL takes precedence."""
    if name := row.get("doc") or url_of(row):
        return str(name)
    if not row.get("document_id"):
        raise ConfigError(f"{where}: no `doc`, `url` or `document_url`; it has {', '.join(row)}")
    return ":".join(str(row[column]) for column in ("document_source", "document_id") if row.get(column))


def split_by_url(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Rename pages that share a name but have different URLs to their URLs."""
    urls: dict[str, set[str]] = defaultdict(set)
    for name, row in rows:
        urls[name].add(url_of(row))
    return [(url_of(row) or name if len(urls[name]) > 1 else name, row) for name, row in rows]


def url_of(row: Mapping[str, Any]) -> str:
    return str(row.get("url") or row.get("document_url") or "")


def join_answers(answers: Iterable[str]) -> str:
    """Return the distinct answers of a page, in order."""
    return "\n\n".join(dict.fromkeys(answer.strip() for answer in answers))


def questions_of(
    rows: Sequence[tuple[str, Mapping[str, Any]]], documents: set[str]
) -> Iterator[RetrievalQuestion]:
    """Yield each distinct question; each row comes with the name of its page."""
    shared = Counter(row["answer"] for _, row in rows)
    gold: dict[str, list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for name, row in rows:
        if name in documents:
            gold[" ".join(row["question"].split())].append((name, row))
    for text, members in gold.items():
        good = [one for one in members if not one[1].get("links") and shared[one[1]["answer"]] < BOILERPLATE]
        if good:
            yield RetrievalQuestion(
                text,
                tuple(dict.fromkeys(name for name, _ in members)),
                tuple(dict.fromkeys(row["answer"] for _, row in good)),
                held_out=any(is_held_out(name, row) for name, row in good),
            )


def is_held_out(page: str, row: Mapping[str, Any]) -> bool:
    """Return the row's split, or else hold out one page in ten by a hash of its name."""
    if "split" in row:
        return bool(row["split"] == "test")
    return hashlib.sha256(page.encode()).digest()[0] % 10 == 0


Spans = Callable[[str], Sequence[tuple[int, int]]]
"""A tokenizer: returns the start and end of each token in a text."""

TOKEN = re.compile(r"\w+|[^\w\s]")
SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|\n+")
LEAST = 16
"""Minimum number of tokens for the text of a chunk; a longer context is truncated."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document, as it is indexed."""

    id: str
    document: str
    text: str
    """Includes the context."""


def plain_spans(text: str) -> list[tuple[int, int]]:
    """Split into words and punctuation: about as many tokens as a subword tokenizer gives for English."""
    return [match.span() for match in TOKEN.finditer(text)]


def chunks_of(document: Document, *, budget: int = 256, spans: Spans = plain_spans) -> Iterator[Chunk]:
    """Yield the chunks of a document, each of at most `budget` tokens including the context."""
    if budget < 2 * LEAST:
        raise ConfigError(f"the budget of a chunk must be at least {2 * LEAST} tokens; got {budget}")
    context = truncate(document.context, budget - LEAST, spans)
    room = budget - len(spans(context))
    for number, piece in enumerate(pieces(document.text, room=room, spans=spans)):
        text = f"{context}\n\n{piece}" if context else piece
        yield Chunk(f"{document.id}_chunk_{number}", document.id, text)


def truncate(text: str, budget: int, spans: Spans) -> str:
    tokens = spans(text)
    return text if len(tokens) <= budget else text[: tokens[budget - 1][1]]


def pieces(text: str, *, room: int, spans: Spans) -> Iterator[str]:
    """Yield parts of at most `room` tokens that end at the last sentence end, or else at the token limit.

    Concatenated, they are the text.
    """
    tokens = spans(text)
    starts = [start for start, _ in tokens]
    ends = [bisect_right(starts, match.end() - 1) for match in SENTENCE_END.finditer(text)]
    """Number of tokens before the end of each sentence."""
    first, at = 0, 0
    while first < len(tokens):
        last = min(first + room, len(tokens))
        if last < len(tokens):
            sentence = bisect_right(ends, last) - 1
            if sentence >= 0 and ends[sentence] > first:
                last = ends[sentence]
        cut = starts[last] if last < len(tokens) else len(text)
        yield text[at:cut]
        first, at = last, cut
