"""Every name, path, command and link in README, documentation and the maps of packages exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from radixkv.cli.main import app
from radixkv.vllm_options import ENGINE, SERVER

ROOT = Path(__file__).parent.parent.parent


def module_docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARAMETRIZED = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
# Packages whose docstrings say which file does what.
MAPS = [path for path in sorted((ROOT / "radixkv").rglob("__init__.py")) if ".py " in module_docstring(path)]
_FOLDERS = ("radixkv/", "kernels/", "tests/", "examples/", "docs/", "docker/")


def inline_code(path: Path) -> Iterator[str]:
    """What stands between single backticks, outside of code blocks."""
    prose = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


def resolve(name: str) -> Any:
    """The module, class or function of a dotted name."""
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for i, part in enumerate(rest, start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join([first, *rest[:i]]))
    return found


@PARAMETRIZED
def test_every_dotted_name_exists(path: Path) -> None:
    for code in inline_code(path):
        if re.fullmatch(r"radixkv(_kernels)?(\.\w+)+", code):
            resolve(code)


@PARAMETRIZED
def test_every_path_exists(path: Path) -> None:
    for code in inline_code(path):
        if code.startswith(_FOLDERS) and " " not in code:
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("path", MAPS, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_every_file_on_the_map_of_a_package_exists(path: Path) -> None:
    files = {file.name for file in path.parent.rglob("*.py")}
    assert set(re.findall(r"\b\w+\.py\b", module_docstring(path))) <= files


@pytest.fixture(scope="module")
def command_line() -> Any:
    return get_command(app)  # half a second


@PARAMETRIZED
def test_every_command_and_its_options_exist(path: Path, command_line: Any) -> None:
    for code in inline_code(path):
        if not re.match(r"radixkv [a-z]", code) or "|" in code:
            continue
        command = command_line
        options = set()
        for word in shlex.split(code)[1:]:
            if word.startswith("-"):
                options.add(word.partition("=")[0])
            elif not options and hasattr(command, "commands"):
                assert word in command.commands, code
                command = command.commands[word]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert options <= known, code


def test_options_beside_those_of_vllm_and_sglang_exist(command_line: Any) -> None:
    """And vLLM's, which `radixkv serve` accepts or explains."""
    serve = {option for parameter in command_line.commands["serve"].params for option in parameter.opts}
    serve |= {option for parameter in command_line.commands["serve"].params for option in parameter.secondary_opts}
    explained = {f"--{name.replace('_', '-')}" for name in (*ENGINE, *SERVER)}
    page = (ROOT / "docs" / "migrate.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    theirs, ours = (
        {option for row in rows if len(row) == 3 for option in re.findall(r"--[a-z][a-z-]+", row[column])}
        for column in (0, 2)
    )
    assert theirs <= serve | explained
    assert ours <= serve


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_extra_is_explained_where_one_installs() -> None:
    """A reader learns of an extra before a command asks for it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    for_contributors = {"docs", "mutation", "test"}
    page = (ROOT / "docs" / "get-started.md").read_text()
    assert [extra for extra in extras - for_contributors if f"[{extra}]" not in page and f"`{extra}`" not in page] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_picture_of_the_packages_shows_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    expected = [sorted(layer.split(" : ")) for layer in layers if layer != "__main__"]
    picture = (ROOT / "docs" / "assets" / "packages.svg").read_text()
    rows: dict[float, list[str]] = {}
    for y, names in re.findall(r'<text class="mono" x="[\d.]+" y="([\d.]+)">([^<]+)</text>', picture):
        rows.setdefault(float(y), []).extend(names.split(", "))
    assert [sorted(rows[y]) for y in sorted(rows)] == expected


def test_every_package_is_in_the_table_of_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture" / "index.md").read_text()
    owners = set(re.findall(r"`(radixkv\.\w+)`", "".join(line for line in page.splitlines() if line.startswith("|"))))
    assert owners == {f"radixkv.{path.parent.name}" for path in (ROOT / "radixkv").glob("*/__init__.py")}


def test_pages_fetch_nothing_from_elsewhere() -> None:
    """A style sheet, script or font of the site comes with the site."""
    for path in [*PAGES, ROOT / "mkdocs.yml", *(ROOT / "docs" / "assets").glob("*.*g")]:
        if path.suffix != ".png":
            assert not re.search(r"(src|href)=.https?://|@import|url\(.?http", path.read_text()), path
