"""What holds for all tests."""

from __future__ import annotations

import torch

# Each worker of pytest-xdist would otherwise start as many threads as there are cores, and small ops crawl.
torch.set_num_threads(1)
