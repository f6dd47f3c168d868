"""Settings of the documentation site, which `make docs` builds with Sphinx.

Pages are read from the repository's root, so that their links work on GitHub and on the site.
"""

from typing import Any

project = "flashtune"
project_copyright = "the flashtune authors"
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "benchmarks/results/*.md",
    "kernels_generated/README.md",
]
# Folders that Sphinx need not search for pages.
exclude_patterns = [".*", "out", "tests", "flashtune", "tuner", "templates", "db"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
suppress_warnings = ["myst.header"]  # A page may begin below its first heading.

autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_use_ivar = True
default_role = "code"

html_theme = "furo"
html_title = "flashtune"
html_extra_path = ["site"]
html_copy_source = False
html_show_sphinx = False


def setup(app: Any) -> None:
    """Leaves out the fields of named tuples, which the docstrings of their classes describe."""
    app.connect(
        "autodoc-skip-member", lambda *arguments: type(arguments[3]).__name__ == "_tuplegetter" or None
    )
