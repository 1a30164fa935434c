"""The native kernel, built once for all tests of a session."""

from __future__ import annotations

import pytest

from offload_llama.native import NativeAttention, build


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> NativeAttention:
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    # The folder that every test's own fixture names, so that one build serves all.
    folder = tmp_path_factory.getbasetemp() / "measured"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(folder))
        library = build.load()
    return NativeAttention(library)
