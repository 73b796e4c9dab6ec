"""Check docstrings, comments, messages and pages by the rules that a program can check.

    python -m tests.prose [PATH ...] [--rule opener] [--count]

Without paths: all tracked Python files and Markdown pages. ``--count`` prints the number of
findings by rule, and the share of docstrings and comments with a finding. The rules:

    opener: the first word of a docstring or comment refers to something outside of it
    word: a word of the list in WORDS, in a docstring, comment, message or page
    headless: a relative clause without a noun, such as a leading "what" or "who"
    reference: a named file is not in the repository
    long: a sentence of more than 25 words
    packed: a tuple of values assigned to several names, unless they are a pair

``tests/data/prose.json`` holds the number of findings that each part of the repository may still
have, by rule (0 if absent). `make lint` fails if there are more. If there are fewer, it says so:
run ``--write`` to lower the number.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.sizes import PRODUCT, ROOT

ALLOWED = ROOT / "tests/data/prose.json"
MAX_WORDS = 25
OPENERS = (
    *("as", "by", "it", "of", "that", "they", "those", "what", "whatever", "whether"),
    *("who", "whoever", "whom", "whose", "with"),
)
"""First words of a text that make sense only together with the code. "Whether" may begin a
docstring, as the noun phrase of a boolean, but no comment."""
WORDS = {
    "anew": "again, or restart",
    "alike": "identical, the same",
    "ask": "request, poll, call",
    "asked": "requested, options",
    "asks": "requests, polls, calls",
    "begun": "started",
    "beside": "besides, next to, in parallel with",
    "but for": "except",
    "for ever": "indefinitely",
    "gets on": "makes progress",
    "goes on elsewhere": "migrates",
    "hear": "receive",
    "heard": "received",
    "hears": "receives",
    "likeliest": "most likely",
    "makes way": "drains, is preempted",
    "meanwhile": "the name of the interval, or nothing",
    "nobody": "no rank, no caller",
    "of one's own": "local, user-defined",
    "somebody": "a rank, a caller",
    "tell": "report, send, return",
    "telling": "reporting, sending",
    "tells": "reports, sends, returns",
    "told": "reported, sent, returned",
    "whoever": "the rank that",
}
"""Words that are not used, with their replacements."""
_WORD = re.compile(rf"(?<![\w`'-])({'|'.join(map(re.escape, WORDS))})(?![\w'-])", re.IGNORECASE)
_QUANTITY = re.compile(r"\b(?:so|as|that) (?:many|much|long|few)\b(?! as)", re.IGNORECASE)
_HEADLESS = re.compile(
    r"(?:^|[.;:,(] |\band )(?:what|who|whom) "
    r"(?:is|was|are|were|has|have|it|they|a|the|comes|waits)\b",
    re.IGNORECASE,
)
_PATH = re.compile(
    r"(?<![\w/.:-])((?:[\w-]+/)+[\w.-]+\.(?:py|md|toml|cpp|proto|json|yaml|patch))\b"
)
_SPEC = re.compile(r"\bspec(?:ification)? (?:§|section)|\bdesign\.md\b|\bseeds? \d{3}\b")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"(])")
_ENTRY = re.compile(r"\n\s*(?=[\w`*, ]{1,60}: )|\n\s*\n|\n(?=\s*[-|] )|:\s*\n")
"""Ends of lines before an entry of Google's Args and Attributes, a list item, a row or a
paragraph."""
_IGNORED = re.compile(r"https?://\S+|``[^`]+``|`[^`]+`|\[[^\]]*\]\([^)]*\)")
PAIRS = (
    {"lo", "hi"},
    {"low", "high"},
    {"cos", "sin"},
    {"first", "last"},
    {"reader", "writer"},
    {"stdout", "stderr"},
    {"out", "err"},
)


@dataclass(frozen=True)
class Text:
    """A piece of prose: ``kind`` is docstring, field, comment, message or page."""

    path: str
    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class Finding:
    """A violation of a rule. ``what`` is the word or clause, or a description."""

    path: str
    line: int
    rule: str
    what: str


def texts_of(path: str, source: str) -> Iterator[Text]:
    """Yield the docstrings, comments and messages of a Python file, or the paragraphs of a page."""
    if path.endswith(".md"):
        yield from _paragraphs(path, source)
        return
    tree = ast.parse(source)
    docs = set[int]()
    for node in ast.walk(tree):
        for child, before in _docstrings(node):
            kind = "field" if isinstance(before, ast.Assign | ast.AnnAssign) else "docstring"
            docs.add(id(child.value))
            assert isinstance(child.value, ast.Constant)
            yield Text(path, child.lineno, kind, str(child.value.value))
    yield from _messages(path, tree, docs)
    yield from _comments(path, source)


def _docstrings(node: ast.AST) -> Iterator[tuple[ast.Expr, ast.stmt | None]]:
    before: ast.stmt | None = None
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.Expr) and _is_text(child.value):
            yield child, before
        before = child


def _messages(path: str, tree: ast.Module, docs: set[int]) -> Iterator[Text]:
    """Yield texts of errors, logs and help: constants of three words or more."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and _is_text(node) and id(node) not in docs:
            text = str(node.value)
            if len(re.findall(r"[a-z]{2,}", text)) >= 3 and " " in text.strip():
                yield Text(path, node.lineno, "message", text)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _comments(path: str, source: str) -> Iterator[Text]:
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("# ").strip()
        if re.match(r"type:|noqa|time:|mypy:|!|pragma", text):
            continue
        stands_alone = not token.line[: token.start[1]].strip()
        if lines and stands_alone and lines[-1][0] == token.start[0] - 1:
            lines[-1] = (token.start[0], f"{lines[-1][1]} {text}")
        else:
            lines.append((token.start[0], text))
    for line, text in lines:
        yield Text(path, line, "comment", text)


