"""Small faults planted in the package, and the first test that finds each.

    uv run --group test python -m research.mutants cover build/lines.jsonl
    uv run --group test python -m research.mutants run build/lines.jsonl --out benchmarks/results/mutants.jsonl
    uv run --group test python -m research.mutants survivors benchmarks/results/mutants.jsonl

`cover` runs tests and writes the lines of engine, cache, server and protocol that each one executes, and what it
takes. `run` draws mutants of these lines by a seed. It selects the tests that execute a mutant's line, runs the cheap
ones first, and stops at the first failure. Arguments after `--` go to pytest, so that `-- -m slow` runs other tests.

Nothing is written to the sources. One process collects the tests. For each mutant it forks a child, which gives the
changed function its new code and runs the selected tests. Tests and the package are imported only once, and neither a
crash nor two runs at a time leave anything behind. The parent must not start a backend of jax, which no fork survives.

Results are JSON lines, one a mutant. A run that was interrupted continues after the last line. With `--before`, results
of a run of more tests stay where their killer is among the tests of this run. A mutant is

- `killed` by the test in `killer`,
- `time-out` after `--limit` seconds, which counts as killed,
- `survived`; in `tests` of `covering` tests, as far as `--budget` seconds of tests allow.

Limits: tests that start processes of their own execute lines there that `cover` does not see, and module-level code is
not mutated: constants, fields of dataclasses, decorators.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import gc
import importlib
import itertools
import json
import os
import pathlib
import pkgutil
import random
import resource
import select
import signal
import sys
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

PACKAGES = tuple(f"vlcache_jax.{name}" for name in ("engine", "cache", "server", "protocol"))
_LOGS = {"debug", "info", "warning", "error", "exception", "log"}
_TOOL = 4  # tool id of sys.monitoring; debuggers, coverage and profilers have the others
_IMPORTED_FIRST = "jax", "transformers", "numpy", "torch", "scipy"
# Fields of a statement that are other lines.
_NOT_ITS_OWN = "annotation", "body", "orelse", "finalbody", "handlers", "cases"
_SHOWN = 160  # characters of code in results

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
      file: Path of the module from the root of the clone.
      line: First line of the change; for a default argument, that of the function's body.
      operator: Kind of change, such as `comparison`.
      index: Number among the places of this operator in the file.
    """

    file: str
    line: int
    operator: str
    index: int


@dataclasses.dataclass(frozen=True)
class Place:
    """Place at which a mutant changes a tree.

    Attributes:
      operator: Kind of change.
      node: The node that changes.
      change: Changes the tree in place, and returns the node that stands there now.
      line: Line that a test must execute to notice the change.
    """

    operator: str
    node: ast.stmt | ast.expr
    change: Callable[[], ast.AST]
    line: int


