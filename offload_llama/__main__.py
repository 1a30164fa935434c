"""`python -m offload_llama` is `offload-llama`."""

from __future__ import annotations

from offload_llama.cli import main

main()
