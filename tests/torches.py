"""What differs by the version of torch, for the tests that ask for it."""

from __future__ import annotations

import pytest
import torch

GIVES_KERNELS = hasattr(torch.library, "get_kernel")
"""Whether torch gives out the kernels that ours go on top of: from 2.9 on (docs/regions.md says what follows)."""

needs_transforms = pytest.mark.skipif(
    not GIVES_KERNELS, reason="torch before 2.9 gives no hold of what the transforms start with"
)
needs_torchs_kernels = pytest.mark.skipif(
    not GIVES_KERNELS, reason="in torch before 2.9 plain regions go by mpamp's rules in ops that mpamp has a kernel for"
)

traces_availability = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.12"),
    reason="Dynamo before 2.12 doesn't trace what torch.autocast's own __init__ asks for",
)
GROUPS_ON_HOST = GIVES_KERNELS
"""Whether torch's _grouped_mm runs on processors: from 2.9 on."""
HAS_LANCZOS = hasattr(torch.ops.aten, "_upsample_lanczos2d_aa")
"""From 2.12 or 2.13 on."""
MASKED_GRADIENTS = torch.__version__ >= torch.torch_version.TorchVersion("2.12")
"""Whether torch.func.grad takes torch.masked.std in lower precision: before, the gradient has no memory."""
HOLDS_STORAGES = torch.__version__ >= torch.torch_version.TorchVersion("2.10")
"""Whether a storage's Python object, with what hangs on it, is out of the garbage collector's reach while its memory
is used."""