def places(tree: ast.Module) -> Iterator[Place]:
    """Yield every place of a module that a mutant changes, in the order of the source."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            first = next((one for one in function.body if not _is_idle(one)), function).lineno
            for default in (*function.args.defaults, *function.args.kw_defaults):
                match default:
                    case ast.Constant(value=bool(value)):
                        yield _setting("default argument", default, "value", not value, first)
                    case ast.Constant(value=int(value) | float(value)):
                        yield _setting("default argument", default, "value", value + 1, first)
            yield from _of_body(function.body)


def _of_body(body: list[ast.stmt]) -> Iterator[Place]:
    for position, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or _is_idle(statement):
            continue  # `places` visits inner functions itself
        match statement:
            case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Raise() | ast.Delete():
                yield _replacing("statement removed", body, position, ast.Pass())
            case ast.Break():
                yield _replacing("break and continue", body, position, ast.Continue())
            case ast.Continue():
                yield _replacing("break and continue", body, position, ast.Break())
            case ast.Return(value=ast.expr() as value) if not _is_constant(value, None):
                yield _setting("return value", statement, "value", ast.Constant(None))
            case ast.If(test=test) | ast.While(test=test):
                yield _setting("negated condition", statement, "test", ast.UnaryOp(ast.Not(), test))
        yield from _of_expressions(statement)
        for field in ("body", "orelse", "finalbody"):
            yield from _of_body(getattr(statement, field, []))
        for inner in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from _of_body(inner.body)


def _of_expressions(statement: ast.stmt) -> Iterator[Place]:
    """Yield changes of expressions in a statement, without annotations, texts and the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if _is_log(node) or isinstance(node, ast.JoinedStr):
            continue
        match node:
            case ast.Compare(ops=[one]) if type(one) in _COMPARISONS:
                yield _setting("comparison", node, "ops", [_COMPARISONS[type(one)]()])
            case ast.BoolOp(op=one, values=values):
                yield _setting("and, or", node, "op", ast.Or() if isinstance(one, ast.And) else ast.And())
                yield _setting("operand removed", node, "values", [values[0], values[0]])
            case ast.UnaryOp(op=ast.Not(), operand=operand):  # `not not x` takes the place of `not x`
                yield _setting("not removed", node, "operand", ast.UnaryOp(ast.Not(), operand))
            case ast.BinOp(op=one) if type(one) in _OPERATORS and not _is_text(node):
                yield _setting("arithmetic", node, "op", _OPERATORS[type(one)]())
            case ast.AugAssign(op=one) if type(one) in _OPERATORS:
                yield _setting("arithmetic", node, "op", _OPERATORS[type(one)]())
            case ast.Constant(value=bool(value)):
                yield _setting("constant", node, "value", not value)
            case ast.Constant(value=int(value)):
                yield _setting("constant", node, "value", value + 1)
                yield _setting("constant", node, "value", value - 1)
            case ast.IfExp(test=test):
                yield _setting("negated condition", node, "test", ast.UnaryOp(ast.Not(), test))
            case ast.Call(args=[first, second, *rest]) if not _is_symmetric(node):
                yield _setting("arguments swapped", node, "args", [second, first, *rest])
        match node:
            case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
                yield _setting("min and max", function, "id", {"min": "max", "max": "min"}[name])
        for field, value in ast.iter_fields(node):
            if not (isinstance(node, ast.stmt) and field in _NOT_ITS_OWN):
                values = value if isinstance(value, list) else [value]
                waiting += [one for one in values if isinstance(one, ast.AST)]


def _setting(operator: str, node: ast.stmt | ast.expr, field: str, value: Any, line: int | None = None) -> Place:
    def change() -> ast.AST:
        setattr(node, field, value)
        return node

    return Place(operator, node, change, line or node.lineno)


def _replacing(operator: str, body: list[ast.stmt], position: int, other: ast.stmt) -> Place:
    def change() -> ast.AST:
        body[position] = other
        return other

    return Place(operator, body[position], change, body[position].lineno)


def _is_idle(statement: ast.stmt) -> bool:
    """Return whether a statement has no effect: a docstring, a log line, code only for a type checker."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or _is_log(statement.value)
    return isinstance(statement, ast.Assert | ast.Pass | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal)


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGS


def _is_symmetric(node: ast.Call) -> bool:
    """Return whether the order of two arguments does not matter, or cannot be changed."""
    is_chosen = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    return is_chosen or any(isinstance(one, ast.Starred) for one in node.args)


def _is_constant(node: ast.AST, value: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_text(node: ast.BinOp) -> bool:
    sides = node.left, node.right
    return any(
        isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str)) for x in sides
    )


def mutants(file: str, source: str) -> list[Mutant]:
    """Return each mutant of a file."""
    counts: dict[str, int] = defaultdict(int)
    found = []
    for place in places(ast.parse(source)):
        found.append(Mutant(file, place.line, place.operator, counts[place.operator]))
        counts[place.operator] += 1
    return found


def find(tree: ast.Module, mutant: Mutant) -> Place:
    """Return the place at which a mutant changes its module's tree."""
    of_kind = (place for place in places(tree) if place.operator == mutant.operator)
    return next(itertools.islice(of_kind, mutant.index, None))


def shown(source: str, mutant: Mutant) -> dict[str, str]:
    """Return the code of a mutant's place before and after the change."""
    place = find(ast.parse(source), mutant)
    was = ast.unparse(place.node)
    return {"was": was[:_SHOWN], "now": ast.unparse(ast.fix_missing_locations(place.change()))[:_SHOWN]}


def draw(root: pathlib.Path, covered: dict[str, set[int]], number: int, seed: int) -> list[Mutant]:
    """Return mutants of covered lines by a seed, in random order. A longer draw begins with a shorter one."""
    found = [
        mutant
        for file in sorted(covered)
        for mutant in mutants(file, (root / file).read_text(encoding="utf-8"))
        if mutant.line in covered[file]
    ]
    found.sort(key=lambda one: random.Random(f"{seed} {one}").random())  # changes elsewhere do not change the order
    return found[:number]


