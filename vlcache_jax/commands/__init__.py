"""Commands of the CLI, `vlcache`.

Each command checks its arguments before it loads anything, and then calls the package that does the work. Heavy imports
are inside the commands, so that `--help` is fast. No other package imports this one.
"""
