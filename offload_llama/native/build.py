"""The native kernel's shared object: found in the package, or built on first use and kept.

A compiler is no requirement: without one, or with a build that fails, `load` says why and the
caller takes torch's kernel. `python -m offload_llama.native` puts the shared object into the
package itself, for those who make wheels for one platform.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from offload_llama.errors import DeviceError
from offload_llama.profiles import cache_folder

VARIABLE = "OFFLOAD_LLAMA_NATIVE"
"""0 turns the native kernel off; the name of an instruction set chooses that one."""
BUILD_TIMEOUT_S = 300.0
_FOLDER = Path(__file__).parent
_NAME = "host_attention"
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


class BuildError(DeviceError):
    """The kernel cannot be built or loaded here; the message says why in a few words."""


def source_key() -> str:
    """Return a digest of the kernel's sources."""
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.cpp")) + sorted(_FOLDER.glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def prebuilt_path() -> Path:
    """Return where a wheel for one platform has the shared object."""
    return _FOLDER / f"{_NAME}{_SUFFIX}"


def built_path() -> Path:
    """Return where this computer keeps the shared object of these sources."""
    name = f"{_NAME}-{platform.machine().lower()}-{source_key()}{_SUFFIX}"
    return cache_folder() / "native" / name


def compiler() -> list[str] | None:
    """Return the command of a C++ compiler, None where there is none.

    `CXX` counts before what is on the path.
    """
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen, posix=os.name != "nt")
        return command if command and shutil.which(command[0]) else None
    for name in ("g++", "clang++", "cl"):
        if shutil.which(name):
            return [name]
    return None


def build(path: Path, timeout_s: float = BUILD_TIMEOUT_S) -> None:
    """Compile the kernel into `path`, which another process sees whole or not at all.

    Raises:
        BuildError: there is no compiler, it fails, or the folder cannot be written.
    """
    command = compiler()
    if command is None:
        chosen = os.environ.get("CXX")
        raise BuildError(
            f"CXX names no program ({chosen})"
            if chosen
            else "no C++ compiler was found (CXX, g++, clang++ or cl)"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
            made = Path(folder) / path.name
            _compile(command, made, timeout_s)
            made.replace(path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror or error})") from error


def _compile(command: list[str], made: Path, timeout_s: float) -> None:
    why = ""
    for flags in _flag_sets(command, made):
        try:
            done = subprocess.run(
                [*command, *flags],
                cwd=made.parent,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{command[0]} took longer than {timeout_s:g} s") from None
        except OSError as error:
            raise BuildError(f"{command[0]} cannot run ({error.strerror or error})") from error
        if done.returncode == 0 and made.is_file():
            return
        why = _first_error(done.stderr + done.stdout) or f"exit code {done.returncode}"
    raise BuildError(f"{command[0]} failed: {why}")


def _flag_sets(command: list[str], made: Path) -> Iterator[list[str]]:
    """Yield the arguments to try, best first."""
    source, define = str(_FOLDER / f"{_NAME}.cpp"), f'HOST_ATTENTION_SOURCE="{source_key()}"'
    if Path(command[0]).stem.lower() in ("cl", "clang-cl"):
        yield ["/nologo", "/O2", "/std:c++17", "/EHsc", "/LD", f"/D{define}", source, f"/Fe:{made}"]
        return
    # -w: the compiler's own headers warn about the vectors they leave undefined on purpose.
    flags = ["-O3", "-std=c++17", "-shared", "-fvisibility=hidden", "-w", f"-D{define}"]
    if sys.platform != "win32":
        flags += ["-fPIC", "-pthread"]
    end = [source, "-o", str(made)]
    if sys.platform == "linux":
        # With the compiler's C++ library inside, an older one that is already loaded is no matter.
        yield [*flags, "-static-libstdc++", "-static-libgcc", *end]
    yield [*flags, *end]


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[0][:200]


def is_ready() -> bool:
    """Return whether `load` finds a shared object, so that nothing would be compiled."""
    return prebuilt_path().is_file() or built_path().is_file()


def load() -> ctypes.CDLL:
    """Return the loaded kernel, built first where that was never done.

    Raises:
        BuildError: it is turned off, or cannot be built or loaded. What failed once in a process
            is not tried again with the same compiler.
    """
    if os.environ.get(VARIABLE) == "0":
        raise BuildError(f"{VARIABLE} is 0")
    if sys.maxsize < 2**32:
        raise BuildError("this Python is a 32-bit program")
    found = _load(prebuilt_path(), built_path(), source_key(), os.environ.get("CXX"))
    if isinstance(found, BuildError):
        raise found
    return found


@functools.cache
def _load(prebuilt: Path, built: Path, key: str, chosen: str | None) -> ctypes.CDLL | BuildError:
    """Load the first of the two that can be used; build the second where neither can.

    `chosen`, the compiler, is here only because another one deserves another try.
    """
    for path in (prebuilt, built):
        # One that is damaged, of other sources or of another system is passed over.
        if path.is_file():
            with contextlib.suppress(BuildError):
                return _open(path, key)
    try:
        build(built)
        return _open(built, key)
    except BuildError as error:
        return error


def _open(path: Path, key: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.host_attention_source.restype = ctypes.c_char_p
        source = library.host_attention_source()
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded ({error})") from error
    if source != key.encode():
        raise BuildError(f"{path} was built from other sources")
    return library