def apply(root: pathlib.Path, mutant: Mutant) -> int:
    """Give the functions of this process the code of a mutant.

    Returns:
      The functions that changed.
    """
    path = (root / mutant.file).resolve()
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    old = _codes(compile(tree, str(path), "exec", dont_inherit=True))
    place = find(tree, mutant)
    place.change()
    if mutant.operator == "default argument":
        return _apply_default(path, tree, place.node)
    new = _codes(compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True))
    changed = 0
    for function in _functions(path):
        code = function.__code__
        key = code.co_qualname, code.co_firstlineno
        if key not in new or new[key] == old.get(key):
            continue
        if len(new[key].co_freevars) != len(code.co_freevars):
            raise ValueError(f"{key} has other variables of outer functions")
        function.__code__ = new[key].replace(co_filename=code.co_filename)
        changed += 1
    return changed


def _apply_default(path: pathlib.Path, tree: ast.Module, default: ast.AST) -> int:
    assert isinstance(default, ast.Constant)
    of_tree = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    owner = next(one for one in of_tree if default in (*one.args.defaults, *one.args.kw_defaults))
    first = min([owner.lineno, *(one.lineno for one in owner.decorator_list)])
    changed = 0
    for function in _functions(path):
        if (function.__code__.co_firstlineno, function.__name__) != (first, owner.name):
            continue
        if default in owner.args.defaults:
            values = list(function.__defaults__ or ())
            values[owner.args.defaults.index(default)] = default.value
            function.__defaults__ = tuple(values)
        else:
            name = owner.args.kwonlyargs[owner.args.kw_defaults.index(default)].arg
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), name: default.value}
        changed += 1
    return changed


def _functions(path: pathlib.Path) -> list[types.FunctionType]:
    """Return the functions of this process that a file defines."""
    resolved: dict[str, bool] = {}
    found = []
    for function in _all_functions():
        name = function.__code__.co_filename
        if name not in resolved:
            resolved[name] = pathlib.Path(name).resolve() == path
        if resolved[name]:
            found.append(function)
    return found


def _all_functions() -> list[types.FunctionType]:
    gc.unfreeze()  # conftest.py freezes imported objects, which are then not found
    # Not isinstance: some objects compute their `__class__`.
    return [one for one in gc.get_objects() if type(one) is types.FunctionType]


def _codes(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    """Return code objects inside one by qualified name and first line, without those that share both, such as
    lambdas.
    """
    found: dict[tuple[str, int], list[types.CodeType]] = defaultdict(list)
    waiting = [code]
    while waiting:
        one = waiting.pop()
        found[one.co_qualname, one.co_firstlineno].append(one)
        waiting += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    return {key: codes[0] for key, codes in found.items() if len(codes) == 1}


def import_all(packages: Sequence[str] = PACKAGES) -> None:
    """Import each module of the packages."""
    for package in packages:
        module = importlib.import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            importlib.import_module(found.name)


class Coverage:
    """Plugin of pytest that records the lines of each test, its time, and whether it passed.

    A line event is disabled once it came, until the next test, so a line costs time once per test.
    """

    def __init__(self, root: pathlib.Path, out: pathlib.Path, packages: Sequence[str] = PACKAGES):
        self.root, self.out, self.packages = root.resolve(), out, packages
        self.folders = tuple(str(self.root / package.replace(".", "/")) + "/" for package in packages)
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.failed = False

    def pytest_collection_finish(self) -> None:
        import_all(self.packages)
        monitoring = sys.monitoring
        monitoring.use_tool_id(_TOOL, "research.mutants")
        monitoring.register_callback(_TOOL, monitoring.events.LINE, self._on_line)
        files: dict[str, str] = {}
        for function in _all_functions():
            name = function.__code__.co_filename
            path = files.setdefault(name, str(pathlib.Path(name).resolve()))
            if path.startswith(self.folders):
                _watch(function.__code__)

    def _on_line(self, code: types.CodeType, line: int) -> Any:
        self.lines[code.co_filename].add(line)
        return sys.monitoring.DISABLE

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.lines, self.failed = defaultdict(set), False
        sys.monitoring.restart_events()
        began, used = time.monotonic(), _cpu_seconds()
        result = yield
        row = {
            "test": item.nodeid,
            "seconds": round(time.monotonic() - began, 4),
            "cpu": round(_cpu_seconds() - used, 4),
            "passed": not self.failed,
            "lines": {
                str(pathlib.Path(name).resolve().relative_to(self.root)): sorted(lines)
                for name, lines in list(self.lines.items())  # other threads may still add lines
            },
        }
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return result


def _watch(code: types.CodeType) -> None:
    sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _watch(inner)


def _cpu_seconds() -> float:
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in of)


