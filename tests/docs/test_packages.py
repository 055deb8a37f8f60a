"""What goes to a package index: a source distribution with its tests, a wheel, and the page that shows there."""

import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import flexsn

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy, since builds leave files: a folder named flexsn in an empty one."""
    ignored = [name.rstrip("/") for name in (ROOT / ".gitignore").read_text().split()]
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("packages") / "flexsn", ignore=shutil.ignore_patterns(*ignored, ".git"))


def built(kind, project):
    code = f"from setuptools import build_meta; build_meta.build_{kind}('..')"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages` configuration" not in done.stderr
    return next(project.parent.glob("*.tar.gz" if kind == "sdist" else "*.whl"))


@pytest.fixture(scope="module")
def unpacked(project):
    """The folder that a source distribution holds."""
    with tarfile.open(built("sdist", project)) as archive:
        archive.extractall(project.parent / "unpacked", filter="data")
    return project.parent / "unpacked" / f"flexsn-{flexsn.__version__}"


def test_a_source_distribution_holds_the_project(project, unpacked):
    there = {path.relative_to(unpacked) for path in unpacked.rglob("*")}
    assert {path.relative_to(project) for path in project.rglob("*") if "flexsn.egg-info" not in path.parts} <= there


@pytest.mark.slow
def test_tests_of_a_source_distribution_are_collected(unpacked):
    code = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(code, cwd=unpacked, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "error" not in done.stdout.splitlines()[-1], done.stdout[-3000:]


def test_what_the_index_shows(unpacked):
    """Metadata that it takes (what `twine check` asks for, and more), and no link to a file that it does not have."""
    shown = Metadata.from_email((unpacked / "PKG-INFO").read_bytes(), validate=True)
    assert shown.description_content_type == "text/markdown" and shown.version.public == flexsn.__version__
    page = runpy.run_path(str(ROOT / "setup.py"))
    assert shown.description.strip() == page["page"](README, None).strip() and page["LINK"].search(README)
    assert not page["LINK"].search(shown.description) and shown.description.count("```") == README.count("```")


def test_links_lead_to_the_repository_once_it_has_an_address():
    page = runpy.run_path(str(ROOT / "setup.py"))["page"]
    text = "![What](docs/img/a.png) [ops](docs/ops.md#x), [docs/ops.md](docs/ops.md), [there](https://other.org/a), [here](#here)"
    assert page(text, "https://host.org/flexsn") == (
        "![What](https://host.org/flexsn/raw/HEAD/docs/img/a.png) [ops](https://host.org/flexsn/blob/HEAD/docs/ops.md#x), "
        "[docs/ops.md](https://host.org/flexsn/blob/HEAD/docs/ops.md), [there](https://other.org/a), [here](#here)"
    )
    assert "What (docs/img/a.png) ops (docs/ops.md), docs/ops.md, [there](https://other.org/a), [here](#here)" in page(text, None)


def test_an_editable_install_is_a_path(project):
    """Python finds the package, and no folder that holds the clone: with an import hook, which is asked last, it would."""
    with zipfile.ZipFile(built("editable", project)) as wheel:
        assert [name for name in wheel.namelist() if "dist-info" not in name] == [f"__editable__.flexsn-{flexsn.__version__}.pth"]
        wheel.extractall(project.parent / "site")
    code = (
        f"import importlib.util, site; site.addsitedir({str(project.parent / 'site')!r}); print(importlib.util.find_spec('flexsn').origin)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=project.parent, env={}, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(project / "flexsn" / "__init__.py"), done.stderr
