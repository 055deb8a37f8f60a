"""Open every page of the built site in a headless Chromium: `python tools/check_site.py [folder or page ...]`.

A page must render (a heading and text are visible, every image has pixels), log no error, ask for nothing outside the
folder, and each of its links must lead to a page that exists and, with an anchor, to an element there. Needs `chromium`.
"""

from __future__ import annotations

import html.parser
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--allow-file-access-from-files", "--virtual-time-budget=4000", "--enable-logging=stderr", "--v=0",
]  # fmt: skip


class Page(html.parser.HTMLParser):
    """What a rendered page holds: ids, links, what it loads, and how much text."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.headings = self.letters = 0
        self._silent = 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.headings += tag == "h1"
        self._silent += tag in ("script", "style")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("img", "script", "iframe") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon") and given.get("href"):
            self.loads.append(given["href"])

    def handle_endtag(self, tag):
        self._silent -= tag in ("script", "style")

    def handle_data(self, data):
        self.letters += 0 if self._silent else len(data.strip())


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        sys.exit("tools/check_site.py needs chromium: install the package `chromium` of your system")
    return found


def render(chromium: str, page: Path) -> tuple[Page, list[str]]:
    """The page after its scripts ran, and the errors that it logged."""
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    errors = [line for line in done.stderr.splitlines() if ":CONSOLE" in line and ("rror" in line or "refused" in line.lower())]
    return Page(done.stdout), errors


def problems(page: Path, rendered: Page, pages: dict[Path, Page]) -> list[str]:
    found = []
    if not rendered.headings or rendered.letters < 200:
        found.append(f"shows {rendered.headings} headings and {rendered.letters} letters")
    for target in rendered.loads:
        parts = urlsplit(target)
        if parts.scheme in ("http", "https") or parts.netloc:
            found.append(f"loads {target} from outside")
        elif parts.scheme != "data" and not (page.parent / unquote(parts.path)).exists():
            found.append(f"loads {target}, which does not exist")
    for target in rendered.links:
        parts = urlsplit(target)
        if parts.scheme not in ("", "file"):
            continue
        there = Path(unquote(parts.path)) if parts.scheme == "file" else (page.parent / unquote(parts.path)) if parts.path else page
        there = Path(os.path.normpath(there))
        if there.is_dir():
            there /= "index.html"
        if not there.exists():
            found.append(f"links to {target}, which does not exist")
        elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].ids:
            found.append(f"links to {target}, where nothing has that name")
    return found


def main() -> None:
    chosen = [Path(a).resolve() for a in sys.argv[1:]] or [Path(__file__).resolve().parents[1] / "site"]
    files = sorted(f for c in chosen for f in (c.rglob("*.html") if c.is_dir() else [c]) if f.name != "404.html")
    if not files:
        sys.exit("no pages: run `make docs` first")
    chromium = browser()
    rendered = {page: render(chromium, page) for page in files}
    pages = {page: parsed for page, (parsed, _) in rendered.items()}
    bad = {str(page): [*errors, *problems(page, parsed, pages)] for page, (parsed, errors) in rendered.items()}
    bad = {page: found for page, found in bad.items() if found}
    print(json.dumps({"pages": len(files), "links": sum(len(p.links) for p in pages.values()), "problems": bad}, indent=1))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
