"""The shell scripts: what they accept, what they leave alone, and both commands of the README."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = REPOSITORY / "scripts"
SHELL = [*SCRIPTS.glob("*.sh"), SCRIPTS / "check", SCRIPTS / "test", REPOSITORY / ".ci" / "run"]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX shell")


def sh(
    code: str, *arguments: object, cwd: Path = REPOSITORY, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a few lines with the functions of venv.sh."""
    return subprocess.run(
        ["/bin/sh", "-euc", f'. "{SCRIPTS}/venv.sh"\n{code}', "sh", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **changes},
        capture_output=True,
        check=False,
        text=True,
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder


def pretend_torch(environment: Path, version: str) -> None:
    """Put down the metadata of a torch that is not there."""
    [site] = environment.glob("lib/python3*/site-packages")
    for old in site.glob("torch-*.dist-info"):
        shutil.rmtree(old)
    folder = site / f"torch-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_script_is_valid_shell(path: Path) -> None:
    shell = "bash" if "bash" in path.read_text().partition("\n")[0] else "sh"
    subprocess.run([shell, "-n", path], check=True)
    if path.name != "venv.sh":
        assert os.access(path, os.X_OK)


@pytest.mark.parametrize(
    ("version", "enough"),
    [("2.8.1", False), ("2.9.0", True), ("2.13.0+cpu", True), ("3.0.0", True), ("1.13.1", False)],
)
def test_torch_from_2_9_on_counts_as_installed(version: str, enough: bool, bare: Path) -> None:
    pretend_torch(bare, version)
    assert (sh("has_torch $1", bare / "bin/python").returncode == 0) is enough


def test_an_installed_torch_is_left_alone(bare: Path) -> None:
    pretend_torch(bare, "2.9.1+cu126")
    done = sh('pip_install() { echo "pip $*"; }; python=$1; ensure_torch', bare / "bin/python")
    assert done.returncode == 0 and done.stdout == ""
    assert "torch 2.9.1+cu126 is here and stays as it is" in done.stderr


@pytest.mark.parametrize(
    ("wanted", "installed"),
    [
        ("", "torch==2.13.0"),
        ("2.12.0", "torch==2.12.0"),
        ("torch==2.9.1+cpu", "torch==2.9.1+cpu"),
        ("./my.whl", "./my.whl"),
    ],
)
def test_a_missing_torch_is_installed_after_its_size_was_said(
    wanted: str, installed: str, bare: Path
) -> None:
    pretend_torch(bare, "2.8.0")
    done = sh(
        'pip_install() { echo "pip $*"; }; python=$1; ensure_torch',
        bare / "bin/python",
        OFFLOAD_LLAMA_TORCH=wanted,
    )
    assert done.stdout == f"pip --verbose {installed}\n"
    assert "about 3 GB" in done.stderr and "OFFLOAD_LLAMA_TORCH" in done.stderr


def test_an_unusable_python_is_named_with_the_remedy(tmp_path: Path) -> None:
    done = sh("find_python", PATH=str(tmp_path), OFFLOAD_LLAMA_PYTHON="/no/such/python")
    assert done.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13" in done.stderr


def test_inside_an_environment_the_python_it_was_made_from_is_found(bare: Path) -> None:
    done = sh("find_python", OFFLOAD_LLAMA_PYTHON=str(bare / "bin/python"))
    assert done.returncode == 0
    assert not Path(done.stdout.strip()).is_relative_to(bare)


def test_a_folder_that_is_no_environment_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = sh("make_venv $1", tmp_path)
    assert done.returncode == 1 and "is no virtual environment" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_what_was_installed_is_not_installed_again_until_a_file_changes(
    bare: Path, tmp_path: Path
) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("1")
    code = 'python=$1; if needs_install x "$2"; then echo install; mark_installed; fi'
    assert sh(code, bare / "bin/python", file).stdout == "install\n"
    assert sh(code, bare / "bin/python", file).stdout == ""
    file.write_text("2")
    assert sh(code, bare / "bin/python", file).stdout == "install\n"


def test_a_failing_pip_ends_the_script(bare: Path) -> None:
    done = sh("python=$1; pip_install x; echo still here", bare / "bin/python")
    assert done.returncode == 1 and done.stdout == ""
    assert "error: pip could not install: x" in done.stderr


def test_a_failing_test_fails_the_script_and_pytest_has_the_last_word(tmp_path: Path) -> None:
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_no():\n    assert False\n")
    line = [SCRIPTS / "test", "-c", os.devnull, "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*map(str, line), str(failing)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("=") and "1 failed" in done.stdout


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/cli.md"])
def test_what_a_document_links_or_names_is_there(name: str) -> None:
    document = REPOSITORY / name
    text = document.read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    files = re.findall(r"(?:scripts|tests|docs)/[\w.-]+\w", re.sub(r"\]\([^)]*\)", "", text))
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [file for file in files if not (REPOSITORY / file).exists()]
    assert missing == []


@pytest.mark.slow
def test_the_quick_start_works_as_printed_and_again(tmp_path: Path) -> None:
    """Both runs print real text; the second one finds everything there."""
    clone = tmp_path / "clone"
    skip = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "build", ".*_cache")
    shutil.copytree(REPOSITORY, clone, ignore=skip)
    for _ in range(2):
        done = subprocess.run(
            ["sh", "scripts/quickstart.sh"],
            cwd=clone,
            capture_output=True,
            check=False,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 10
    assert "stays as it is" in done.stderr
