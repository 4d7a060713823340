"""Where a module writes a word that belongs to one class: a code of a finding, or a name of a gauge."""

import ast
from collections.abc import Collection, Iterator


def words_in(tree: ast.AST, words: Collection[str], *about: str) -> Iterator[tuple[int, str]]:
    """The words in all places where a string is taken for one, with their lines.

    Such a place speaks of what the words are `about`, as in `verdict.code == "power"`, or is a table by these words. A word
    of several words counts anywhere.
    """
    for node in ast.walk(tree):
        for place in _places(node, words, about):
            yield from ((part.lineno, part.value) for part in ast.walk(place) if _literal(part) in words)  # type: ignore[attr-defined]


def _places(node: ast.AST, words: Collection[str], about: tuple[str, ...]) -> list[ast.AST]:
    """What is compared, or given to a name; the keys of a table; and any word of several words."""

    def speaks(part: ast.AST) -> bool:
        return any(one in ast.unparse(part) for one in about)

    if isinstance(node, ast.Compare):
        return [node] if speaks(node) else []
    if isinstance(node, ast.keyword):
        return [node.value] if (node.arg or "").endswith(about) else []
    if isinstance(node, ast.Assign):
        return [node.value] if any(ast.unparse(name).endswith(about) for name in node.targets) else []
    if isinstance(node, ast.Match):
        return [case.pattern for case in node.cases] if speaks(node.subject) else []
    if isinstance(node, ast.Dict):
        return (
            [key for key in node.keys if key] if len(node.keys) > 1 and {*map(_literal, node.keys)} <= {*words} else []
        )
    return [node] if _literal(node) in words and " " in str(_literal(node)) else []


def _literal(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
