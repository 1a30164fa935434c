"""What is here, what it reaches, and what is not as it could be."""

from __future__ import annotations

from offload_llama.doctor.look import examine
from offload_llama.doctor.text import render

__all__ = ["examine", "render"]
