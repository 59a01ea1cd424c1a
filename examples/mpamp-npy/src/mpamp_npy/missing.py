"""What torch must have for a device in pure Python."""

from __future__ import annotations

import torch
from torch.utils import backend_registration

__all__ = ["missing_facility"]


def missing_facility() -> str:
    """Return what this torch lacks for a device in pure Python, or an empty string; 2.8 lacks both."""
    needed = {
        "torch.utils.backend_registration._setup_privateuseone_for_python_backend": hasattr(
            backend_registration, "_setup_privateuseone_for_python_backend"
        ),
        "torch._C._acc.create_empty_tensor": hasattr(getattr(torch._C, "_acc", None), "create_empty_tensor"),
    }
    lacking = [name for name, is_there in needed.items() if not is_there]
    return f"torch {torch.__version__} has no {' and no '.join(lacking)}" if lacking else ""
