"""What users install: the source distribution, the wheel made of it, its metadata, and its types seen from outside."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from fnmatch import fnmatch
from pathlib import Path

import pytest

import test_docs
import typed_program
from fullshard.version import __version__
from ranks import Rank, on_ranks

ROOT = Path(__file__).parents[1]
# Folders that the sdist has whole, and files of the root; nothing else.
FOLDERS = {".ci", "bench", "docs", "examples", "src", "tests"}
FILES = {
    *(".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("Makefile", "PKG-INFO", "README.md", "SECURITY.md", "constraints.txt", "hatch_build.py"),
    *("mkdocs.yml", "pyproject.toml"),
}
IGNORED = [*(ROOT / ".gitignore").read_text().replace("/\n", "\n").split(), "*.py[co]", "*.so"]


@dataclass(frozen=True)
class Built:
    """A release as it would be uploaded."""

    source: Path  # the sdist, unpacked
    wheel: Path
    metadata: Message


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of this tree, and the wheel of that sdist, built without a network."""
    folder = tmp_path_factory.mktemp("package")
    (sdist,) = build(ROOT, "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"fullshard-{__version__}"
    (wheel,) = build(source, "wheel", folder)
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"fullshard-{__version__}.dist-info/METADATA").decode()
    return Built(source, wheel, email.message_from_string(text))


def build(root: Path, target: str, folder: Path) -> list[Path]:
    """Build a target of the project in ``root``; return the files that are new in ``folder``."""
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(set(folder.iterdir()) - before)


def files_in(folder: str, root: Path) -> set[str]:
    """The files of a folder that are not ignored, as paths from ``root``."""
    paths = [path.relative_to(root) for path in (root / folder).rglob("*") if path.is_file()]
    return {
        str(path) for path in paths if not any(fnmatch(part, ignored) for part in path.parts for ignored in IGNORED)
    }


