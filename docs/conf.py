"""Settings of the documentation's site, which `make docs` builds with Sphinx into build/docs."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from sphinx.ext.autodoc._dynamic._mock import _MockObject

from coalmine.version import __version__

project = "coalmine"
author = "The coalmine developers"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "reference_pages", "plain_docstrings"]
myst_enable_extensions = ["colon_fence"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["extensions", "**.ipynb"]
myst_heading_anchors = 4
suppress_warnings = ["config.cache", "ref.python"]  # a name that several classes have, such as `audit`, links to none

default_role = "py:obj"  # a name in a docstring links to its entry, if it has one
add_module_names = False
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = [
    name
    for name in (
        "torch",
        "flwr",
        "opacus",
        "transformers",
        "peft",
        "jax",
        "jax_privacy",
        "optax",
        "pfl",
        "nvflare",
        "matplotlib",
        "sklearn",
    )
    if find_spec(name) is None
]
# In a signature, "Name | None" must also work for a name of a package that is not installed.
_MockObject.__or__ = _MockObject.__ror__ = lambda mock, _: mock
python_maximum_signature_line_length = 100

smartquotes = False  # "--option" must stay as it is

html_theme = "furo"
html_title = "coalmine"
html_copy_source = False
html_show_sphinx = False
