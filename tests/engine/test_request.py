"""Who may write what has happened to a sequence, read from the source."""

from __future__ import annotations

import ast
import pathlib

import vlcache_jax

PACKAGE = pathlib.Path(vlcache_jax.__file__).parent
WRITERS = {
    "progress": {"engine/scheduler.py"},
    "report": {"engine/results.py"},
    "end": {"engine/request.py", "engine/engine.py"},
}


def written(tree):
    """The attributes that are assigned, each as the names on the way to it."""
    names = {}  # of variables that stand for one of the parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in pairs(node.targets[0], node.value):
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                    names[target.id] = way(value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            first, *others = way(node)
            yield [*names.get(first, [first]), *others][:-1]


def pairs(target, value):
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def way(node):
    return [*way(node.value), node.attr] if isinstance(node, ast.Attribute) else [getattr(node, "id", "")]


def test_each_part_of_a_sequence_has_its_writers():
    found = {part: set() for part in WRITERS}
    for path in PACKAGE.rglob("*.py"):
        for names in written(ast.parse(path.read_text("utf-8"))):
            for part in WRITERS.keys() & set(names):
                found[part].add(path.relative_to(PACKAGE).as_posix())
    assert found == WRITERS
