"""Run calls under plain torch.autocast, before mpamp is imported and after its kernels are in; print JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REGIONS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "enabled": False},
)


def calls(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return named calls whose main argument has ``dtype``; the other is float32."""
    x, full = torch.linspace(0.1, 1, 16).reshape(4, 4).to(dtype), torch.linspace(1, 2, 16).reshape(4, 4)
    index, labels = torch.tensor([0, 2]), torch.tensor([0, 1, 2, 3])
    image = x.reshape(1, 1, 4, 4)
    return {
        "mm": lambda: x.mm(full),
        "mm out": lambda: torch.mm(x, x, out=torch.zeros_like(x)),
        "matmul": lambda: x @ full,
        "bmm": lambda: x.reshape(1, 4, 4).bmm(full.reshape(1, 4, 4)),
        "addmm": lambda: torch.addmm(full, x, x),
        "addmm_": lambda: torch.zeros(4, 4).addmm_(x, x),
        "addmv": lambda: torch.addmv(full[0], x, x[0]),
        "linear": lambda: functional.linear(x, full, full[0]),
        "conv2d": lambda: functional.conv2d(image, full.reshape(1, 1, 4, 4)),
        "conv_transpose2d": lambda: functional.conv_transpose2d(image, full.reshape(1, 1, 4, 4)),
        "einsum": lambda: torch.einsum("ij,jk->ik", x, full),
        "attention": lambda: functional.scaled_dot_product_attention(image, image, full.reshape(1, 1, 4, 4)),
        "softmax": lambda: x.softmax(0),
        "softmax to float64": lambda: x.softmax(0, dtype=torch.float64),
        "log_softmax": lambda: x.log_softmax(0),
        "exp": lambda: x.exp(),
        "pow": lambda: x.pow(2),
        "sum": lambda: x.sum(),
        "cumsum": lambda: x.cumsum(0),
        "prod": lambda: x.prod(),
        "norm": lambda: x.norm(),
        "layer_norm": lambda: functional.layer_norm(x, (4,), full[0]),
        "gelu": lambda: functional.gelu(x),
        "cat": lambda: torch.cat([x, full]),
        "stack": lambda: torch.stack([x, full]),
        "index_copy": lambda: full.index_copy(0, index, x[:2]),
        "index_put_": lambda: torch.zeros(4, 4).index_put_((index,), x[:2]),
        "index_put": lambda: torch.zeros(4, 4).index_put((index,), x[:2]),
        "index_add": lambda: torch.zeros(4, 4).index_add(0, index, x[:2]),
        "dot": lambda: x[0].dot(full[0]),
        "vdot": lambda: torch.vdot(x[0], full[0]),
        "bilinear": lambda: functional.bilinear(x, x, full.reshape(1, 4, 4)),
        "addcmul": lambda: torch.addcmul(full, x, x),
        "cross": lambda: torch.linalg.cross(x[:, :3], full[:, :3]),
        "mse_loss": lambda: functional.mse_loss(x, full),
        "cross_entropy": lambda: functional.cross_entropy(x, labels),
        "binary_cross_entropy": lambda: functional.binary_cross_entropy(x, full.clamp(0, 1)),
        "fft": lambda: torch.fft.fft(x),
        "hfft2": lambda: torch.fft.hfft2(x),
        "stft": lambda: torch.stft(x.reshape(16), 4, return_complex=True, window=full[0]),
        "quantile": lambda: x.quantile(0.5),
        "inv": lambda: torch.linalg.inv(x + torch.eye(4)),
        "det": lambda: torch.linalg.det(x),
        "svdvals": lambda: torch.linalg.svdvals(x),
        "matrix_norm": lambda: torch.linalg.matrix_norm(x),
        "cdist": lambda: torch.cdist(x, full),
        "trace": lambda: x.trace(),
        "grid_sample": lambda: functional.grid_sample(image, torch.zeros(1, 2, 2, 2), align_corners=False),
        "interpolate": lambda: functional.interpolate(image, scale_factor=2, mode="bilinear"),
        "max_pool3d": lambda: functional.max_pool3d(x.reshape(1, 1, 1, 4, 4), (1, 2, 2)),
        "gru_cell": lambda: torch.gru_cell(x, x, full.repeat(3, 1), full.repeat(3, 1)),
        "view_as_complex": lambda: torch.view_as_complex(x.reshape(8, 2)),
        "integer mm": lambda: labels.reshape(2, 2).mm(labels.reshape(2, 2)),
    }


def outcome(call: Callable[[], Any]) -> str:
    """Describe a call's result, dtypes and values; or its error."""
    try:
        result = call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    results = result if isinstance(result, tuple) else (result,)
    return "; ".join(f"{r.dtype} {r.detach().to(torch.complex128).sum().item()}" for r in results)


def outcomes() -> dict[str, str]:
    """Return the outcome of every call in every region."""
    found = {}
    for options in REGIONS:
        for dtype in DTYPES:
            for name, call in calls(dtype).items():
                with torch.autocast("cpu", **options):
                    found[f"{name} of {dtype} in {options}"] = outcome(call)
    return found


class Casts(TorchDispatchMode):
    """Counts casts to a lower precision."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def cast_counts() -> dict[str, int]:
    """Return how often six uses of a weight cast it."""
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    cases: dict[str, tuple[bool, bool, int]] = {
        "trainable": (True, True, 1),
        "frozen": (False, True, 1),
        "uncached": (True, False, 1),
        "two regions": (True, True, 2),
    }
    return {name: _casts_of(x, *case) for name, case in cases.items()}


def _casts_of(x: torch.Tensor, requires_grad: bool, cache_enabled: bool, regions: int) -> int:
    weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=requires_grad)
    with Casts() as casts:
        for _ in range(regions):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
                for _ in range(6):
                    functional.linear(x, weight)
    return casts.count


def install_everything() -> int:
    """Open regions with tables that need a kernel at every slot; return how many there are then."""
    import mpamp
    from mpamp.engine.python.kernels import installed

    names = ("default", "native", "uniform")
    tables: Iterator[Any] = (mpamp.OpTable.named(name, "cpu") for name in names)
    opposite = dict.fromkeys(("mm", "matmul", "softmax", "exp", "gelu", "sum", "norm", "index_add", "cat"), "fp32")
    for ops in (None, opposite, {"index_put_": "promote"}, *tables):
        with mpamp.autocast("cpu", ops=ops):
            torch.ones(2, 2).mm(torch.ones(2, 2))
    return len(installed("cpu"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before, casts_before = outcomes(), cast_counts()
    kernels = install_everything()
    report = {"before": before, "casts_before": casts_before, "kernels": kernels}
    print(json.dumps({**report, "after": outcomes(), "casts_after": cast_counts()}))
