"""The command `python -m vlcache_jax.convert`."""

import typer

from vlcache_jax.convert.command import convert_command

if __name__ == "__main__":
    typer.run(convert_command)