def _paragraphs(path: str, source: str) -> Iterator[Text]:
    is_code = False
    start, held = 0, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        is_break = is_fence or not line.strip() or re.match(r"\s*(?:[-*|#>]|\d+\.) ?", line)
        if (is_break or is_code) and held:
            yield Text(path, start, "page", " ".join(held))
            held = []
        if is_code or is_fence or line.startswith("    ") or not line.strip():
            continue
        if not held:
            start = number
        held.append(line.strip().lstrip("-*#> "))


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; entries of lists and tables count by themselves."""
    for part in _ENTRY.split(text):
        yield from _SENTENCE.split(" ".join(part.split()))


def findings(text: Text) -> Iterator[Finding]:
    """Yield the violations of the rules in a text."""

    def found(rule: str, what: str) -> Finding:
        return Finding(text.path, text.line, rule, what)

    plain = _IGNORED.sub("X", text.text)
    first = re.match(r"\W*([A-Za-z']+)", text.text)
    is_of_code = text.kind in ("docstring", "field", "comment")
    if is_of_code and first and first[1].lower() in OPENERS and not _is_boolean(text, first[1]):
        yield found("opener", first[1])
    for word in _WORD.findall(plain):
        yield found("word", word.lower())
    for quantity in _QUANTITY.findall(plain):
        yield found("word", quantity.lower())
    if text.kind != "message":
        for clause in _HEADLESS.findall(plain):
            yield found("headless", clause.strip())
        for sentence in _sentences(plain):
            num = len(re.findall(r"\b[\w'-]+\b", sentence))
            if num > MAX_WORDS and "|" not in sentence:
                yield found("long", f"{num} words: {sentence[:60]}")
    for name in _PATH.findall(text.text):
        if not _is_there(name, text.path):
            yield found("reference", name)
    for name in _SPEC.findall(text.text):
        yield found("reference", name)


def _is_boolean(text: Text, word: str) -> bool:
    return word == "Whether" and text.kind != "comment"


def _is_there(name: str, near: str) -> bool:
    beside = Path(near).parent
    return any((ROOT / folder / name).exists() for folder in ("", beside, "src/tandem", "docs"))


def packed(path: str, source: str) -> Iterator[Finding]:
    """Yield assignments of several values to several names, except pairs."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(
                names
            ) == len(values):
                words = {ast.unparse(name).split("_")[0] for name in names}
                if words not in PAIRS and not _is_swap(names, values):
                    yield Finding(path, node.lineno, "packed", ast.unparse(node)[:70])


