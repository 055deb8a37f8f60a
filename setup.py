"""Makes the page for package indexes of README.md. Everything else stands in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")  # to a file of the repository


def page(readme: str, repository: str | None) -> str:
    """Return README.md as it holds away from the repository, whose files an index does not have.

    Links lead to the repository's address, where `[project.urls]` has one; else the path stands there as text.
    """

    def away(link: re.Match[str]) -> str:
        picture, shown, path = link.groups()
        if repository:
            return f"{picture}[{shown}]({repository}/{'raw' if picture else 'blob'}/HEAD/{path})"
        file = path.partition("#")[0]
        return file if shown == file else f"{shown} ({file})"

    made = LINK.sub(away, readme)
    return made if repository else made + "\nPaths such as docs/api.md are those of the source distribution.\n"


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    text = page((ROOT / "README.md").read_text(), urls.get("Repository"))
    setup(long_description=text, long_description_content_type="text/markdown")
