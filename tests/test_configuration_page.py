"""docs/reference/configuration.md lists every option, with its default and its name on the command line."""

import dataclasses
import json
import pathlib
import re

import pytest

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands import serve
from vlcache_jax.config import EngineConfig
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.server.config import ServerConfig

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")


def rows(heading):
    """Return the cells of the first table under a heading of the page, without its head."""
    [section] = re.findall(rf"(?ms)^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE)
    [table] = re.findall(r"(?m)((?:^\|.*\n)+)", section)
    return [[cell.strip() for cell in line.strip("|\n").split(" |")] for line in table.splitlines()[2:]]


def written(own):
    """Return the default of a field as the page writes it."""
    if own.default is not dataclasses.MISSING:
        is_text = isinstance(own.default, str)
        return f"`{json.dumps(own.default) if is_text else repr(own.default)}`"
    return "required" if own.default_factory is dataclasses.MISSING else f"`{own.default_factory.__name__}()`"


@pytest.mark.parametrize("config", [EngineConfig, CacheConfig, ServerConfig])
def test_every_option_is_listed_with_its_default(config):
    found = [(name, default) for name, _, default, *_ in rows(config.__name__)]
    assert found == [(f"`{own.name}`", written(own)) for own in dataclasses.fields(config) if own.init]


def test_options_of_the_command_line_are_those_of_serve():
    command = serve.command()
    known = {one.name: "/".join([*one.opts, *one.secondary_opts]) for one in command.params if one.name != "same_model"}
    known |= {"model": "MODEL", "cache": "", "discovered_peers": ""}
    found = {
        name.strip("`"): option.strip("`")
        for config in (EngineConfig, CacheConfig, ServerConfig)
        for name, *_, option in rows(config.__name__)
    }
    assert found == known


def test_what_a_server_has_otherwise_is_said():
    """Its own defaults of options of the engine."""
    effects = {name.strip("`"): effect for name, _, _, effect, _ in rows("EngineConfig")}
    assert all(f"`vlcache serve` has `{default}`" in effects[name] for name, default in serve._DEFAULTS.items())


def test_every_bucket_size_is_listed():
    assert [name for name, *_ in rows("Bucket sizes")] == [f"`{own.name}`" for own in dataclasses.fields(BucketSizes)]