@dataclasses.dataclass
class Lines:
    """Content of a file that `Coverage` wrote.

    Attributes:
      tests: Tests that execute a line of a file, cheapest first.
      covered: Lines of a file that any test executes.
      seconds: Seconds of each test that passed.
    """

    tests: dict[tuple[str, int], list[str]]
    covered: dict[str, set[int]]
    seconds: dict[str, float]

    @classmethod
    def read(cls, path: pathlib.Path) -> Lines:
        tests: dict[tuple[str, int], list[str]] = defaultdict(list)
        covered: dict[str, set[int]] = defaultdict(set)
        seconds: dict[str, float] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not row["passed"]:
                continue
            seconds[row["test"]] = row["seconds"]
            for file, numbers in row["lines"].items():
                covered[file].update(numbers)
                for number in numbers:
                    tests[file, number].append(row["test"])
        for names in tests.values():
            names.sort(key=seconds.__getitem__)
        return cls(tests, covered, seconds)


class Runner:
    """Plugin of pytest that runs selected tests for each mutant instead of all tests.

    Args:
      root: Root of the clone.
      lines: Lines that tests execute.
      chosen: The mutants.
      out: File of results; mutants in it are not run again.
      before: Results of a run of more tests.
      limit: Seconds of one mutant.
      budget: Seconds of tests of one mutant, as `cover` measured them.
      until: Seconds after which no further mutant begins.
      imported: Modules that children find imported.
      packages: Packages that children find imported, with all their modules.
    """

    def __init__(
        self,
        root: pathlib.Path,
        lines: Lines,
        chosen: list[Mutant],
        out: pathlib.Path,
        before: list[dict[str, Any]],
        limit: float,
        budget: float,
        until: float,
        imported: Sequence[str] = _IMPORTED_FIRST,
        packages: Sequence[str] = PACKAGES,
    ):
        self.root, self.lines, self.chosen, self.out = root, lines, chosen, out
        self.limit, self.budget, self.until = limit, budget, until
        self.imported, self.packages = imported, packages
        self.failed = False
        known = read(out)
        self.known = {_key(row) for row in known}
        self.before = {_key(row): row for row in before}
        self.sound = {row["killer"]: True for row in known if "killer" in row}  # tests that pass without a mutant

    def pytest_collection_finish(self) -> None:
        for name in self.imported:
            importlib.import_module(name)
        import_all(self.packages)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        began = time.monotonic()
        items = {item.nodeid: item for item in session.items}
        for mutant in self.chosen:
            if time.monotonic() - began > self.until:
                break
            key = _key(dataclasses.asdict(mutant))
            if key not in self.known:
                row = self.before.get(key)
                if row is None or (row["status"] == "killed" and row["killer"] not in items):
                    row = self._row(mutant, items)
                with self.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
        return True

    def _row(self, mutant: Mutant, items: dict[str, pytest.Item]) -> dict[str, Any]:
        covering = [name for name in self.lines.tests[mutant.file, mutant.line] if name in items]
        code = shown((self.root / mutant.file).read_text(encoding="utf-8"), mutant)
        began = time.monotonic()
        while True:
            selected = self._selected([name for name in covering if self.sound.get(name, True)])
            result = self._in_child(mutant, [items[name] for name in selected])
            killer = result.get("killer")
            if killer in items and killer not in self.sound:
                self.sound[killer] = self._in_child(None, [items[killer]])["status"] == "survived"
            if self.sound.get(killer, True):
                break
        seconds = round(time.monotonic() - began, 1)
        return {**dataclasses.asdict(mutant), **code, **result, "covering": len(covering), "seconds": seconds}

    def _selected(self, names: list[str]) -> list[str]:
        """Return the cheapest tests within the budget, at least one; file by file, cheap files first."""
        sums = list(itertools.accumulate(self.lines.seconds[name] for name in names))
        within = sum(one <= self.budget for one in sums)
        of_files: dict[str, list[str]] = defaultdict(list)
        for name in names[: max(1, within)]:
            of_files[name.partition("::")[0]].append(name)
        cost = {file: sum(self.lines.seconds[name] for name in of_file) for file, of_file in of_files.items()}
        return [name for file in sorted(of_files, key=cost.__getitem__) for name in of_files[file]]

    def _in_child(self, mutant: Mutant | None, items: list[pytest.Item]) -> dict[str, Any]:
        if any(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", ())):
            raise RuntimeError("a test module starts a backend of jax at import, which no child could use")
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks next to threads: those of imports wait for work
            child = os.fork()
        if child == 0:
            os.setsid()
            os.close(reading)
            try:
                result = self._try(mutant, items)
            except BaseException as error:  # an error of `apply`, or the end of pytest
                result = {"status": "invalid", "error": repr(error)[:_SHOWN]}
            os.write(writing, json.dumps(result).encode())
            os._exit(0)
        os.close(writing)
        has_result = bool(select.select([reading], [], [], self.limit)[0])
        # Not to its end: child processes of tests may hold it open.
        text = os.read(reading, 2**16) if has_result else b""
        os.close(reading)
        _end_group(child)
        if not has_result:
            return {"status": "time-out"}
        return json.loads(text) if text else {"status": "killed", "killer": "the process ended"}

    def _try(self, mutant: Mutant | None, items: list[pytest.Item]) -> dict[str, Any]:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        if mutant is not None and not apply(self.root, mutant):
            return {"status": "invalid", "error": "no function has the changed code"}
        for count, (item, following) in enumerate(itertools.zip_longest(items, items[1:]), 1):
            self.failed = False
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return {"status": "killed", "killer": item.nodeid, "tests": count}
        return {"status": "survived", "tests": len(items)}


def _end_group(child: int) -> None:
    """End a child and all processes that its tests started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, or has no process group yet
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field.name] for field in dataclasses.fields(Mutant))


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the results of a run so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return counts, and each survivor with its place and its change."""
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row["status"]] += 1
    lines = [", ".join(f"{status} {count}" for status, count in sorted(counts.items()))]
    for row in sorted(rows, key=lambda row: (row["file"], row["line"])):
        if row["status"] == "survived":
            tests = f"{row['tests']} of {row['covering']} tests"
            lines.append(f"{row['file']}:{row['line']} {row['operator']}: {row['was']} -> {row['now']} ({tests})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults and see which test finds them.")
    commands = parser.add_subparsers(dest="command", required=True)
    cover = commands.add_parser("cover", help="record the lines that each test executes")
    cover.add_argument("lines", type=pathlib.Path)
    run = commands.add_parser("run", help="run the tests that execute a mutant's line")
    run.add_argument("lines", type=pathlib.Path)
    run.add_argument("--out", type=pathlib.Path, required=True)
    run.add_argument("--before", type=pathlib.Path, help="results of a run of more tests")
    run.add_argument("--number", type=int, default=400)
    run.add_argument("--seed", type=int, default=65)
    run.add_argument("--limit", type=float, default=180, help="maximum seconds of a mutant")
    run.add_argument("--budget", type=float, default=60, help="maximum seconds of tests of a mutant")
    run.add_argument("--until", type=float, default=float("inf"), help="seconds after which no further mutant begins")
    survivors = commands.add_parser("survivors", help="print counts and survivors of a run")
    survivors.add_argument("out", type=pathlib.Path)
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    args, others = parser.parse_args(own[:split]), own[split + 1 :]
    root = pathlib.Path.cwd()
    if args.command == "survivors":
        print(table(read(args.out)))
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    plugin: Any
    settings = ["-n0", "-q"]
    if args.command == "cover":
        args.lines.parent.mkdir(parents=True, exist_ok=True)
        plugin = Coverage(root, args.lines)
    else:
        lines = Lines.read(args.lines)
        chosen = draw(root, lines.covered, args.number, args.seed)
        before = read(args.before) if args.before else []
        plugin = Runner(root, lines, chosen, args.out, before, args.limit, args.budget, args.until)
        settings.append("--capture=no")  # a child discards its output
    sys.exit(pytest.main([*settings, *others], plugins=[plugin]))


if __name__ == "__main__":
    main()
