"""The command line: `vlcache`.

Each command reads its arguments, sees that they can be used before anything is loaded, and calls what does the work.
Heavy imports stand inside the commands, so that `--help` answers at once. Nothing is imported from here.
"""
