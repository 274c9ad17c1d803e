"""Stops a build from a checkout whose links are text files, as in a .zip: the wheel would hold no module."""

import pathlib

import setuptools

if not pathlib.Path("src/vlcache_jax").is_dir():  # build backends call this file from its own folder
    raise SystemExit(
        "src/vlcache_jax must be a folder, got a file: the repository's symbolic links were unpacked as text files. "
        "Clone the repository with `git -c core.symlinks=true clone`, or download it as .tar.gz"
    )
setuptools.setup()
