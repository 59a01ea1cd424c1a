"""Where a region differs from torch's autocast by design; docs/differences.md has the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mpamp.backends.cpu.probe import KERNELS, fails

EVERY_GPU = ("cuda", "xpu")
ANYWHERE = ("cpu", *EVERY_GPU)
BOTH = (torch.bfloat16, torch.float16)
MIXED_DOUBLE = ("float64, float32", "float32, float64", "float64, lower")
SINGLE = ("float32", "parameters", "lower", "float32, lower", "lower, float32", "other", "lower, other")


def _without_lstm_primitive() -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtype in BOTH if fails(KERNELS["mkldnn_rnn_layer"], dtype))


@dataclass(frozen=True)
class Difference:
    """Calls that a region serves otherwise than torch does."""

    rows: str
    """One op, or a policy: all rows of torch's native table that have it."""
    devices: tuple[str, ...]
    forms: tuple[str, ...]
    """Of the forms in observe.py, those that differ."""
    becomes: Literal["as called", "in float32", "in the region's dtype"]
    """What a region does: what happens with no autocast at all, in the same dtypes, in float32 or in its dtype."""
    torch: str
    mpamp: str
    why: str
    lower: tuple[torch.dtype, ...] = BOTH
    but: tuple[str, ...] = ()
    """Rows of the policy that torch's own kernels serve in a region."""

    def covers(self, op: str, policy: str, device: str, lower: torch.dtype, form: str) -> bool:
        """Tell whether a call of one row in one form is among these."""
        is_row = self.rows in (policy, op.removeprefix("aten::")) and op.removeprefix("aten::") not in self.but
        return is_row and device in self.devices and lower in self.lower and form in self.forms

    def as_markdown(self) -> str:
        op = f"every `{self.rows}` row" if self.rows.startswith(("lower", "promote")) else f"`{self.rows}`"
        op += " but " + ", ".join(f"`{name}`" for name in self.but) if self.but else ""
        return f"| {op} | {', '.join(self.devices)} | {self.torch} | {self.mpamp} | {self.why} |"


DIFFERENCES = [
    Difference(
        "lower_precision_fp",
        ANYWHERE,
        MIXED_DOUBLE,
        "as called",
        "casts the other arguments and leaves the float64 ones: most ops then raise on the mix",
        "a call with any float64 argument runs as it was called",
        "float64 in a call is asked for; half a cast only adds a second dtype to the error",
        but=("scaled_dot_product_attention", "_scaled_dot_product_flash_attention", "linalg_vecdot"),
    ),
    Difference(
        "_cudnn_rnn",
        ("cuda",),
        SINGLE,
        "in the region's dtype",
        "casts to float16, in a bfloat16 region too, and lays the weights out anew at each call",
        "casts to the region's dtype, the weights, which are parts of one buffer, and that as a whole, at each call",
        "bfloat16 was asked for: float16 overflows where it doesn't",
    ),
    Difference(
        "promote",
        ANYWHERE,
        ("other",),
        "as called",
        "raises `Unexpected floating ScalarType` on a 16-bit dtype that isn't the region's",
        "inputs of one dtype run as they are",
        "there is nothing to promote",
    ),
    Difference(
        "promote",
        ANYWHERE,
        ("lower, other",),
        "in float32",
        "raises `Unexpected floating ScalarType` on bfloat16 with float16",
        "two different 16-bit dtypes meet in float32",
        "float32 is the narrowest dtype that holds both",
    ),
    Difference(
        "binary_cross_entropy",
        ("cuda",),
        ("float32", "parameters", "float64", *MIXED_DOUBLE),
        "as called",
        "raises whatever it is called with",
        "raises on lower-precision arguments only; float32 and float64 run",
        "the ban is there for gradients that overflow in lower precision; float32 ones don't",
    ),
    Difference(
        "binary_cross_entropy",
        ("xpu",),
        SINGLE,
        "in float32",
        "raises whatever it is called with",
        "runs in float32",
        "Intel's documented list has it as float32",
    ),
    Difference(
        "binary_cross_entropy",
        ("xpu",),
        ("float64", *MIXED_DOUBLE),
        "as called",
        "raises whatever it is called with",
        "a call with any float64 argument runs as it was called",
        "as for every row that a kernel of mpamp's serves",
    ),
    *(
        Difference(
            name,
            EVERY_GPU,
            ("lower", "other"),
            "in float32",
            "asks the norm for float32 output: it raises where it goes by singular values (nuclear and 2-norm)",
            "casts the matrix to float32 first",
            "singular values have no 16-bit kernels, and no norm of a matrix should raise",
        )
        for name in ("linalg_matrix_norm", "linalg_matrix_norm.str_ord")
    ),
    Difference(
        "mkldnn_rnn_layer",
        ("cpu",),
        SINGLE,
        "in float32",
        "raises `could not create a primitive descriptor` (`nn.LSTM`) where the processor lacks units for the dtype",
        "runs in float32 there",
        "a model with an LSTM should run on every processor",
        lower=_without_lstm_primitive(),
    ),
]
