"""Counts what makes code hard to read, room by room, and lets no count rise.

    python setup/readable.py             the table; fails where a room exceeds setup/readable.json
    python setup/readable.py --list KIND   the places of one kind
    python setup/readable.py --update    write down what has become less; a new room begins as it is
    python setup/readable.py --allow ROOM  after a move: this room begins as it is

A room is a folder of `adora_vl` or of `tests`, or another folder at the top.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LIMITS_FILE = Path(__file__).with_suffix(".json")
VAGUE_NAME_PATTERN = re.compile(
    "found|made|one|own|given|asked|said|told|held|kept|wanted|there|here|whole|known|others?|each|"
    "further|more|most|least|how|seen|shown|taken|left|of|many|place|what|who|when"
)
NO_SUBJECT_PATTERN = re.compile(r"(Of|As|By|For|Those|From|In|That|Such|So)\b")
TRUTH_FUNCTIONS = {
    "bool",
    "any",
    "all",
    "isinstance",
    "isalpha",
    "isdigit",
    "startswith",
    "endswith",
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED_NODES = (*FUNCTIONS, ast.ClassDef, ast.Module)
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT_TOKENS |= {tokenize.ENCODING, tokenize.ENDMARKER}
Rooms = dict[str, Counter[str]]
Places = dict[str, dict[str, list[str]]]  # by room and kind


def is_truth(node: ast.AST | None) -> bool:
    """Tell whether an expression is surely a truth value."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        return name in TRUTH_FUNCTIONS
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, (ast.Compare, ast.BoolOp))


def tuple_assign(node: ast.AST) -> bool:
    """`a, b = x, y`, but for a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or len(node.value.elts) < 2:
        return False
    targets = {ast.unparse(part) for part in target.elts}
    values = {ast.unparse(part) for part in node.value.elts}
    return targets != values and len(values) > 1


def unpacked_generator(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    return isinstance(node.value, ast.GeneratorExp)


def bool_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
        return is_truth(node.left) or is_truth(node.right)
    if isinstance(node, ast.AugAssign):
        return is_truth(node.value)
    if isinstance(node, ast.Slice):
        return is_truth(node.lower) or is_truth(node.upper)
    return isinstance(node, ast.Subscript) and is_truth(node.slice)


def hidden_if(node: ast.AST) -> bool:
    """Tell whether a node is a conditional expression in another one, called, or looped over."""
    if isinstance(node, ast.IfExp):
        return isinstance(node.orelse, ast.IfExp)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.IfExp)
    return isinstance(node, ast.For) and isinstance(node.iter, ast.IfExp)


def nested_comprehensions(node: ast.AST) -> bool:
    """Three or more in one."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    return sum(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node)) > 2


def any_argument(node: ast.AST) -> bool:
    if not isinstance(node, ast.arg) or node.annotation is None:
        return False
    return ast.unparse(node.annotation) in ("Any", "Any | None")


def vague_name(node: ast.AST) -> bool:
    """Tell whether a name is a pronoun or a participle."""
    if isinstance(node, ast.arg):
        return bool(VAGUE_NAME_PATTERN.fullmatch(node.arg))
    is_set = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    return is_set and bool(VAGUE_NAME_PATTERN.fullmatch(node.id))


def no_subject(node: ast.AST) -> bool:
    """Tell whether a docstring begins with Of, As, By, ..."""
    return isinstance(node, DOCUMENTED_NODES) and bool(
        NO_SUBJECT_PATTERN.match(ast.get_docstring(node) or "")
    )


def long_summary(node: ast.AST) -> bool:
    """Tell whether a docstring's first sentence takes more than a line (pydocstyle's D205)."""
    doc = ast.get_docstring(node) or "" if isinstance(node, DOCUMENTED_NODES) else ""
    return "\n" in doc.partition("\n\n")[0]


COUNTER_BY_KIND: Mapping[str, Callable[[ast.AST], bool]] = {
    kind.__name__: kind
    for kind in (
        tuple_assign,
        unpacked_generator,
        bool_arithmetic,
        hidden_if,
        nested_comprehensions,
        any_argument,
        no_subject,
        long_summary,
        vague_name,
    )
}
COUNTED_KINDS = (*COUNTER_BY_KIND, "fmt_skip", "crowding")  # crowding: lexical tokens in ten lines
SHOWN_COUNTS = ("lines", "tokens", "words")  # of prose: docstrings and comments


