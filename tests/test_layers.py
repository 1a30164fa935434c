"""The layout is the architecture: imports flow one way, and files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload_llama

ROOT = Path(offload_llama.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Each may import those before it, and whatever is inside its own folder.
ORDER = (
    *("errors", "config", "hardware", "machine", "models", "profiles", "geometry", "cost"),
    *("planner", "policy", "forecast", "device"),
    *("attention", "native", "weights", "checkpoint", "tokenizer", "cache", "model", "sampling"),
    *("oom", "request", "engine", "generate", "admission", "steps", "fitting", "llm", "llama"),
    *("conversation", "prompts", "console", "saving", "probe", "doctor", "options", "report"),
    *("answer", "chat", "cli", "__main__"),
)
WITHOUT_TORCH = (
    *("errors", "config", "hardware", "machine", "models", "profiles", "geometry", "cost"),
    *("planner", "policy", "forecast", "options", "report", "cli"),
)


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of what a file imports, inside functions too."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit(path: Path) -> str:
    """Return the module or folder of the package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_comes_before_it(path: Path) -> None:
    if unit(path) == "__init__":
        return
    assert unit(path) in ORDER, f"give {unit(path)} its place in ORDER"
    for name in imports(path):
        package, _, rest = name.partition(".")
        inner = rest.partition(".")[0]
        if package == "offload_llama" and inner not in ("__version__", unit(path)):
            assert ORDER.index(inner) < ORDER.index(unit(path)), f"{unit(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_named_after_a_package_it_imports_or_too_long_to_read(path: Path) -> None:
    names = {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    packages = {name.partition(".")[0] for name in imports(path)}
    assert not names & packages
    assert len(path.read_text("utf-8").splitlines()) <= 400


def test_the_layers_for_planning_and_help_load_no_torch() -> None:
    code = f"import sys, {', '.join(f'offload_llama.{name}' for name in WITHOUT_TORCH)}\n"
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_public_names_are_these() -> None:
    assert sorted(offload_llama.__all__) == [
        "CacheError",
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "Conversation",
        "DeviceError",
        "DoesNotFit",
        "LLM",
        "Llama",
        "ModelConfig",
        "OffloadLlamaError",
        "OutOfMemory",
        "PromptTooLong",
        "RequestError",
        "RopeScaling",
        "SamplingParams",
        "TokenizerError",
    ]


def test_every_public_name_can_be_had() -> None:
    for name in offload_llama.__all__:
        assert getattr(offload_llama, name).__name__ == name


def test_a_name_that_is_not_public_is_refused_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        _ = offload_llama.Lama


def test_the_version_is_the_same_in_the_package_and_in_its_metadata() -> None:
    metadata = (ROOT.parent / "pyproject.toml").read_text("utf-8")
    assert f'version = "{offload_llama.__version__}"' in metadata


def test_scripts_and_tests_are_short_enough_to_read_too() -> None:
    files = [*(ROOT.parent / "scripts").glob("*.py"), *(ROOT.parent / "tests").glob("*.py")]
    assert [path.name for path in files if len(path.read_text("utf-8").splitlines()) > 400] == []
