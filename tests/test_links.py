"""The links of the repository, where a checkout has none."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import vlcache_jax


def test_links_that_are_text_files_are_reported(tmp_path):
    """As after a clone without symbolic links, or from a zip file."""
    package = tmp_path / "vlcache_jax"
    package.mkdir()
    source = pathlib.Path(vlcache_jax.__file__)
    (package / "__init__.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (package / "models").write_text("../models")
    command = [sys.executable, "-c", "import vlcache_jax"]
    failed = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {package / 'models'} must be a folder, got a file")
    assert "git -c core.symlinks=true clone" in last


def test_nothing_is_built_from_links_that_are_text_files(tmp_path):
    """The wheel would hold no module, and no installer would say so."""
    setup = pathlib.Path(__file__).parents[1] / "setup.py"
    (tmp_path / "setup.py").write_text(setup.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "vlcache_jax").write_text("../vlcache_jax")
    failed = subprocess.run([sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("src/vlcache_jax must be a folder, got a file")
