"""Building the native kernel, and doing without it."""

from __future__ import annotations

import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from offload_llama.errors import ConfigError
from offload_llama.native import NativeAttention, TorchAttention, build, choose
from tests.helpers_native import kernel as kernel


def test_the_best_instruction_set_is_chosen_unless_another_is_asked_for(
    kernel: NativeAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, reason = choose()
    assert isinstance(attention, NativeAttention)
    assert attention.instruction_set == kernel.instruction_sets[-1]
    assert reason == f"{attention.title}: the best this processor has"
    monkeypatch.setenv("OFFLOAD_LLAMA_NATIVE", "portable")
    attention, reason = choose()
    assert reason == "native kernel (portable): OFFLOAD_LLAMA_NATIVE asks for it"
    monkeypatch.setenv("OFFLOAD_LLAMA_NATIVE", "mmx")
    with pytest.raises(ConfigError, match="cannot be mmx here; choose 0 or one of portable"):
        choose()


def test_the_kernel_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_LLAMA_NATIVE", "0")
    attention, reason = choose()
    assert isinstance(attention, TorchAttention)
    assert reason == "torch's kernel: OFFLOAD_LLAMA_NATIVE is 0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which nothing was built yet."""
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


def compile_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let a line of Python stand for the compiler; `out` is where its result belongs."""
    before = "import sys; out = sys.argv[sys.argv.index('-o') + 1]; "
    monkeypatch.setenv("CXX", shlex.join([sys.executable, "-c", before + code]))


def test_a_missing_compiler_gives_torchs_kernel_and_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    attention, reason = choose()
    assert isinstance(attention, TorchAttention)
    assert reason == "torch's kernel: CXX names no program (no-such-compiler -O1)"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(folder))
    assert choose()[1].startswith("torch's kernel: no C++ compiler was found")
    assert not build.is_ready()


def test_a_compiler_that_fails_is_quoted_and_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = folder.parent.parent / "tries"
    code = f"open({str(tries)!r}, 'a').write('x'); print('note'); sys.exit('fatal error: no luck')"
    compile_with(monkeypatch, code)
    for _ in range(2):
        attention, reason = choose()
        assert isinstance(attention, TorchAttention)
        assert reason == f"torch's kernel: {sys.executable} failed: fatal error: no luck"
    assert len(tries.read_text()) <= 2  # with the C++ library inside, and without
    assert list(folder.iterdir()) == []


def test_a_compiler_that_hangs_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(build.BuildError, match=r"took longer than 0\.5 s"):
        build.build(build.built_path(), timeout_s=0.5)
    assert list(folder.iterdir()) == []


def test_a_compiler_that_writes_rubbish_gives_torchs_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, "open(out, 'w').write('rubbish')")
    attention, reason = choose()
    assert isinstance(attention, TorchAttention)
    assert "cannot be loaded" in reason and "\n" not in reason


def test_a_folder_that_cannot_be_written_gives_torchs_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, "sys.exit('never reached')")
    folder.parent.write_text("a file where the folder should be")
    assert "cannot be written" in choose()[1]


@pytest.fixture
def good(kernel: NativeAttention, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared object that the other tests use."""
    return tmp_path_factory.getbasetemp() / "measured" / "native" / build.built_path().name


def test_what_was_built_before_is_used_without_a_compiler(
    good: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, "sys.exit('nothing is to be built')")
    folder.mkdir(parents=True)
    assert not build.is_ready()
    shutil.copy(good, build.built_path())
    assert build.is_ready()
    assert isinstance(choose()[0], NativeAttention)


def test_what_is_damaged_is_built_again(
    good: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, f"import shutil; shutil.copy({str(good)!r}, out)")
    folder.mkdir(parents=True)
    build.built_path().write_text("rubbish")
    assert isinstance(choose()[0], NativeAttention)
    assert build.built_path().read_bytes() == good.read_bytes()


def test_a_wheels_own_build_is_used_unless_it_is_of_other_sources(
    good: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, "sys.exit('error: nothing else to be had')")
    inside = folder.parent.parent / good.name
    shutil.copy(good, inside)
    monkeypatch.setattr(build, "prebuilt_path", lambda: inside)
    assert isinstance(choose()[0], NativeAttention)
    monkeypatch.setattr(build, "source_key", lambda: "of other sources")
    assert choose()[1].endswith("nothing else to be had")


def test_the_sources_are_in_the_wheel() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["offload_llama"]
    package = Path(build.__file__).parents[1]
    kept = {path for pattern in patterns for path in package.glob(pattern)}
    assert {p for p in package.glob("native/*") if p.suffix in (".cpp", ".h")} <= kept
