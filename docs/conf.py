"""The site: `uv run --group docs sphinx-build -W --keep-going docs build/docs`."""

import vlcache_jax

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
