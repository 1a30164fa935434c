"""What `plan` answers: which card, what fits, how fast, what else there is; as text, JSON, a plot.

Nothing here imports torch.
"""

from __future__ import annotations