def room_of(path: Path) -> str:
    parts = path.parts
    inside = parts[0] in ("adora_vl", "tests") and len(parts) > 2
    return "/".join(parts[:2]) if inside else parts[0]


def read(path: Path, text: str) -> Iterator[tuple[str, int, int]]:
    """Yield what a file has, as (kind, how many, line)."""
    yield "lines", text.count("\n"), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "fmt: skip" in token.string:
            yield "fmt_skip", 1, token.start[0]
        elif token.type == tokenize.COMMENT:
            yield "words", len(token.string.split()) - 1, 0
        elif token.type not in LAYOUT_TOKENS:
            yield "tokens", 1, 0
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, DOCUMENTED_NODES):
            yield "words", len((ast.get_docstring(node) or "").split()), 0
        for name, is_kind in COUNTER_BY_KIND.items():
            if is_kind(node):
                yield name, 1, getattr(node, "lineno", 1)


def count(folder: Path) -> tuple[Rooms, Places]:
    """Return the counts of every room, of the Python files that git knows or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(  # noqa: S603
        command, cwd=folder, capture_output=True, text=True, check=True
    )
    rooms: Rooms = defaultdict(Counter)
    places: Places = defaultdict(lambda: defaultdict(list))
    for path in map(Path, sorted(set(listed.stdout.split()))):
        if not (folder / path).is_file():
            continue  # deleted, and not yet committed
        room = room_of(path)
        for kind, number, line in read(path, (folder / path).read_text(encoding="utf-8")):
            rooms[room][kind] += number
            if line:
                places[room][kind].append(f"{path}:{line}")
    for counts in rooms.values():
        counts["crowding"] = -(-10 * counts["tokens"] // max(counts["lines"], 1))
    return rooms, places


def too_many(rooms: Rooms, places: Places, limits: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each count above its limit; a room that is not known may have nothing."""
    lines = []
    for room, counts in sorted(rooms.items()):
        for kind in COUNTED_KINDS:
            limit = limits.get(room, {}).get(kind, 0)
            if counts[kind] > limit:
                where = ", ".join(places[room][kind][-3:]) or "the room as a whole"
                lines.append(f"{room}: {kind} is {counts[kind]}, at most {limit} ({where})")
    return lines


def table(rooms: Rooms) -> str:
    """Return a line for each room; the words are of prose for 1,000 tokens."""
    columns = (*SHOWN_COUNTS, *COUNTED_KINDS)
    lines = [f"{'room':24}" + "".join(f"{name.replace('_', ' ')[:9]:>10}" for name in columns)]
    for room, counts in sorted(rooms.items()):
        shown = counts | Counter()
        shown["words"] = 1000 * counts["words"] // max(counts["tokens"], 1)
        lines.append(f"{room:24}" + "".join(f"{shown[name]:10}" for name in columns))
    return "\n".join(lines)


def lowered(
    rooms: Rooms, limits: Mapping[str, Mapping[str, int]], allowed: str | None
) -> dict[str, dict[str, int]]:
    """Return the limits of the present rooms; only a new or an `allowed` room's may rise."""
    new = {}
    for room, counts in sorted(rooms.items()):
        before = None if room == allowed else limits.get(room)
        now = {kind: counts[kind] for kind in COUNTED_KINDS}
        if before is not None:
            now = {kind: min(number, before.get(kind, 0)) for kind, number in now.items()}
        new[room] = {kind: number for kind, number in now.items() if number}
    return new


def main(
    arguments: list[str] | None = None, folder: Path = REPOSITORY, file: Path = LIMITS_FILE
) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", choices=COUNTED_KINDS)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--allow", metavar="ROOM")
    options = parser.parse_args(arguments)
    rooms, places = count(folder)
    if options.list:
        print("\n".join(line for room in sorted(places) for line in places[room][options.list]))
        return 0
    limits = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if options.update or options.allow:
        limits = lowered(rooms, limits, options.allow)
        lines = [f"  {json.dumps(room)}: {json.dumps(kinds)}" for room, kinds in limits.items()]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(table(rooms))
    faults = too_many(rooms, places, limits)
    for fault in faults:
        print(f"readable: {fault}; write it more plainly", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
