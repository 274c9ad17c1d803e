"""The site: `uv run --group docs sphinx-build -W --keep-going docs build/docs`."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from sphinx.application import Sphinx

import vlcache_jax
from vlcache_jax.commands.cli import app as cli

project = "VLCache-JAX"
author = "the authors of VLCache-JAX"
release = version = vlcache_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {version}"
html_show_copyright = False

# Docstrings are plain words: `name` is code, whatever it names.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_preprocess_types = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"

# Links to headings of other pages are checked like links to pages; a dead one is an error (-W).
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]
smartquotes = False


# The commands in reference/cli.md. typer brings its own copy of click, which sphinx-click cannot read.
CLI_PAGE, CLI_MARK = "reference/cli", "<!-- commands -->"


def _add_commands(_: Sphinx, page: str, source: list[str]) -> None:
    """Write every command of `vlcache` into the page of the command line, in place of its mark."""
    if page == CLI_PAGE:
        commands = "\n".join(_describe(typer.main.get_command(cli), "vlcache", None))
        source[0] = source[0].replace(CLI_MARK, commands)


def _describe(command: Any, name: str, parent: Any) -> Iterator[str]:
    """Yield the Markdown of a command and of its subcommands: usage, help and a table of its parameters."""
    context = typer.Context(command, parent=parent, info_name=name)
    yield f"\n## `{context.command_path}`\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        start, colon, example = paragraph.partition(": vlcache ")
        if colon and start in ("Example", "Then", "Later"):
            yield f"{start}:\n\n```bash\nvlcache {' '.join(example.split())}\n```\n"
        else:
            yield f"{_escape(paragraph)}\n"
    yield f"```text\n{command.get_usage(context)}\n```\n"
    rows = [_parameter(record) for one in command.get_params(context) if (record := one.get_help_record(context))]
    yield "\n".join(["| argument or option | default | effect |", "|---|---|---|", *rows, ""])
    for below, subcommand in getattr(command, "commands", {}).items():
        yield from _describe(subcommand, below, context)


def _parameter(record: tuple[str, str]) -> str:
    """Return the row of a parameter, of which typer gives the name and a text such as "Seed.  [default: 0; x>=0]"."""
    name, text = record
    found = re.fullmatch(r"(.*?)(?:  )?(?:\[((?:env var|default|required|x|\d).*)\])?", text, re.DOTALL)
    assert found is not None
    default, effect = "", _escape(found[1])
    for note in (found[2] or "").split("; "):
        kind, _, value = note.partition(": ")
        if kind == "env var":
            effect += f" Environment variable: `{value}`."
        elif kind == "default":
            default = _escape(value[1:-1]) if value.startswith("(") else f"`{value}`"
        elif note == "required":
            default = "required"
        elif note:
            effect += f" Range: `{note}`."
    shown = name.replace("|", "\\|")
    return f"| `{shown}` | {default} | {effect} |"


def _escape(text: str) -> str:
    """Return plain text as Markdown, in which what stands in backticks stays code."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([\\*_<>\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def setup(app: Sphinx) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("source-read", _add_commands)
