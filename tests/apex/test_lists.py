"""What O1 and O4 cast: apex's lists, function by function, and the rules around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import mpamp
from mpamp.apex import amp
from mpamp.functions import registration
from mpamp.testing import WeightCastCounter
from tests.apex.training import net, start

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
DTYPE = {"O1": torch.float16, "O4": torch.bfloat16}


@pytest.fixture(params=["O1", "O4"])
def low(request):
    amp.initialize(nn.Linear(1, 1), opt_level=request.param, verbosity=0)
    return DTYPE[request.param]


def t(*shape, dtype=FP32):
    return (torch.arange(1, 1 + torch.Size(shape).numel(), dtype=FP32).reshape(shape) / 16).to(dtype)


def to(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(to(v, dtype) for v in value) if isinstance(value, list | tuple) else value


IDS, SQUARE, VEC = torch.tensor([0, 1]), t(2, 2), t(2)
HALF = {
    "conv1d": (F.conv1d, t(1, 1, 4), t(1, 1, 2), t(1)),
    "conv2d": (F.conv2d, t(1, 1, 4, 4), t(1, 1, 2, 2)),
    "conv3d": (F.conv3d, t(1, 1, 2, 2, 2), t(1, 1, 2, 2, 2)),
    "conv2d same": (lambda x, w: F.conv2d(x, w, padding="same"), t(1, 1, 4, 4), t(1, 1, 3, 3)),
    "conv_transpose1d": (F.conv_transpose1d, t(1, 1, 4), t(1, 1, 2)),
    "conv_transpose2d": (F.conv_transpose2d, t(1, 1, 4, 4), t(1, 1, 2, 2)),
    "conv_transpose3d": (F.conv_transpose3d, t(1, 1, 2, 2, 2), t(1, 1, 2, 2, 2)),
    "conv_tbc": (torch.conv_tbc, t(4, 1, 2), t(2, 2, 2), t(2)),
    "linear": (F.linear, SQUARE, SQUARE, VEC),
    "prelu": (F.prelu, SQUARE, t(1)),
    "addmm": (torch.addmm, SQUARE, SQUARE, SQUARE),
    "addmv": (torch.addmv, VEC, SQUARE, VEC),
    "addr": (torch.addr, SQUARE, VEC, VEC),
    "matmul": (torch.matmul, SQUARE, SQUARE),
    "@": (lambda a, b: a @ b, SQUARE, SQUARE),
    "mm": (torch.Tensor.mm, SQUARE, SQUARE),
    "mv": (torch.mv, SQUARE, VEC),
    "addbmm": (torch.addbmm, SQUARE, t(1, 2, 2), t(1, 2, 2)),
    "baddbmm": (torch.baddbmm, t(1, 2, 2), t(1, 2, 2), t(1, 2, 2)),
    "bmm": (torch.bmm, t(1, 2, 2), t(1, 2, 2)),
    "einsum": (lambda a, b: torch.einsum("ij,jk", a, b), SQUARE, SQUARE),
    "attention": (F.scaled_dot_product_attention, t(1, 1, 2, 2), t(1, 1, 2, 2), t(1, 1, 2, 2)),
}
TARGET = torch.ones(2, 2)
FLOAT = {
    "interpolate nearest": (lambda x: F.interpolate(x, scale_factor=2), t(1, 1, 2, 2)),
    "interpolate area": (lambda x: F.interpolate(x, size=1, mode="area"), t(1, 1, 2, 2)),
    "interpolate bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), t(1, 1, 2, 2)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), t(1, 1, 2, 2), t(1, 2, 2, 2)),
    "softplus": (F.softplus, VEC),
    "softmin": (lambda x: F.softmin(x, 0), VEC),
    "log_softmax": (lambda x: F.log_softmax(x, 0), VEC),
    "softmax": (lambda x: F.softmax(x, 0), VEC),
    "gelu": (F.gelu, VEC),
    "layer_norm": (lambda x: F.layer_norm(x, (2,)), SQUARE),
    "group_norm": (lambda x: F.group_norm(x, 1), t(1, 2, 2)),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), t(1, 2, 2)),
    "normalize": (F.normalize, SQUARE),
    "cosine_similarity": (F.cosine_similarity, SQUARE, SQUARE),
    "poisson_nll_loss": (F.poisson_nll_loss, VEC, VEC),
    "cosine_embedding_loss": (F.cosine_embedding_loss, SQUARE, SQUARE, torch.ones(2, dtype=torch.int64)),
    "cross_entropy": (F.cross_entropy, SQUARE, IDS),
    "hinge_embedding_loss": (F.hinge_embedding_loss, VEC, torch.tensor([1, -1])),
    "kl_div": (lambda a, b: F.kl_div(a, b, reduction="sum"), VEC, VEC),
    "l1_loss": (F.l1_loss, VEC, VEC),
    "mse_loss": (F.mse_loss, VEC, VEC),
    "margin_ranking_loss": (F.margin_ranking_loss, VEC, VEC, torch.tensor([1, -1])),
    "multilabel_margin_loss": (F.multilabel_margin_loss, SQUARE, torch.zeros(2, 2, dtype=torch.int64)),
    "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, SQUARE, TARGET),
    "multi_margin_loss": (F.multi_margin_loss, SQUARE, IDS),
    "nll_loss": (F.nll_loss, SQUARE, IDS),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, SQUARE, TARGET),
    "smooth_l1_loss": (F.smooth_l1_loss, VEC, VEC),
    "soft_margin_loss": (F.soft_margin_loss, VEC, VEC),
    "triplet_margin_loss": (F.triplet_margin_loss, SQUARE, SQUARE + 1, SQUARE + 2),
    "ctc_loss": (lambda x: F.ctc_loss(x, torch.ones(1, 1, dtype=torch.int64), [2], [1]), t(2, 1, 2)),
    **{
        name: (getattr(torch, name), VEC / 4)
        for name in [
            "acos",
            "asin",
            "cosh",
            "erfinv",
            "exp",
            "expm1",
            "log",
            "log10",
            "log2",
            "reciprocal",
            "rsqrt",
            "sinh",
            "tan",
        ]
    },
    "cosh method": (torch.Tensor.cosh, VEC),
    "pow": (lambda x: torch.pow(x, 2), VEC),
    "**": (lambda x: x**2, VEC),
    "2 **": (lambda x: 2**x, VEC),
    "pow of tensors": (torch.pow, VEC, VEC),
    "cumprod": (lambda x: torch.cumprod(x, 0), VEC),
    "cumsum": (lambda x: x.cumsum(0), VEC),
    "dist": (torch.dist, VEC, VEC),
    "norm": (torch.norm, VEC),
    "norm of a dimension": (lambda x: x.norm(2, 1), SQUARE),
    "norm fro": (lambda x: torch.norm(x, "fro"), SQUARE),
    "norm nuc": (lambda x: torch.norm(x, "nuc"), SQUARE),
    "prod": (torch.prod, VEC),
    "std": (torch.std, VEC),
    "std of a dimension": (lambda x: x.std(0), SQUARE),
    "sum": (torch.sum, VEC),
    "sum of a dimension": (lambda x: x.sum(0), SQUARE),
    "var": (torch.var, VEC),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), SQUARE),
    "cpu": (lambda x: x.cpu(), VEC),
}
PROMOTE = {
    "addcdiv": (torch.addcdiv, VEC, VEC, VEC),
    "addcmul": (torch.addcmul, VEC, VEC, VEC),
    "atan2": (torch.atan2, VEC, VEC),
    "cross": (lambda a, b: torch.cross(a, b, dim=0), t(3), t(3)),
    "bilinear": (F.bilinear, t(1, 2), t(1, 2), t(1, 2, 2)),
    "dot": (torch.dot, VEC, VEC),
    "add": (torch.add, VEC, VEC),
    "div": (torch.div, VEC, VEC),
    "mul": (torch.mul, VEC, VEC),
    "+": (lambda a, b: a + b, VEC, VEC),
    "-": (lambda a, b: a - b, VEC, VEC),
    "*": (lambda a, b: a * b, VEC, VEC),
    "/": (lambda a, b: a / b, VEC, VEC),
    "cat": (lambda a, b: torch.cat([a, b]), VEC, VEC),
    "cat by keyword": (lambda a, b: torch.cat(tensors=[a, b]), VEC, VEC),
    "stack": (lambda a, b: torch.stack([a, b]), VEC, VEC),
}


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("given", ["float32", "low", "mixed"])
def test_half_functions(low, name, given):
    function, *args = HALF[name]
    first = args[0] if given == "float32" else to(args[0], low)
    rest = args[1:] if given != "low" else to(args[1:], low)
    assert function(first, *rest).dtype is low


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("given", ["float32", "low"])
def test_float_functions(low, name, given):
    function, *args = FLOAT[name]
    assert function(*(args if given == "float32" else to(args, low))).dtype is FP32


@pytest.mark.parametrize("name", PROMOTE)
def test_promote_functions(low, name):
    function, *args = PROMOTE[name]
    assert function(*args).dtype is FP32
    assert function(*to(args, low)).dtype is low
    assert function(to(args[0], low), *args[1:]).dtype is FP32
    assert function(args[0], *to(args[1:], low)).dtype is FP32


@pytest.mark.parametrize("name", ["eq", "equal", "ge", "gt", "le", "lt", "ne"])
def test_comparisons_promote(low, name):
    value = torch.tensor([1 + 2.0**-20])
    found = getattr(torch, name)(value, value.to(low))
    expected = getattr(torch, name)(value, value.to(low).float())
    assert bool(found) is bool(expected)


def test_zero_dim_tensors_promote_and_numbers_do_not(low):
    x = VEC.to(low)
    assert (x * torch.tensor(2.0)).dtype is FP32
    assert (torch.tensor(2.0) + x).dtype is FP32
    for found in (x * 2.0, 2.0 * x, x + 1, 1 - x, x / 3, torch.mul(x, 2.0), torch.add(x, 1, alpha=2)):
        assert found.dtype is low


@pytest.mark.parametrize("name", [*HALF, *FLOAT, *PROMOTE])
def test_float64_is_left_alone(low, name):
    function, *args = {**HALF, **FLOAT, **PROMOTE}[name]
    assert function(*to(args, FP64)).dtype is FP64


def test_float64_meets_float32_without_an_error(low):
    assert (VEC.double() + VEC).dtype is FP64
    assert torch.cat([VEC.double(), VEC.to(low)]).dtype is FP64


@pytest.mark.parametrize("value", [IDS, IDS.bool(), torch.ones(2, dtype=torch.complex64)])
def test_other_kinds_are_left_alone(low, value):
    assert (value + value).dtype is value.dtype
    assert torch.cat([value, value]).dtype is value.dtype


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, torch.sigmoid, torch.mean, F.dropout, F.silu])
def test_unlisted_functions_run_as_called(low, function):
    assert function(VEC).dtype is FP32
    assert function(VEC.to(low)).dtype is low


def test_batch_norm_runs_half_with_float32_weights(low):
    norm = nn.BatchNorm1d(2)
    assert norm(t(4, 2).to(low)).dtype is low
    assert norm.running_mean.dtype is FP32


# -- In place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add_", "mul_", "div_", "sub_", "atan2_", "addcmul_", "addcdiv_"])
def test_in_place_takes_the_dtype_of_what_is_written(low, name):
    for mine, other in ((low, FP32), (FP32, low), (low, low)):
        x = VEC.to(mine, copy=True)
        y = VEC.to(other, copy=True)
        args = (y, y) if name.startswith("addc") else (y,)
        assert getattr(x, name)(*args) is x
        assert x.dtype is mine


@pytest.mark.parametrize("name", ["addmm_", "addbmm_", "baddbmm_", "addmv_", "addr_"])
def test_in_place_products_take_the_dtype_of_what_is_written(low, name):
    _, first, *rest = HALF[name[:-1]]
    for mine, other in ((low, FP32), (FP32, low)):
        x = first.to(mine, copy=True)
        assert getattr(x, name)(*to(rest, other)).dtype is mine


def test_augmented_assignment_writes_in_place(low):
    """apex rebound the name to a new float32 tensor, so that other references kept the old values."""
    x = VEC.to(low)
    alias = x
    x += VEC
    assert x is alias
    assert x.dtype is low
    assert torch.equal(x, (VEC * 2).to(low))


@pytest.mark.parametrize(
    "name",
    [
        "acos_",
        "asin_",
        "cosh_",
        "erfinv_",
        "exp_",
        "expm1_",
        "log_",
        "log10_",
        "log2_",
        "reciprocal_",
        "rsqrt_",
        "tan_",
    ],
)
def test_in_place_float_functions_refuse_lower_precision(low, name):
    for function in (getattr(torch.Tensor, name), getattr(torch, name, getattr(torch.Tensor, name))):
        x = (VEC / 4).to(low)
        with pytest.raises(NotImplementedError, match="unsafe"):
            function(x)
        assert torch.equal(x, (VEC / 4).to(low))
        assert function((VEC / 4).clone()).dtype is FP32


def test_in_place_float_functions_run_where_casts_are_off(low):
    with amp.disable_casts():
        assert VEC.to(low).exp_().dtype is low


def test_float32_in_place_takes_a_half_exponent(low):
    assert VEC.clone().pow_(VEC.to(low)).dtype is FP32
    with pytest.raises(NotImplementedError):
        VEC.to(low).pow_(2)


# -- Banned ------------------------------------------------------------------------------------------


def test_binary_cross_entropy_refuses_lower_precision_only(low):
    assert F.binary_cross_entropy(VEC, VEC).dtype is FP32
    for args in ((VEC.to(low), VEC), (VEC, VEC.to(low))):
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(*args)
    with pytest.raises(mpamp.BannedOpError):
        nn.BCELoss()(VEC.to(low), VEC)


@pytest.mark.parametrize("how", ["initialize", "init", "register"])
def test_binary_cross_entropy_may_be_allowed(how):
    if how == "initialize":
        amp.initialize(nn.Linear(1, 1), opt_level="O1", allow_banned=True, verbosity=0)
    elif how == "init":
        amp.init(allow_banned=True, devices=["cpu"])
    else:
        start("O1")
        amp.register_float_function(F, "binary_cross_entropy")
    try:
        assert F.binary_cross_entropy(VEC.half(), VEC).dtype is FP32
    finally:
        if how == "register":
            mpamp.functions.registration.unregister_float_function(F, "binary_cross_entropy")


# -- RNNs --------------------------------------------------------------------------------------------

LAYERS = {"rnn": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k), "gru": nn.GRU, "lstm": nn.LSTM}
CELLS = {
    "rnn": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}


def first(value):
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("given", ["float32", "low"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_rnn_layers(low, kind, given, options):
    layer = LAYERS[kind](3, 2, **options)
    x = t(4, 2, 3).to(FP32 if given == "float32" else low).requires_grad_()
    out, hidden = layer(x)
    assert (out.dtype, first(hidden).dtype) == (low, low)
    out.float().sum().backward()
    assert x.grad.dtype is x.dtype
    assert {p.grad.dtype for p in layer.parameters()} == {FP32}
    out, hidden = layer(x, hidden)
    assert out.dtype is low


@pytest.mark.parametrize("kind", LAYERS)
def test_rnn_layers_of_packed_sequences(low, kind):
    out, hidden = LAYERS[kind](3, 2)(pack_padded_sequence(t(4, 2, 3), [4, 2]))
    assert isinstance(out, PackedSequence)
    assert (out.data.dtype, first(hidden).dtype) == (low, low)


@pytest.mark.parametrize("kind", LAYERS)
def test_rnn_layers_of_float64_are_left_alone(low, kind):
    assert LAYERS[kind](3, 2).double()(t(4, 2, 3, dtype=FP64))[0].dtype is FP64


@pytest.mark.parametrize("kind", LAYERS)
def test_rnn_layers_compute_what_float32_does(low, kind):
    torch.manual_seed(0)
    layer = LAYERS[kind](3, 2)
    out, _ = layer(t(4, 2, 3))
    amp.shutdown()
    expected, _ = layer(t(4, 2, 3))
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_in_a_loop_casts_each_weight_once_an_iteration(kind):
    cell = CELLS[kind](3, 2)
    _, optimizer = start("O1", model=cell, loss_scale=8.0)
    counts = []
    for _ in range(3):
        with WeightCastCounter(cell) as casts:
            hidden = None
            for _ in range(100):
                hidden = cell(t(1, 3), hidden)
            with amp.scale_loss(first(hidden).float().sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        counts.append(casts.count)
    assert counts == [4, 4, 4]


@pytest.mark.parametrize("kind", CELLS)
def test_cells_give_gradients_in_each_ones_dtype(low, kind):
    cell = CELLS[kind](3, 2)
    x = t(1, 3).requires_grad_()
    out = cell(x)
    assert first(out).dtype is low
    first(out).float().sum().backward()
    assert {x.grad.dtype, *(p.grad.dtype for p in cell.parameters())} == {FP32}


# -- Functions of the user's -------------------------------------------------------------------------


def kinds(x, pair):
    """Say the dtypes."""
    return x.dtype, pair[0].dtype, pair[1]


@pytest.mark.parametrize("applied", ["before", "after"])
def test_decorators(applied):
    made = [amp.half_function(kinds), amp.float_function(kinds), amp.promote_function(kinds)] * (applied == "before")
    start("O1")
    made = made or [amp.half_function(kinds), amp.float_function(kinds), amp.promote_function(kinds)]
    mixed = (VEC.half(), (VEC, 3))
    half = torch.float16
    assert [f(*mixed) for f in made] == [(half, half, 3), (FP32, FP32, 3), (FP32, FP32, 3)]
    assert {f.__name__ for f in made} == {"kinds"}
    assert made[0].__doc__ == "Say the dtypes."
    with amp.disable_casts():
        assert made[0](*mixed) == (half, FP32, 3)
    for level in ("O0", "O2", "O3"):
        start(level)
        assert made[0](*mixed) == (half, FP32, 3)


@pytest.mark.parametrize(
    ("register", "unregister", "expected"),
    [
        (amp.register_half_function, "unregister_lower_precision_function", torch.float16),
        (amp.register_float_function, "unregister_float_function", FP32),
        (amp.register_promote_function, "unregister_promote_function", FP32),
    ],
)
def test_registered_functions_live_through_a_second_initialize(register, unregister, expected):
    class Extension:
        fused = staticmethod(lambda x, y: y.dtype)

    register(Extension, "fused")
    try:
        for _ in range(2):
            start("O1")
            assert Extension.fused(VEC.half(), VEC) is expected
    finally:
        getattr(registration, unregister)(Extension, "fused")


def test_registering_what_is_not_there():
    for register in (amp.register_half_function, amp.register_float_function, amp.register_promote_function):
        with pytest.raises(ValueError, match="nonesuch"):
            register(torch, "nonesuch")


def test_the_users_registration_decides():
    amp.register_float_function(F, "linear")
    try:
        start("O1")
        assert F.linear(SQUARE, SQUARE).dtype is FP32
    finally:
        mpamp.functions.registration.unregister_float_function(F, "linear")


# -- The cast cache ----------------------------------------------------------------------------------


def weight_casts(model, action):
    with WeightCastCounter(model) as casts:
        action()
    return casts.count


def test_train_eval_train_keeps_gradients():
    model, optimizer = start("O1", model=nn.Linear(4, 4), loss_scale=8.0)

    def train():
        optimizer.zero_grad()
        with amp.scale_loss(model(t(2, 4)).float().sum(), optimizer) as scaled:
            scaled.backward()
        assert model.weight.grad.abs().min() > 0

    def evaluate():
        with torch.no_grad():
            model(t(2, 4))

    for action in (evaluate, train, evaluate, train):
        action()


def test_a_weight_changed_by_hand_is_never_stale():
    model, _ = start("O1", model=nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        for value in (1.0, 2.0):
            model.weight.fill_(value)
            assert model(torch.ones(1, 2)).item() == 2 * value


def test_the_cache_empties_with_each_scale_loss():
    model, optimizer = start("O1", model=nn.Linear(2, 2))
    handle = amp._amp_state.handle
    for delay in (False, True):
        model(torch.ones(1, 2))
        assert set(handle.cache) == set(model.parameters())
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
        assert handle.cache == {}
    model(torch.ones(1, 2))
    with pytest.raises(KeyError), amp.scale_loss(torch.ones(1), optimizer):
        raise KeyError
    assert handle.cache == {}


def test_a_list_of_parameters_as_an_argument():
    model, _ = start("O1", model=net())
    assert torch.cat([model[0].bias, model[0].bias]).dtype is FP32
    assert torch.einsum("i,i", [model[0].bias, model[0].bias]).dtype is torch.float16


def test_without_caching():
    handle = amp.init(enable_caching=False, devices=["cpu"])
    assert handle.has_cache is False
    model = nn.Linear(2, 2, bias=False)
    assert weight_casts(model, lambda: [model(torch.ones(1, 2)) for _ in range(3)]) == 3


# -- On an accelerator -------------------------------------------------------------------------------

on_accelerator = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return type(value)(moved(v, device) for v in value) if isinstance(value, list | tuple) else value


@pytest.fixture(params=["O1", "O4"])
def low_there(request):
    device = torch.accelerator.current_accelerator()
    amp.initialize(nn.Linear(1, 1).to(device), opt_level=request.param, verbosity=0)
    return DTYPE[request.param], device


@pytest.mark.parametrize("name", [pytest.param(n, marks=on_accelerator) for n in (*HALF, *FLOAT, *PROMOTE)])
def test_functions_on_the_accelerator(low_there, name):
    low, device = low_there
    function, *args = {**HALF, **FLOAT, **PROMOTE}[name]
    args = moved(args, device)
    from_float32 = low if name in HALF else FP32
    from_low = FP32 if name in FLOAT else low
    if name != "ctc_loss":  # its targets have to be on the host for cuDNN
        assert function(*args).dtype is from_float32
        assert function(*to(args, low)).dtype is from_low
    assert (A_CPU @ A_CPU).dtype is FP32


A_CPU = torch.ones(2, 2)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize("kind", [pytest.param(n, marks=on_accelerator) for n in LAYERS])
def test_rnns_on_the_accelerator(low_there, kind):
    low, device = low_there
    layer, cell = LAYERS[kind](3, 2).to(device), CELLS[kind](3, 2).to(device)
    x = t(4, 2, 3).to(device).requires_grad_()
    out, hidden = layer(x)
    assert (out.dtype, first(hidden).dtype, first(cell(x[0])).dtype) == (low, low, low)
    out.float().sum().backward()
    assert {x.grad.dtype, *(p.grad.dtype for p in layer.parameters())} == {FP32}
    packed, _ = layer(pack_padded_sequence(x, [4, 2]))
    assert packed.data.dtype is low


@pytest.mark.parametrize("kind", [pytest.param(n, marks=on_accelerator) for n in CELLS])
def test_a_cell_in_a_loop_on_the_accelerator(kind):
    device = torch.accelerator.current_accelerator()
    cell = CELLS[kind](3, 2).to(device)
    amp.initialize(cell, torch.optim.SGD(cell.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    with WeightCastCounter(cell) as casts:
        hidden = None
        for _ in range(100):
            hidden = cell(t(1, 3).to(device), hidden)
    assert casts.count == 4
