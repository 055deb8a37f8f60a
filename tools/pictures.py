"""Draw the pictures of docs/pictures.md with its own snippets, and fill in what they print: `python tools/pictures.py`."""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot
from PIL import Image

matplotlib.use("Agg")

PAGE = Path(__file__).parent.parent / "docs" / "pictures.md"


def run(text: str) -> tuple[dict, str]:
    """Run the page's snippets, one after the other; the names they leave and what they print."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), names)
    matplotlib.pyplot.close("all")
    return names, printed.getvalue()


def fill(text: str, printed: str) -> str:
    return re.sub(r"(<!-- monitor -->\n```\n).*?(```)", lambda m: m[1] + printed + m[2], text, flags=re.DOTALL)


def main() -> None:
    text, home = PAGE.read_text(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _, printed = run(text)
        finally:
            os.chdir(home)
        for picture in Path(folder).glob("*.png"):  # few colors make small files
            small = Image.open(picture).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
            small.save(PAGE.parent / "img" / picture.name, optimize=True)
    PAGE.write_text(fill(text, printed))


if __name__ == "__main__":
    main()
