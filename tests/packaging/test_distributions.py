"""What `make build` makes installs and runs where there is nothing else of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import radixkv
import radixkv_cpu

ROOT = Path(__file__).parents[2]
# What a build may read: the folders that it packs, and every file beside them.
FOLDERS = ("radixkv", "kernels", "tests", "docs", "examples", "docker", ".ci")

# Stands in for the C++ compiler, which takes two minutes: it links what was compiled when this checkout was installed.
LINKER = f"""#!{sys.executable}
import shutil, sys
from pathlib import Path
target = Path(sys.argv[sys.argv.index("-o") + 1])
installed = Path({str(Path(radixkv_cpu.__file__).parent)!r})
target.touch() if target.suffix == ".o" else shutil.copy(installed / target.name, target)
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist, built from a copy, so that nothing is written between the sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
        elif path.name in FOLDERS:
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(LINKER)
    compiler.chmod(0o755)
    # The wheel is built from the sdist, as whoever packs RadixKV would.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source],
        check=True,
        env={**without_this_checkout(), "CC": f"{compiler}", "CXX": f"{compiler}"},
        stdout=subprocess.PIPE,
    )
    return target


@pytest.fixture(scope="module")
def run(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment that has the wheel; what it needs is this environment's."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # As a path only: what its own .pth files name, such as this checkout, is not on it.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = distributions.glob("*.whl")
    # Ignoring what is installed, or pip would want to replace the RadixKV of this environment.
    install = ["install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", folder / "bin" / "python", *install], check=True)

    def run(program: str, *arguments: str) -> str:
        return subprocess.run(
            [folder / "bin" / program, *arguments],
            check=True,
            env=without_this_checkout(),
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    return run


def without_this_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def names_in_wheel(distributions: Path) -> set[str]:
    (wheel,) = distributions.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def names_in_sdist(distributions: Path) -> set[str]:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_both_have_the_version_and_the_licence(distributions: Path) -> None:
    version = radixkv.__version__
    # The wheel holds compiled code, so its name ends with the platform; ctypes loads that, so any Python will do.
    wheel, sdist = sorted((path.name for path in distributions.iterdir()), key=lambda name: name.endswith(".gz"))
    assert wheel.startswith(f"radixkv-{version}-py3-none-linux_")
    assert wheel.endswith(".whl")
    assert sdist == f"radixkv-{version}.tar.gz"
    assert f"radixkv-{version}.dist-info/licenses/LICENSE" in names_in_wheel(distributions)
    assert "LICENSE" in names_in_sdist(distributions)


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert "version" not in project
    sources = [ROOT / "pyproject.toml", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    found = [path.relative_to(ROOT) for path in sources if f'"{radixkv.__version__}"' in path.read_text()]
    assert found == [Path("radixkv/__init__.py")]


def test_whatever_the_tests_need_is_pinned() -> None:
    """httpx-aiohttp was not, so the tests ran with whichever version came out last."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def required(requirements: list[str]) -> Iterator[str]:
        for requirement in map(Requirement, requirements):
            if requirement.name == "radixkv":
                for extra in requirement.extras:
                    yield from required(extras[extra])
            else:
                yield canonicalize_name(requirement.name)

    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name) for name, equals, _ in (line.partition("==") for line in constraints) if equals}
    assert {*required(project["dependencies"]), *required(extras["test"])} <= pinned


def test_the_wheel_has_all_that_runs_and_nothing_else(distributions: Path) -> None:
    names = names_in_wheel(distributions)
    for package in (ROOT / "radixkv", ROOT / "kernels" / "radixkv_cpu", ROOT / "kernels" / "radixkv_kernels"):
        for path in package.rglob("*.py"):
            assert path.relative_to(package.parent).as_posix() in names
    for path in (ROOT / "radixkv" / "server" / "operation" / "static").iterdir():
        assert f"radixkv/server/operation/static/{path.name}" in names
    assert {"radixkv/py.typed", "radixkv_kernels/py.typed", "radixkv/bench/results/cache.json"} <= names
    results = {name for name in names if name.startswith("radixkv/bench/results/")}
    assert {Path(name).suffix for name in results} == {".json"}  # pictures are the documentation's
    compiled = {f"radixkv_cpu/{path.name}" for path in Path(radixkv_cpu.__file__).parent.glob("*.so")}
    assert {name for name in names if name.endswith(".so")} == compiled
    version = radixkv.__version__
    packages = {"radixkv", "radixkv_cpu", "radixkv_kernels", f"radixkv-{version}.dist-info"}
    assert {name.partition("/")[0] for name in names} == packages


def test_the_sdist_can_be_tested_and_built_again(distributions: Path) -> None:
    names = names_in_sdist(distributions)
    needed = """pyproject.toml constraints.txt Makefile README.md CHANGELOG.md CONTRIBUTING.md tests/conftest.py
    tests/support/model_zoo.py examples/cache_alone.py docker/Dockerfile.cpu docs/index.md mkdocs.yml .ci/run"""
    assert set(needed.split()) <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels" / "radixkv_cpu" / "src").iterdir()} <= names
    assert not any(name.endswith(".so") for name in names)
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)


def test_what_it_requires_is_what_the_tests_run_with(run: Run) -> None:
    program = "from importlib.metadata import distribution; print(*distribution('radixkv').requires, sep='\\n')"
    requirements = [Requirement(line) for line in run("python", "-c", program).splitlines()]
    assert {"torch", "transformers"} <= {requirement.name for requirement in requirements}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": "server"}):
            assert requirement.specifier.contains(metadata.version(requirement.name)), requirement


def test_the_installed_command_runs(run: Run) -> None:
    assert "Prefix caching for language models" in run("radixkv", "--help")
    assert run("radixkv", "--version").strip() == radixkv.__version__


def test_the_installed_packages_are_those_of_the_wheel(run: Run) -> None:
    program = (
        "import sys, radixkv, radixkv.cache, radixkv.server.operation.page, importlib.metadata as m; "
        "print(radixkv.__file__, m.version('radixkv'), radixkv.__version__)"
    )
    file, installed, told = run("python", "-c", program).split()
    assert Path(file).parts[-3:] == ("site-packages", "radixkv", "__init__.py")
    assert not Path(file).is_relative_to(ROOT)
    assert installed == told == radixkv.__version__


def test_a_checkout_that_is_not_installed_knows_its_version() -> None:
    program = "import radixkv, sys; print(radixkv.__version__, 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    # Without site-packages, so without the metadata of whatever is installed.
    found = subprocess.run(
        [sys.executable, "-S", "-c", program], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert found.stdout == f"{radixkv.__version__} False\n"
