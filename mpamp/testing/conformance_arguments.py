"""Arguments for every overload that torch autocasts: by hand where shapes matter, by type elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_internals import FakeTensor, OpOverload

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Maker:
    """Makes the tensors of one call; its floating tensors take the dtypes of a form in turn."""

    device: str
    dtypes: Sequence[torch.dtype]
    requires_grad: bool = False
    made: int = 0

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return a floating tensor of values in (0, 1), positive definite where it is square."""
        dtype = self.dtypes[self.made % len(self.dtypes)]
        self.made += 1
        values = torch.full(shape, 0.1, dtype=dtype, device=self.device)
        if len(shape) >= 2 and shape[-1] == shape[-2]:
            values = values + torch.eye(shape[-1], dtype=dtype, device=self.device) / 2
        return values.requires_grad_(self.requires_grad)

    def ints(self, *values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        try:
            return torch.tensor(values, dtype=dtype, device=self.device)
        except RuntimeError:  # torch has no guard of its own for a device that a plugin brings
            made = torch.zeros(len(values), dtype=dtype, device=self.device)
            if not isinstance(made, FakeTensor):
                raise
            return made

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def pivots(self) -> torch.Tensor:
        """Return the pivots of a matrix of 4 x 4 whose rows stay where they are."""
        return self.ints(1, 2, 3, 4, dtype=torch.int32)

    def steps(self, count: int) -> torch.Tensor:
        """Return a rising floating tensor."""
        return self(count).detach().cumsum(0)

    def signs(self, *shape: int) -> torch.Tensor:
        """Return a tensor of ones, of a dtype that autocast may cast."""
        return torch.ones_like(self(*shape))


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def _scales(t: Maker, *shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, device=t.device)


def _cell(gates: int) -> Callable[[Maker], Call]:
    """Return arguments of a recurrent cell: input, hidden, their weights and biases."""
    return lambda t: call(t(2, 4), t(2, 3), t(3 * gates, 4), t(3 * gates, 3), t(3 * gates), t(3 * gates))


def _rnn(t: Maker) -> Call:
    sizes: dict[str, Any] = {"dtypes": [t(16, 4), t(16, 4), t(16), t(16)]}
    flags: tuple[Any, ...] = (False, [], 2, 4, 1, True, False, False, False)  # mode 2: LSTM
    return call(t(3, 2, 4), *sizes["dtypes"], t(1, 2, 4), t(1, 2, 4), *flags)


def _cudnn_rnn(t: Maker) -> Call:
    weights = [t(16, 4), t(16, 4), t(16), t(16)]
    hidden: tuple[Any, ...] = (t(1, 2, 4), t(1, 2, 4), 2, 4, 0, 1, False, 0.0, False, False, [], None)
    return call(t(3, 2, 4), weights, 4, None, *hidden)


def _attention(t: Maker) -> Call:
    return call(t(1, 2, 8), t(1, 2, 8), t(1, 2, 8), 8, 2, t(24, 8), t(24), t(8, 8), t(8))


def _bag(t: Maker) -> Call:
    return call(t(4, 3), t.ints(0, 1, 2), t.ints(0, 2), False, 0, False, t(3))


def _transformer(t: Maker) -> Call:
    attention = (t(24, 8), t(24), t(8, 8), t(8))
    norms = (t(8), t(8), t(8), t(8))
    return call(t(2, 3, 8), 8, 2, *attention, True, False, 1e-5, *norms, t(16, 8), t(16), t(8, 16), t(8))


def _conv(dims: int) -> Callable[[Maker], Call]:
    return lambda t: call(t(2, 3, *(5,) * dims), t(3, 3, *(2,) * dims), t(3))


def _conv_flags(*flags: bool) -> Callable[[Maker], Call]:
    """Return arguments of a convolution without defaults, by the flags that follow ``groups``."""
    ones = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return lambda t: call(t(2, 3, 5, 5), t(3, 3, 2, 2), t(3), *ones, *flags)


def _images(dims: int, *rest: Any) -> Callable[[Maker], Call]:
    """Return arguments of an op on images of ``dims`` dimensions."""
    return lambda t: call(t(2, 3, *(4,) * dims), *rest)


def _grid(dims: int, *rest: Any) -> Callable[[Maker], Call]:
    return lambda t: call(t(2, 3, *(4,) * dims), t(2, *(4,) * dims, dims), 0, 0, False)


def _observer(t: Maker) -> Call:
    """Return arguments of an observer with its state, which is float32 whatever it observes."""
    state = [t.ints(v, dtype=torch.float32) for v in (1, 1, 0, 1, 1)]
    return call(t(4, 4), *state, t.zeros(1, dtype=torch.int32), 0.01, 0, 255, 0)


def _classes(t: Maker) -> Call:
    return call(t(4, 5), t.zeros(4), t(5))


_TWO = [1, 1]
ARGUMENTS: dict[str, Callable[[Maker], Call]] = {
    "_chunk_cat": lambda t: call([t(4, 4), t(4, 4)], 0, 2),
    "_fake_quantize_learnable_per_channel_affine": lambda t: call(t(4, 4), t(4), t(4), 0, 0, 255),
    "_fake_quantize_learnable_per_tensor_affine": lambda t: call(t(4, 4), t(1), t(1), 0, 255),
    "_grouped_mm": lambda t: call(t(8, 16), t(2, 16, 32), t.ints(4, 8, dtype=torch.int32)),
    "_sparse_addmm": lambda t: call(t(4, 4), t(4, 4).to_sparse_csr(), t(4, 4)),
    "_sparse_mm": lambda t: call(t(4, 4).to_sparse_csr(), t(4, 4)),
    "_sparse_mm.reduce": lambda t: call(t(4, 4).to_sparse_csr(), t(4, 4), "sum"),
    "_sparse_softmax.int": lambda t: call(t(4, 4).to_sparse(), 1),
    "_sparse_log_softmax.int": lambda t: call(t(4, 4).to_sparse(), 1),
    "_upsample_lanczos2d_aa": _images(2, [8, 8], False),
    "_upsample_lanczos2d_aa.vec": _images(2, [8, 8], False, None),
    "_addmm_activation": lambda t: call(t(5), t(3, 4), t(4, 5)),
    "_convolution": _conv_flags(False, False, True, True),
    "_convolution.deprecated": _conv_flags(False, False, True),
    "_cudnn_rnn": _cudnn_rnn,
    "_embedding_bag": _bag,
    "_grid_sampler_2d_cpu_fallback": _grid(2),
    "_native_multi_head_attention": _attention,
    "_scaled_dot_product_flash_attention": lambda t: call(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "_thnn_fused_gru_cell": lambda t: call(t(2, 9), t(2, 9), t(2, 3), t(9), t(9)),
    "_thnn_fused_lstm_cell": lambda t: call(t(2, 12), t(2, 12), t(2, 3), t(12), t(12)),
    "_transformer_encoder_layer_fwd": _transformer,
    "_upsample_bicubic2d_aa": _images(2, [8, 8], False),
    "_upsample_bilinear2d_aa": _images(2, [8, 8], False),
    "_upsample_nearest_exact1d": _images(1, [8]),
    "_upsample_nearest_exact2d": _images(2, [8, 8]),
    "_upsample_nearest_exact3d": _images(3, [8, 8, 8]),
    "adaptive_avg_pool3d": _images(3, [2, 2, 2]),
    "adaptive_max_pool3d": _images(3, [2, 2, 2]),
    "addbmm": lambda t: call(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "addmm": lambda t: call(t(3, 5), t(3, 4), t(4, 5)),
    "addmv": lambda t: call(t(3), t(3, 4), t(4)),
    "addr": lambda t: call(t(3, 4), t(3), t(4)),
    "avg_pool3d": _images(3, [2, 2, 2]),
    "baddbmm": lambda t: call(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "bilinear": lambda t: call(t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    "binary_cross_entropy": lambda t: call(t(4, 4), t(4, 4), t(4, 4)),
    "binary_cross_entropy_with_logits": lambda t: call(t(4, 4), t(4, 4), t(4, 4), t(4)),
    "bmm": lambda t: call(t(2, 3, 4), t(2, 4, 5)),
    "cat": lambda t: call([t(2, 3), t(2, 3), t(2, 3)], 1),
    "cdist": lambda t: call(t(3, 4), t(5, 4)),
    "chain_matmul": lambda t: call([t(2, 3), t(3, 4), t(4, 5)]),
    "conv1d": _conv(1),
    "conv1d.padding": _conv(1),
    "conv2d": _conv(2),
    "conv2d.padding": _conv(2),
    "conv3d": _conv(3),
    "conv3d.padding": _conv(3),
    "conv_tbc": lambda t: call(t(5, 2, 3), t(2, 3, 4), t(4)),
    "conv_transpose1d": _conv(1),
    "conv_transpose2d.input": _conv(2),
    "conv_transpose3d.input": _conv(3),
    "convolution": _conv_flags(),
    "cosine_embedding_loss": lambda t: call(t(4, 4), t(4, 4), t.signs(4)),
    "cross": lambda t: call(t(4, 3), t(4, 3), 1),
    "cross_entropy_loss": _classes,
    "ctc_loss.IntList": lambda t: call(t(5, 1, 4), t.ints(1, 2).reshape(1, 2), [5], [2]),
    "ctc_loss.Tensor": lambda t: call(t(5, 1, 4), t.ints(1, 2).reshape(1, 2), t.ints(5), t.ints(2)),
    "cudnn_convolution": lambda t: call(t(2, 3, 5, 5), t(3, 3, 2, 2), [0, 0], _TWO, _TWO, 1, False, False, False),
    "cudnn_convolution_transpose": lambda t: call(
        t(2, 3, 5, 5), t(3, 3, 2, 2), [0, 0], [0, 0], _TWO, _TWO, 1, False, False, False
    ),
    "dot": lambda t: call(t(4), t(4)),
    "einsum": lambda t: call("ij,jk->ik", [t(2, 3), t(3, 4)]),
    "embedding_bag": _bag,
    "embedding_bag.padding_idx": lambda t: call(*_bag(t)[0], False, None),
    "fake_quantize_per_tensor_affine": lambda t: call(t(4, 4), 0.1, 0, 0, 255),
    "fake_quantize_per_channel_affine": lambda t: call(t(4, 4), t(4), t.zeros(4, dtype=torch.int32), 0, 0, 255),
    "fake_quantize_per_tensor_affine.tensor_qparams": lambda t: call(
        t(4, 4), t(1), t.zeros(1, dtype=torch.int32), 0, 255
    ),
    "fused_moving_avg_obs_fake_quant": _observer,
    "fractional_max_pool2d": lambda t: call(t(2, 3, 5, 5), [2, 2], [3, 3], t(2, 3, 2)),
    "fractional_max_pool3d": lambda t: call(t(2, 3, 5, 5, 5), [2, 2, 2], [3, 3, 3], t(2, 3, 3)),
    "grid_sampler": _grid(2),
    "grid_sampler_2d": _grid(2),
    "grid_sampler_3d": _grid(3),
    "group_norm": lambda t: call(t(2, 4, 3), 2, t(4), t(4)),
    "gru_cell": _cell(3),
    "histogram.bins_tensor": lambda t: call(t(4, 4), t.steps(5)),
    "histogramdd": lambda t: call(t(4, 2), [2, 2]),
    "histogramdd.TensorList_bins": lambda t: call(t(4, 2), [t.steps(3), t.steps(3)]),
    "histogramdd.int_bins": lambda t: call(t(4, 2), 2),
    "hspmm": lambda t: call(t(4, 4).to_sparse(), t(4, 4)),
    "index_add": lambda t: call(t(4, 4), 0, t.ints(0, 2), t(2, 4)),
    "index_copy": lambda t: call(t(4, 4), 0, t.ints(0, 2), t(2, 4)),
    "index_copy_": lambda t: call(t(4, 4), 0, t.ints(0, 2), t(2, 4)),
    "index_fill.int_Scalar": lambda t: call(t(4, 4), 0, t.ints(0, 2), 2),
    "index_reduce": lambda t: call(t(4, 4), 0, t.ints(0, 2), t(2, 4), "amax"),
    "index_put": lambda t: call(t(4, 4), [t.ints(0, 2)], t(2, 4)),
    "istft": lambda t: call(t.zeros(1, 3, 17, dtype=torch.complex64), 4, window=t.signs(4)),
    "layer_norm": lambda t: call(t(2, 4), [4], t(4), t(4)),
    "linalg_cross": lambda t: call(t(4, 3), t(4, 3)),
    "linalg_ldl_solve": lambda t: call(t(4, 4), t.pivots(), t(4, 4)),
    "linalg_lu_solve": lambda t: call(t(4, 4), t.pivots(), t(4, 4)),
    "linalg_solve_triangular": lambda t: call(t(4, 4), t(4, 4), upper=True),
    "linalg_cond.p_str": lambda t: call(t(4, 4), "fro"),
    "linalg_matrix_norm": lambda t: call(t(4, 4), 1),
    "linalg_householder_product": lambda t: call(t(4, 3), t(3)),
    "linalg_matrix_rank.atol_rtol_tensor": lambda t: call(t(4, 4), atol=t(1), rtol=t(1)),
    "linalg_matrix_rank.tol_tensor": lambda t: call(t(4, 4), t(1)),
    "linalg_multi_dot": lambda t: call([t(2, 3), t(3, 4), t(4, 5)]),
    "linalg_tensorsolve": lambda t: call(t(4, 4), t(4)),
    "linalg_tensorinv": lambda t: call(t(4, 4), 1),
    "linear": lambda t: call(t(2, 4), t(3, 4), t(3)),
    "lstm_cell": lambda t: call(t(2, 4), [t(2, 3), t(2, 3)], t(12, 4), t(12, 3), t(12), t(12)),
    "lu_solve": lambda t: call(t(4, 4), t(4, 4), t.pivots()),
    "lu_unpack": lambda t: call(t(4, 4), t.pivots()),
    "margin_ranking_loss": lambda t: call(t(4), t(4), t.signs(4)),
    "masked_fill.Scalar": lambda t: call(t(4, 4), t.zeros(4, 4, dtype=torch.bool), 2),
    "meshgrid": lambda t: call([t(3), t(3)]),
    "meshgrid.indexing": lambda t: call([t(3), t(3)], indexing="ij"),
    "cartesian_prod": lambda t: call([t(3), t(3)]),
    "masked_scatter": lambda t: call(t(4, 4), t.zeros(4, 4, dtype=torch.bool), t(4, 4)),
    "matmul": lambda t: call(t(2, 3, 4), t(4, 5)),
    "max_pool3d": _images(3, [2, 2, 2]),
    "max_unpool2d": lambda t: call(t(1, 1, 1, 1), t.zeros(1, 1, 1, 1), [2, 2]),
    "max_unpool3d": lambda t: call(t(1, 1, 1, 1, 1), t.zeros(1, 1, 1, 1, 1), [2, 2, 2], [2, 2, 2], [0, 0, 0]),
    "mkldnn_rnn_layer": _rnn,
    "multi_margin_loss": lambda t: call(t(4, 5), t.zeros(4), 1, 1, t(5)),
    "multilabel_margin_loss": lambda t: call(t(4, 5), t.zeros(4, 5)),
    "multilabel_margin_loss_forward": lambda t: call(t(4, 5), t.zeros(4, 5), 1),
    "mv": lambda t: call(t(3, 4), t(4)),
    "nanquantile": lambda t: call(t(4, 4), t(2)),
    "native_layer_norm": lambda t: call(t(2, 4), [4], t(4), t(4), 1e-5),
    "nll_loss": _classes,
    "nll_loss_nd": _classes,
    "nll_loss2d": lambda t: call(t(2, 5, 3, 3), t.zeros(2, 3, 3), t(5)),
    "norm.ScalarOpt_dim": lambda t: call(t(4, 4), 2, [0]),
    "nuclear_norm.dim": lambda t: call(t(4, 4), [0, 1]),
    "orgqr": lambda t: call(t(4, 3), t(3)),
    "ormqr": lambda t: call(t(4, 3), t(3), t(4, 2)),
    "poisson_nll_loss": lambda t: call(t(4, 4), t(4, 4), True, False, 1e-8, 1),
    "prelu": lambda t: call(t(2, 4), t(4)),
    "put": lambda t: call(t(4, 4), t.ints(0, 2), t(2)),
    "quantile": lambda t: call(t(4, 4), t(2)),
    "quantize_per_channel": lambda t: call(t(4, 4), _scales(t, 4), t.zeros(4), 0, torch.qint8),
    "quantize_per_tensor": lambda t: call(t(4, 4), 0.5, 0, torch.qint8),
    "quantize_per_tensor.tensor_qparams": lambda t: call(t(4, 4), _scales(t), t.zeros(), torch.qint8),
    "quantize_per_tensor.tensors": lambda t: call([t(4, 4), t(4, 4)], _scales(t, 2), t.zeros(2), torch.qint8),
    "quantize_per_tensor_dynamic": lambda t: call(t(4, 4), torch.qint8, False),
    "reflection_pad1d": _images(1, [1, 1]),
    "reflection_pad2d": _images(2, [1, 1, 1, 1]),
    "replication_pad1d": _images(1, [1, 1]),
    "replication_pad2d": _images(2, [1, 1, 1, 1]),
    "replication_pad3d": _images(3, [1, 1, 1, 1, 1, 1]),
    "rms_norm": lambda t: call(t(2, 4), [4], t(4)),
    "rnn_relu_cell": _cell(1),
    "rnn_tanh_cell": _cell(1),
    "scaled_dot_product_attention": lambda t: call(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "scatter.reduce": lambda t: call(t(4, 4), 0, t.zeros(2, 4), t(2, 4), reduce="add"),
    "scatter.value": lambda t: call(t(4, 4), 0, t.zeros(2, 4), 2),
    "scatter.src": lambda t: call(t(4, 4), 0, t.zeros(2, 4), t(2, 4)),
    "scatter_reduce.two": lambda t: call(t(4, 4), 0, t.zeros(2, 4), t(2, 4), "sum"),
    "searchsorted.Tensor": lambda t: call(t.steps(5), t(4)),
    "scatter_add": lambda t: call(t(4, 4), 0, t.zeros(2, 4), t(2, 4)),
    "smm": lambda t: call(t(4, 4).to_sparse(), t(4, 4)),
    "sparse_sampled_addmm": lambda t: call(t(4, 4).to_sparse_csr(), t(4, 4), t(4, 4)),
    "sspaddmm": lambda t: call(t(4, 4).to_sparse(), t(4, 4).to_sparse(), t(4, 4)),
    "stack": lambda t: call([t(2, 3), t(2, 3), t(2, 3)]),
    "stft": lambda t: call(t(1, 16), 4, window=t(4), return_complex=True),
    "stft.center": lambda t: call(t(1, 16), 4, window=t(4), return_complex=True),
    "sum.dim_IntList": lambda t: call(t(4, 4), [0]),
    "tensordot": lambda t: call(t(3, 4), t(4, 5), [1], [0]),
    "triplet_margin_loss": lambda t: call(t(4, 4), t(4, 4), t(4, 4)),
    "upsample_bicubic2d": _images(2, [8, 8], False),
    "upsample_bilinear2d": _images(2, [8, 8], False),
    "upsample_linear1d": _images(1, [8], False),
    "upsample_nearest1d": _images(1, [8]),
    "upsample_nearest2d": _images(2, [8, 8]),
    "upsample_nearest3d": _images(3, [8, 8, 8]),
    "upsample_trilinear3d": _images(3, [8, 8, 8], False),
    "vdot": lambda t: call(t(4), t(4)),
    "view_as_complex": lambda t: call(t(4, 2)),
}
"""By overload, what its arguments are made of. Ops that aren't here take square matrices and small numbers."""

_BY_TYPE: dict[str, Callable[[Maker], Any]] = {
    "Tensor": lambda t: t(4, 4),
    "List[Tensor]": lambda t: [t(4, 4), t(4, 4)],
    "number": lambda t: 2,
    "int": lambda t: 0,
    "float": lambda t: 0.5,
    "bool": lambda t: False,
    "List[int]": lambda t: [0],
}


def arguments(op: OpOverload, make: Maker) -> Call:
    """Return the arguments of a call of ``op``, with the floating tensors that ``make`` gives."""
    schema = op._schema
    name = f"{schema.name.removeprefix('aten::')}.{schema.overload_name}".rstrip(".")
    if name in ARGUMENTS:
        return ARGUMENTS[name](make)
    needed = [a for a in schema.arguments if not a.has_default_value()]
    return tuple(_BY_TYPE[str(a.type)](make) for a in needed), {}
