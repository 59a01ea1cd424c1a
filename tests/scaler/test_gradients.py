"""Gradients of every kind: unscaled, checked, or refused before any is touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpamp.errors import Fp16GradientError, MpampError
from mpamp.scaler import GradScaler, gradients, kernels

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]


def given(grad: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter that has a gradient."""
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    return param


def unscaled(scaler: GradScaler, *params: torch.nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=1.0, **options)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return optimizer


def found(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[float]:
    return [v.item() for v in scaler._found_inf_per_device(optimizer).values()]


@pytest.fixture(params=["kernels", "kernels without 16 bits", "ordinary ops"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Run a test with the device's kernels, and with ordinary ops in their place; return what the kernels took."""
    low = (torch.bfloat16, torch.float16)
    if request.param == "ordinary ops":
        request.getfixturevalue("without_kernels")
    elif request.param == "kernels without 16 bits":
        monkeypatch.setattr("mpamp.scaler.kernels._takes", lambda device, dtype: dtype not in low)
    taken: list[torch.dtype] = []
    real = kernels.amp_foreach_non_finite_check_and_unscale_

    def unscale(grads: list[torch.Tensor], *rest: torch.Tensor) -> None:
        taken.extend(grad.dtype for grad in grads)
        real(grads, *rest)

    monkeypatch.setattr(kernels, "amp_foreach_non_finite_check_and_unscale_", unscale)
    request.node.kernel = request.param
    return taken


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_in_place(either: list[torch.dtype], dtype: torch.dtype, scaler: GradScaler) -> None:
    grad = torch.full((3,), 3 - 2j if dtype.is_complex else 3.0, dtype=dtype)
    param, expected = given(grad * 1024), grad.clone()
    before = param.grad
    optimizer = unscaled(scaler, param)
    assert param.grad is before
    assert torch.equal(param.grad, expected)
    assert found(scaler, optimizer) == [0.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_is_found(either: list[torch.dtype], dtype: torch.dtype, bad: float, scaler: GradScaler) -> None:
    values = torch.ones(5, dtype=dtype)
    values[3] = complex(1.0, bad) if dtype.is_complex else bad
    assert found(scaler, unscaled(scaler, given(torch.ones(2)), given(values))) == [1.0]


def test_mixed_dtypes_in_one_group(
    either: list[torch.dtype], scaler: GradScaler, request: pytest.FixtureRequest
) -> None:
    params = [given(torch.full((2,), 2048.0, dtype=d)) for d in DTYPES for _ in range(2)]
    unscaled(scaler, *params)
    assert all(torch.equal(p.grad, torch.full((2,), 2.0, dtype=p.dtype)) for p in params)
    expected = {
        "kernels": {torch.float32, torch.float64, torch.bfloat16},
        "kernels without 16 bits": {torch.float32, torch.float64},
        "ordinary ops": set(),
    }
    assert set(either) == expected[request.node.kernel]


def test_many_16_bit_gradients(either: list[torch.dtype], scaler: GradScaler) -> None:
    params = [given(torch.full((2,), 2048.0, dtype=torch.bfloat16)) for _ in range(70)]
    params[-1].grad[0] = math.inf
    assert found(scaler, unscaled(scaler, *params)) == [1.0]
    assert all(p.grad[1] == 2.0 for p in params)


def test_lazily_conjugated_gradient(either: list[torch.dtype], scaler: GradScaler) -> None:
    param = given(torch.tensor([1024 + 2048j]).conj())
    assert param.grad is not None
    assert param.grad.is_conj()
    unscaled(scaler, param)
    assert param.grad.resolve_conj().tolist() == [1 - 2j]


def test_scale_that_is_no_power_of_two(either: list[torch.dtype]) -> None:
    scaler = GradScaler("cpu", init_scale=3.0)
    params = [given(torch.full((2,), 6.0, dtype=d)) for d in DTYPES]
    unscaled(scaler, *params)
    assert all(torch.allclose(p.grad, torch.full((2,), 2.0, dtype=p.dtype), rtol=1e-6) for p in params)


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_sparse_rows(either: list[torch.dtype], is_coalesced: bool, scaler: GradScaler) -> None:
    grad = torch.sparse_coo_tensor([[1, 1, 2]], torch.full((3, 2), 1024.0), (4, 2), check_invariants=True)
    param = given(grad.coalesce() if is_coalesced else grad)
    unscaled(scaler, param)
    assert param.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 1.0, 0.0]


def test_sparse_inf_skips(either: list[torch.dtype], scaler: GradScaler) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()))
    scaler.scale(embedding(torch.tensor([1, 1])).sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(embedding.weight, before)
    assert scaler.get_scale() == 512.0


def test_compressed_sparse_gradient(either: list[torch.dtype], scaler: GradScaler) -> None:
    param = torch.nn.Parameter(torch.zeros(2, 2).to_sparse_csr())
    param.grad = torch.eye(2).mul(2048).to_sparse_csr()
    unscaled(scaler, param)
    assert torch.equal(param.grad.to_dense(), torch.eye(2) * 2)


def test_sum_of_float16_rows_that_overflows_is_found() -> None:
    rows = torch.full((2, 1), 40000.0, dtype=torch.float16)
    param = given(torch.sparse_coo_tensor([[1, 1]], rows, (2, 1), check_invariants=True))
    scaler = GradScaler("cpu", init_scale=2.0, allow_fp16_grads=True)
    assert found(scaler, unscaled(scaler, param)) == [1.0]


def test_empty_gradient(either: list[torch.dtype], scaler: GradScaler) -> None:
    assert found(scaler, unscaled(scaler, given(torch.empty(0)), given(torch.full((1,), 1024.0)))) == [0.0]


def test_float16_is_refused_with_name_group_dtype_and_remedy() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1).half())
    groups = [
        {"params": list(model[0].named_parameters())},
        {"params": [(f"head.{n}", p) for n, p in model[1].named_parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
        scaler.unscale_(optimizer)
    assert isinstance(caught.value, Fp16GradientError)
    assert isinstance(caught.value, MpampError)
    text = str(caught.value)
    for part in (
        "'head.weight' of group 1",
        "'head.bias'",
        "(1, 3)",
        "torch.float16",
        "allow_fp16_grads=True",
        "float()",
    ):
        assert part in text
    assert all(bool((p.grad == 1).all()) for p in model.parameters()), "a gradient was touched"


def test_float16_without_names_is_placed() -> None:
    params = [given(torch.ones(2)), *(given(torch.ones(5, dtype=torch.float16)) for _ in range(11))]
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(Fp16GradientError, match=r"parameter 1 of group 0, shape \(5,\).*and 3 more"):
        scaler.step(torch.optim.SGD(params, lr=0.1))
    assert torch.equal(params[0].grad, torch.ones(2))


@pytest.mark.parametrize("init_scale", [1024.0, 2.0**26])
def test_float16_allowed(either: list[torch.dtype], init_scale: float) -> None:
    scaler = GradScaler("cpu", init_scale=init_scale, allow_fp16_grads=True)
    param = given(torch.full((2,), 2048.0, dtype=torch.float16))
    unscaled(scaler, param)
    assert torch.equal(param.grad, torch.full((2,), 2048 / init_scale, dtype=torch.float16))


def test_overridden_unscale_grads_may_allow_float16() -> None:
    class Mine(GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    param = given(torch.full((2,), 8.0, dtype=torch.float16))
    unscaled(Mine("cpu", init_scale=4.0), param)
    assert torch.equal(param.grad, torch.full((2,), 2.0, dtype=torch.float16))


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_optimizer_without_gradients_steps(options: dict[str, Any], scaler: GradScaler) -> None:
    calls = []
    params = [torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(params, lr=0.1, **options)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert calls == [1]
    assert torch.equal(params[0], torch.ones(2))
    assert not scaler.last_step_skipped(optimizer)
    assert scaler._get_growth_tracker() == 1


def test_optimizer_without_gradients_beside_one_with(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    idle = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    busy = torch.optim.SGD(weights, lr=0.5)
    run_backward(scaler, weights, factor=math.inf)
    for optimizer in (idle, busy):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.last_step_skipped(o) for o in (idle, busy)] == [False, True]
    assert scaler.get_scale() == 512.0


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameter_twice_in_a_group_is_unscaled_once(scaler: GradScaler) -> None:
    param = given(torch.full((2,), 2048.0))
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([param, param], lr=0.1))
    assert torch.equal(param.grad, torch.full((2,), 2.0))


def test_plain_gradients_take_the_quick_path(monkeypatch: pytest.MonkeyPatch, scaler: GradScaler) -> None:
    calls = []
    monkeypatch.setattr(gradients, "values_of", lambda grad: calls.append(grad))
    unscaled(scaler, *[given(torch.ones(2)) for _ in range(3)])
    assert calls == []


def test_tensor_subclass_gradients_are_kept_apart(scaler: GradScaler) -> None:
    class Tagged(torch.Tensor):
        pass

    params = [given(torch.full((2,), 2048.0)), given(torch.full((2,), 2048.0))]
    params[1].grad = params[1].grad.as_subclass(Tagged)
    unscaled(scaler, *params)
    assert all(bool((p.grad == 2).all()) for p in params)
    assert type(params[1].grad) is Tagged