def _is_swap(names: list[ast.expr], values: list[ast.expr]) -> bool:
    return {ast.unparse(name) for name in names} == {ast.unparse(value) for value in values}


def part_of(path: str) -> str:
    """Return the part of the repository to which a file's findings are counted."""
    top = path.split("/")[0]
    if top in PRODUCT or path.startswith("src/tandem"):
        return "product"
    return top if "/" in path else "docs"


def tracked(paths: Iterable[str]) -> list[str]:
    """Return the Python files and pages of the repository, or those below ``paths``."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    files = [name for name in listed if name.endswith((".py", ".md")) and "_pb2" not in name]
    return [name for name in files if (ROOT / name).is_file() and not name.startswith("tests/data")]


def check(files: Iterable[str]) -> tuple[list[Finding], int, int]:
    """Return all findings, the number of docstrings and comments, and how many of them have a
    finding."""
    all_found = list[Finding]()
    num_texts = 0
    num_hit = 0
    for path in files:
        source = (ROOT / path).read_text()
        for text in texts_of(path, source):
            found = list(findings(text))
            all_found += found
            if text.kind in ("docstring", "field", "comment"):
                num_texts += 1
                num_hit += any(one.rule != "long" for one in found)
        if path.endswith(".py"):
            all_found += packed(path, source)
    return all_found, num_texts, num_hit


def counts(found: Iterable[Finding]) -> dict[str, dict[str, int]]:
    """Return the number of findings by part and rule."""
    table: dict[str, Counter[str]] = {}
    for one in found:
        table.setdefault(part_of(one.path), Counter())[one.rule] += 1
    return {part: dict(sorted(rules.items())) for part, rules in sorted(table.items())}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.prose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", help="files or folders [all]")
    parser.add_argument("--rule", help="show the findings of this rule alone")
    parser.add_argument("--count", action="store_true", help="print numbers instead of findings")
    parser.add_argument("--write", action="store_true", help="write today's numbers to prose.json")
    args = parser.parse_args()
    found, num_texts, num_hit = check(tracked(args.paths))
    today = counts(found)
    if args.write:
        ALLOWED.write_text(json.dumps(today, indent=2) + "\n")
        return 0
    if args.count:
        print(json.dumps(today, indent=2))
        share = 100 * num_hit / max(1, num_texts)
        print(f"{num_hit} of {num_texts} docstrings and comments have a finding: {share:.1f} %")
    elif args.paths or args.rule:
        for one in found:
            if args.rule in (None, one.rule):
                hint = f" (write: {WORDS[one.what]})" if one.what in WORDS else ""
                print(f"{one.path}:{one.line}: {one.rule}: {one.what}{hint}")
    if args.paths or args.rule:
        return 0
    return _compare(today)


def _compare(today: dict[str, dict[str, int]]) -> int:
    allowed = json.loads(ALLOWED.read_text())
    status = 0
    for part in sorted({*today, *allowed}):
        now, bound = today.get(part, {}), allowed.get(part, {})
        for rule in sorted({*now, *bound}):
            if now.get(rule, 0) > bound.get(rule, 0):
                allowed_num = bound.get(rule, 0)
                print(f"{part}: {now[rule]} findings of {rule}, at most {allowed_num} are allowed")
                status = 1
            elif now.get(rule, 0) < bound.get(rule, 0):
                print(f"{part}: fewer findings of {rule} than {bound[rule]}: run with --write")
    return status


if __name__ == "__main__":
    sys.exit(main())
