"""The wheel, in an environment of its own outside the clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the clone stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "offload_llama", source / "offload_llama", ignore=skip)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--no-index"]
    line = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(out), str(source)]
    subprocess.run(line, check=True)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an environment's programs; it borrows the wheel's dependencies from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    python = programs / "python"
    where = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.check_output([python, *where], text=True).strip())
    # Read as a path only: the editable install of this environment does not come along.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    line = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*line, "--quiet", "--no-index", str(wheel)], check=True)
    return programs


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_declares_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    required = metadata.get_all("Requires-Dist") or []
    always = {re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line}
    assert {"torch", "sentencepiece", "fairscale", "psutil", "click"} <= always
    assert not {"transformers", "pytest"} & always
    assert metadata["License-Expression"] == "MIT"


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    roots = {name.partition("/")[0] for name in names}
    assert roots == {"offload_llama", f"offload_llama-{wheel.name.split('-')[1]}.dist-info"}
    expected = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "offload_llama").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("offload_llama/")} == expected


def test_the_installed_program_runs_outside_the_clone(installed: Path, tmp_path: Path) -> None:
    code = "import offload_llama; print(offload_llama.__file__)"
    package = Path(run(installed / "python", "-c", code, cwd=tmp_path).strip())
    assert package.is_relative_to(installed.parent)
    program = installed / "offload-llama"
    report = json.loads(run(program, "doctor", "--json", "--device", "cpu", cwd=tmp_path))
    assert report["default_model"]["path"] is not None
    options = ["--raw", "--max-tokens", "3", "--device", "cpu"]
    text = run(program, "generate", "The capital of France is", *options, cwd=tmp_path)
    assert text.startswith(" Paris")