def test_the_sdist_has_what_the_documents_link_to(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """All folders that the sdist has are whole, without caches, and no link of its documents leads out of it."""
    assert {path.name for path in built.source.iterdir()} == FOLDERS | FILES
    found = {str(path.relative_to(built.source)) for path in built.source.rglob("*") if path.is_file()}
    assert found - FILES == set().union(*(files_in(folder, ROOT) for folder in FOLDERS))
    pages = [built.source / page.relative_to(ROOT) for page in test_docs.PAGES]
    monkeypatch.setattr(test_docs, "PAGES", pages)
    test_docs.test_links_between_documents_resolve()


def test_the_wheel_has_the_package_alone(built: Built) -> None:
    """Every file of the package with its types, the license and the command; nothing else."""
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        commands = archive.read(f"fullshard-{__version__}.dist-info/entry_points.txt").decode()
    described = {name for name in names if name.startswith(f"fullshard-{__version__}.dist-info/")}
    assert names - described == files_in("fullshard", ROOT / "src")
    assert {"fullshard/py.typed", "fullshard/__init__.pyi", "fullshard/dropin/inherit/sitecustomize.py"} <= names
    assert {name.split("/")[-1] for name in described} == {"METADATA", "WHEEL", "RECORD", "LICENSE", "entry_points.txt"}
    assert "fullshard = fullshard.__main__:main" in commands
    assert built.wheel.name == f"fullshard-{__version__}-py3-none-any.whl"


def test_metadata(built: Built) -> None:
    """An index shows version, license, addresses and extras, and a description without a relative link."""
    found = built.metadata
    assert found["Version"] == __version__
    assert (found["License-Expression"], found["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    addresses = {line.split(", ")[0] for line in found.get_all("Project-URL", [])}
    assert addresses == {"Homepage", "Documentation", "Repository", "Changelog", "Issues"}
    assert set(found.get_all("Provides-Extra", [])) == {"train", "tensorboard", "docs", "clients", "dev"}
    assert "Development Status :: 3 - Alpha" in found.get_all("Classifier", [])
    assert len(found["Summary"]) <= 512  # more than that is refused by indexes
    page = str(found.get_payload())
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    targets = re.findall(r"\]\(\s*<?([^)\s>]*)|(?:href|src|srcset)=[\"']([^\"']*)|^\[[^\]]+\]:\s+(\S+)", prose, re.M)
    assert targets
    assert [each for found in targets for each in found if each and not re.match(r"https://|mailto:|#", each)] == []
    assert f"https://github.com/fullshard/fullshard/blob/v{__version__}/docs/" in page


def test_links_of_the_long_description() -> None:
    """Relative links lead to the tag: pages and folders to the repository, pictures to the file; code is left alone."""
    hook = hatch_hook()
    for link, expected in {
        "[a](docs/log.md#x)": f"[a]({hook.REPOSITORY}/blob/v9/docs/log.md#x)",
        "[a](./docs)": f"[a]({hook.REPOSITORY}/tree/v9/docs)",
        "![a](docs/how_to/units.png)": f"![a]({hook.FILES}/v9/docs/how_to/units.png)",
        "[![a](x.svg)](docs/log.md)": f"[![a]({hook.FILES}/v9/x.svg)]({hook.REPOSITORY}/blob/v9/docs/log.md)",
        '<img src="x.svg">': f'<img src="{hook.FILES}/v9/x.svg">',
        '<source srcset="x.svg">': f'<source srcset="{hook.FILES}/v9/x.svg">',
        "[a]: docs/log.md": f"[a]: {hook.REPOSITORY}/blob/v9/docs/log.md",
        "[a](#here), [b](https://x.org/y), [c](mailto:a@x.org)": "",
        "```\n[a](docs/log.md)\n```": "",
    }.items():
        assert hook.with_absolute_links(link, ROOT, "v9") == (expected or link)


def hatch_hook() -> types.ModuleType:
    """hatch_build.py, which only builds import."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_version() -> None:
    """What cannot read version.py states the same version: the changelog, the citation and the site's links."""
    newest, date = re.findall(r"^## \[(\d[^\]]*)\] - (\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)[0]
    assert newest == __version__
    citation = read("CITATION.cff")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [__version__]
    assert re.findall(r'^date-released: "(.*)"$', citation, re.MULTILINE) == [date]
    assert re.findall(r"^  release: (\S+)", read("mkdocs.yml"), re.MULTILINE) == [f"v{__version__}"]
    assert re.search(r'^dynamic = \[.*"version".*\]', read("pyproject.toml"), re.MULTILINE)


def read(name: str) -> str:
    """A file in the root."""
    return (ROOT / name).read_text()


def typed_files(folder: Path) -> dict[str, list[Path]]:
    """Programs of users by how they are checked: with types of their own ("strict"), or without, as tutorials are."""
    programs = [ROOT / "tests" / "typed_program.py", *(ROOT / "examples").glob("train_loop.py")]
    snippets = []
    for page in sorted((ROOT / "docs" / "tutorial").glob("*.md")):
        if code := test_docs.snippets_of(page):
            snippets.append(folder / f"tutorial_{page.stem}.py")
            snippets[-1].write_text("\n".join(code))
    return {"strict": [Path(shutil.copy(program, folder)) for program in programs], "untyped": snippets}


def test_types_from_outside(installed: Path, tmp_path: Path) -> None:
    """``mypy`` accepts programs of users, which see the installed package and not this tree."""
    files = typed_files(tmp_path)
    untyped = "".join(f"[mypy-{path.stem}]\n{UNTYPED}\n" for path in files["untyped"])
    # Options as in pyproject.toml, so that both can use what the cache has of torch.
    options = "[mypy]\nstrict = True\npython_version = 3.11\n[mypy-torch.*]\nignore_missing_imports = True\n"
    (tmp_path / "mypy.ini").write_text(options + untyped)
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", f"--python-executable={installed}"]
    command += [f"--cache-dir={ROOT / '.mypy_cache'}"]
    command += [path.name for each in files.values() for path in each]
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Snippets have no annotations, and to torch's types an attribute of a module may always be a tensor or a module. Names,
# imports, arguments and what functions return are checked.
UNTYPED = """disallow_untyped_defs = False
disallow_incomplete_defs = False
disallow_untyped_calls = False
check_untyped_defs = True
disable_error_code = arg-type, index, operator, union-attr
"""


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, which finds all other packages in this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(packages)
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return folder / "bin" / "python"


def test_the_installed_package_is_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Types are checked, and the command runs, on the package that is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = [
        subprocess.check_output([installed, *arguments], text=True, env=environment, cwd=tmp_path).strip()
        for arguments in (["-c", "import fullshard; print(fullshard.__file__)"], ["-m", "fullshard", "--version"])
    ]
    assert Path(said[0]).is_relative_to(installed.parents[1])
    assert said[1] == f"fullshard {__version__}"


@on_ranks(2)
def test_the_typed_program_runs(rank: Rank, tmp_path: Path) -> None:
    """What mypy accepts also runs."""
    assert typed_program.train(tmp_path) > 0
