"""FFT, linalg, losses, stft and quantile take lower-precision activations on every device and run in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import fft, linalg
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import mpamp
from tests.parity.arguments import Call, Maker, call
from tests.parity.observe import FAKE, PLACES, Recorder, device_of, is_here, tensors_at

LOWER = [torch.bfloat16, torch.float16]
IN_FLOAT32 = {torch.float32, torch.complex64}
Case = Callable[[Maker], Call]
"""The function and its arguments."""

NOT_FFTS = ("fftfreq", "rfftfreq", "fftshift", "ifftshift")
_FFT = [name for name in dir(fft) if "fft" in name and name not in NOT_FFTS and callable(getattr(fft, name))]
FFT: dict[str, Case] = {name: lambda t, name=name: call(getattr(fft, name), t(4, 4)) for name in _FFT}


def _ones_like_lu(t: Maker) -> torch.Tensor:
    return t.ints(1, 2, 3, 4, dtype=torch.int32)


LINALG: dict[str, Case] = {
    "cholesky": lambda t: call(linalg.cholesky, t(4, 4)),
    "cholesky_ex": lambda t: call(linalg.cholesky_ex, t(4, 4)),
    "cond": lambda t: call(linalg.cond, t(4, 4)),
    "det": lambda t: call(linalg.det, t(4, 4)),
    "eig": lambda t: call(linalg.eig, t(4, 4)),
    "eigh": lambda t: call(linalg.eigh, t(4, 4)),
    "eigvals": lambda t: call(linalg.eigvals, t(4, 4)),
    "eigvalsh": lambda t: call(linalg.eigvalsh, t(4, 4)),
    "householder_product": lambda t: call(linalg.householder_product, t(4, 3), t(3)),
    "inv": lambda t: call(linalg.inv, t(4, 4)),
    "inv_ex": lambda t: call(linalg.inv_ex, t(4, 4)),
    "ldl_factor": lambda t: call(linalg.ldl_factor, t(4, 4)),
    "ldl_factor_ex": lambda t: call(linalg.ldl_factor_ex, t(4, 4)),
    "ldl_solve": lambda t: call(linalg.ldl_solve, t(4, 4), _ones_like_lu(t), t(4, 4)),
    "lstsq": lambda t: call(linalg.lstsq, t(4, 4), t(4, 4)),
    "lu": lambda t: call(linalg.lu, t(4, 4)),
    "lu_factor": lambda t: call(linalg.lu_factor, t(4, 4)),
    "lu_factor_ex": lambda t: call(linalg.lu_factor_ex, t(4, 4)),
    "lu_solve": lambda t: call(linalg.lu_solve, t(4, 4), _ones_like_lu(t), t(4, 4)),
    "matrix_exp": lambda t: call(linalg.matrix_exp, t(4, 4)),
    "matrix_norm, nuclear": lambda t: call(linalg.matrix_norm, t(4, 4), "nuc"),
    "matrix_norm, 2": lambda t: call(linalg.matrix_norm, t(4, 4), 2),
    "matrix_power, negative": lambda t: call(linalg.matrix_power, t(4, 4), -1),
    "matrix_rank": lambda t: call(linalg.matrix_rank, t(4, 4)),
    "norm, nuclear": lambda t: call(linalg.norm, t(4, 4), "nuc"),
    "pinv": lambda t: call(linalg.pinv, t(4, 4)),
    "qr": lambda t: call(linalg.qr, t(4, 4)),
    "slogdet": lambda t: call(linalg.slogdet, t(4, 4)),
    "solve": lambda t: call(linalg.solve, t(4, 4), t(4, 4)),
    "solve_ex": lambda t: call(linalg.solve_ex, t(4, 4), t(4, 4)),
    "solve_triangular": lambda t: call(linalg.solve_triangular, t(4, 4), t(4, 4), upper=True),
    "svd": lambda t: call(linalg.svd, t(4, 4)),
    "svdvals": lambda t: call(linalg.svdvals, t(4, 4)),
    "tensorinv": lambda t: call(linalg.tensorinv, t(4, 4), 1),
    "tensorsolve": lambda t: call(linalg.tensorsolve, t(4, 4), t(4)),
    "vander": lambda t: call(linalg.vander, t(4)),
    "torch.cholesky_inverse": lambda t: call(torch.cholesky_inverse, t(4, 4)),
    "torch.cholesky_solve": lambda t: call(torch.cholesky_solve, t(4, 4), t(4, 4)),
    "torch.geqrf": lambda t: call(torch.geqrf, t(4, 4)),
    "torch.logdet": lambda t: call(torch.logdet, t(4, 4)),
    "torch.nuclear_norm": lambda t: call(torch.nuclear_norm, t(4, 4)),
    "torch.ormqr": lambda t: call(torch.ormqr, t(4, 3), t(3), t(4, 2)),
    "torch.pinverse": lambda t: call(torch.pinverse, t(4, 4)),
}
if hasattr(linalg, "polar"):  # from torch 2.14 on
    LINALG["polar"] = lambda t: call(linalg.polar, t(4, 4))
    LINALG["matrix_sqrth"] = lambda t: call(linalg.matrix_sqrth, t(4, 4))
OTHER_LINALG = {
    "cross": "promotes",
    "diagonal": "is a view",
    "matmul": "runs in lower precision",
    "matrix_power": "multiplies in lower precision, but for negative powers",
    "multi_dot": "runs in lower precision where a GPU does",
    "matrix_norm": "as vector_norm, but for the norms that are made of singular values",
    "norm": "as matrix_norm and vector_norm",
    "vecdot": "runs in lower precision",
    "vector_norm": "reads lower precision, computes and gives float32",
}
LOSSES: dict[str, Case] = {
    "binary_cross_entropy_with_logits": lambda t: call(F.binary_cross_entropy_with_logits, t(4, 4), t(4, 4), t(4, 4)),
    "cosine_embedding_loss": lambda t: call(F.cosine_embedding_loss, t(4, 4), t(4, 4), t.signs(4)),
    "cross_entropy": lambda t: call(F.cross_entropy, t(4, 5), t.zeros(4), t(5)),
    "cross_entropy, probabilities": lambda t: call(F.cross_entropy, t(4, 5), t(4, 5), label_smoothing=0.1),
    "ctc_loss": lambda t: call(F.ctc_loss, t(5, 1, 4), t.ints(1, 2).reshape(1, 2), (5,), (2,)),
    "hinge_embedding_loss": lambda t: call(F.hinge_embedding_loss, t(4), t.signs(4)),
    "huber_loss": lambda t: call(F.huber_loss, t(4), t(4)),
    "kl_div": lambda t: call(F.kl_div, t(4, 4), t(4, 4), reduction="batchmean"),
    "l1_loss": lambda t: call(F.l1_loss, t(4), t(4)),
    "margin_ranking_loss": lambda t: call(F.margin_ranking_loss, t(4), t(4), t.signs(4)),
    "mse_loss": lambda t: call(F.mse_loss, t(4), t(4)),
    "multi_margin_loss": lambda t: call(F.multi_margin_loss, t(4, 5), t.zeros(4)),
    "multilabel_margin_loss": lambda t: call(F.multilabel_margin_loss, t(4, 5), t.zeros(4, 5)),
    "nll_loss": lambda t: call(F.nll_loss, t(4, 5), t.zeros(4), t(5)),
    "nll_loss, images": lambda t: call(F.nll_loss, t(2, 5, 3, 3), t.zeros(2, 3, 3), t(5)),
    "poisson_nll_loss": lambda t: call(F.poisson_nll_loss, t(4), t(4)),
    "smooth_l1_loss": lambda t: call(F.smooth_l1_loss, t(4), t(4)),
    "soft_margin_loss": lambda t: call(F.soft_margin_loss, t(4), t.signs(4)),
    "triplet_margin_loss": lambda t: call(F.triplet_margin_loss, t(4, 4), t(4, 4), t(4, 4)),
}
SPECTRAL: dict[str, Case] = {
    "stft": lambda t: call(torch.stft, t(1, 16), 4, window=t(4), return_complex=True),
    "stft, no window": lambda t: call(torch.stft, t(1, 16), 4, center=False, return_complex=True),
    "istft": lambda t: call(torch.istft, torch.complex(t(1, 3, 17).float(), t(1, 3, 17).float()), 4, window=t.signs(4)),
    "polar": lambda t: call(torch.polar, t(4), t(4)),
    "complex": lambda t: call(torch.complex, t(4), t(4)),
    "quantile": lambda t: call(torch.quantile, t(4, 4), t(2), dim=0),
    "quantile, number": lambda t: call(torch.quantile, t(4, 4), 0.5),
    "nanquantile": lambda t: call(torch.nanquantile, t(4, 4), t(2), dim=0),
    "nanquantile, number": lambda t: call(torch.nanquantile, t(4, 4), 0.5),
    "median of quantiles, interpolated": lambda t: call(torch.quantile, t(9), 0.3, interpolation="midpoint"),
}
CASES = {
    f"{family}: {name}": case
    for family, cases in {"fft": FFT, "linalg": LINALG, "losses": LOSSES, "spectral": SPECTRAL}.items()
    for name, case in cases.items()
}
MOVES = {"aten.view.default", "aten.reflection_pad1d.default"}
"""What torch.stft does before it calls the op: no arithmetic."""
CANNOT_FAKE = {
    "linalg: lstsq": "its output's shape depends on data",
    "linalg: torch.geqrf": "has no fake implementation",
    "losses: ctc_loss": "its output's shape depends on data",
    "spectral: istft": "looks at its window's values",
}


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("place", [place for place in PLACES if is_here(place)])
@pytest.mark.parametrize("name", CASES)
def test_runs_in_float32(name: str, place: str, lower: torch.dtype) -> None:
    if place.startswith(FAKE) and name in CANNOT_FAKE:
        pytest.skip(CANNOT_FAKE[name])
    with tensors_at(place):
        (function, *args), kwargs = CASES[name](Maker(device_of(place), [lower]))
        with mpamp.autocast(device_of(place), lower), Recorder() as recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated functions, and windows that aren't given
            outputs = tree_leaves(function(*args, **kwargs))
    floating = {t.dtype for t in outputs if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())}
    assert floating <= IN_FLOAT32
    assert recorder.ops
    assert not [op for op in recorder.ops if "float16" in op and op.partition("(")[0] not in MOVES]


@pytest.mark.accelerator
def test_a_card_was_used() -> None:
    if not is_here("cuda"):
        pytest.skip("no CUDA card: fake tensors only")


def test_every_fft_is_here() -> None:
    assert len(FFT) == 18


def test_every_function_of_linalg_is_accounted_for() -> None:
    public = {name for name in dir(linalg) if not name.startswith("_") and callable(getattr(linalg, name))}
    here = {name.partition(",")[0] for name in LINALG if not name.startswith("torch.")}
    assert {name for name in public if name[0].islower()} - {"common_notes"} == here | set(OTHER_LINALG)
