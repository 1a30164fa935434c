"""Builds the native kernel into the package, for a wheel of one platform."""

from __future__ import annotations

from offload_llama.native import build

if __name__ == "__main__":
    build.build(build.prebuilt_path())
    print(build.prebuilt_path())
