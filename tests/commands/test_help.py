"""Help is written for people at a command line: noun phrases, options as they are typed, and nothing of Python."""

import re

import pytest
import typer

from research import analyze
from tests.prose import BANNED, opening
from vlcache_jax.commands.cli import app

LONG = 10  # options, above which a command groups them under headings


def commands():
    def walk(command, path):
        for name, own in getattr(command, "commands", {}).items():
            yield from walk(own, [*path, name])
        if not hasattr(command, "commands"):
            yield " ".join(path), command

    yield from walk(typer.main.get_command(app), ["vlcache"])
    yield from walk(typer.main.get_command(analyze.app), ["analyze"])


def texts(command):
    """(parameter or None, its help) of a command."""
    yield None, command.help
    for one in command.get_params(typer.Context(command)):
        if getattr(one, "help", None) and not getattr(one, "hidden", False):
            yield one, one.help


@pytest.mark.parametrize(("name", "command"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_help_speaks_the_words_of_the_command_line(name, command):
    found = []
    context = typer.Context(command)
    fields = {one.name for one in command.get_params(context) if "_" in one.name and one.param_type_name == "option"}
    for parameter, text in texts(command):
        where = name if parameter is None else parameter.opts[0]
        found += [f"{where}: opens with {word!r}" for word in opening(text)]
        found += [f"{where}: {word!r}" for banned in BANNED for word in banned.found(text)]
        found += [f"{where}: {word!r}" for word in re.findall(r"\bNone\b|\bTrue\b|\bFalse\b|vlcache_jax\.\w+", text)]
        if parameter is not None:
            found += [f"{where}: write {word!r} as it is typed" for word in fields if re.search(rf"\b{word}\b", text)]
        if re.match(r"[A-Z][a-z]+_", text):
            found.append(f"{where}: an identifier with a capital letter")
    assert found == []


@pytest.mark.parametrize(("name", "command"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_long_lists_of_options_have_headings(name, command):
    options = [one for one in command.get_params(typer.Context(command)) if one.param_type_name == "option"]
    if len(options) > LONG:
        panels = {getattr(one, "rich_help_panel", None) for one in options}
        assert len(panels - {None}) >= 2
