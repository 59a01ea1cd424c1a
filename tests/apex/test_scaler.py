"""The loss scale's rule, and the state dict of the scalers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpamp
from mpamp.apex import amp
from mpamp.apex.scaler import LossScaler, next_scale
from tests.apex.training import data, start, step


def test_start():
    assert LossScaler("dynamic").loss_scale() == 2.0**16
    assert LossScaler("dynamic", max_loss_scale=8.0, min_loss_scale=64.0).loss_scale() == 8.0
    assert (LossScaler(128.0).loss_scale(), LossScaler(128.0).dynamic) == (128.0, False)


def test_scale_factor_is_ignored():
    scaler = LossScaler("dynamic", scale_factor=10.0)
    scaler.unscale_([torch.full((1,), float("nan"))])
    assert scaler.update_scale()
    assert scaler.loss_scale() == 2.0**15


def test_growth_after_the_window_and_not_past_the_maximum():
    scaler = LossScaler("dynamic", scale_window=3, init_scale=4.0, max_loss_scale=8.0)
    scales = []
    for _ in range(7):
        scaler.update_scale()
        scales.append((scaler.loss_scale(), scaler._unskipped))
    assert scales == [(4.0, 1), (4.0, 2), (8.0, 0), (8.0, 1), (8.0, 2), (8.0, 0), (8.0, 1)]


def test_a_loaded_count_above_the_window_still_grows():
    assert next_scale(4.0, 5000, False, 2000, None, 2.0**24) == (8.0, 0)


@pytest.mark.parametrize(("least", "floor"), [(None, 2.0**-16), (0, 2.0**-16), (4.0, 4.0)])
def test_the_scale_has_a_floor(least, floor):
    scale = 2.0**10
    for _ in range(60):
        scale, _ = next_scale(scale, 0, True, 2000, least, 2.0**24)
    assert scale == floor


def test_a_scaler_at_its_floor_says_so_once():
    scaler = LossScaler("dynamic", init_scale=2.0**-15)
    for number in range(4):
        scaler.unscale_([torch.full((1,), float("inf"))])
        if number == 1:
            with pytest.warns(mpamp.MpampWarning, match="its floor"):
                assert scaler.update_scale()
        else:
            assert scaler.update_scale()


@given(
    st.lists(st.booleans(), max_size=60),
    st.floats(2.0**-16, 2.0**24),
    st.integers(1, 10),
    st.one_of(st.none(), st.floats(0.5, 100.0)),
)
def test_the_scale_stays_in_bounds(overflows, scale, window, least):
    unskipped = 0
    for overflow in overflows:
        before = scale
        scale, unskipped = next_scale(scale, unskipped, overflow, window, least, 2.0**24)
        assert 0 < scale <= max(2.0**24, least or 0)
        assert 0 <= unskipped < window
        assert scale in (before, before * 2, before / 2, least, 2.0**24, 2.0**-16)


def test_static_scalers_count_and_never_skip():
    scaler = LossScaler(2.0)
    grad = torch.tensor([float("inf"), 4.0])
    scaler.unscale_([grad])
    assert scaler.update_scale() is False
    assert (scaler._unskipped, scaler.loss_scale(), grad.tolist()) == (1, 2.0, [float("inf"), 2.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unscale_any_dtype_and_sparse(dtype):
    scaler = LossScaler("dynamic")
    dense = torch.full((3,), 2.0**15, dtype=dtype)
    sparse = torch.sparse_coo_tensor([[0, 2]], torch.full((2,), 2.0**15, dtype=dtype), (4,), check_invariants=True)
    scaler.unscale_([dense, sparse])
    assert dense.tolist() == [0.5] * 3
    assert sparse.coalesce().values().tolist() == [0.5] * 2
    assert not scaler.update_scale()


def test_lower_precision_gradients_are_told_once_a_process(monkeypatch, capsys):
    monkeypatch.setattr(LossScaler, "warned_unscaling_non_fp32_grad", False)
    for _ in range(2):
        LossScaler("dynamic").unscale_([torch.ones(1)])
        LossScaler("dynamic").unscale_([torch.ones(1).half()])
    assert capsys.readouterr().out.count("unscaling gradients of torch.float16") == 1


def test_unscale_as_others_call_it():
    scaler = LossScaler("dynamic", init_scale=8.0)
    model, master = [torch.full((2,), 16.0).half()], [torch.empty(2)]
    scaler.unscale(model, master, scaler.loss_scale())
    assert master[0].tolist() == [2.0, 2.0]
    scaler.unscale_with_stashed(model, [torch.ones(2)], master)
    assert master[0].tolist() == [3.0, 3.0]


# -- state_dict --------------------------------------------------------------------------------------


def test_layout():
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O2", num_losses=2, verbosity=0)
    assert list(amp.state_dict().items()) == [
        ("loss_scaler0", {"loss_scale": 65536.0, "unskipped": 0}),
        ("loss_scaler1", {"loss_scale": 65536.0, "unskipped": 0}),
    ]
    destination = {"mine": 1}
    assert amp.state_dict(destination) is destination
    assert list(destination) == ["mine", "loss_scaler0", "loss_scaler1"]


def test_empty_before_initialize_and_disabled():
    assert amp.state_dict() == {}
    amp.initialize(torch.nn.Linear(1, 1), enabled=False)
    assert amp.state_dict() == {}


def entry(scale, unskipped=3):
    return {"loss_scale": scale, "unskipped": unskipped}


def test_load_by_position_whatever_the_number():
    start("O2", num_losses=2)
    given = {"loss_scaler7": entry(4.0), "my_loss_scaler": entry(8.0)}
    kept = {key: dict(value) for key, value in given.items()}
    amp.load_state_dict(given)
    assert given == kept
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [4.0, 8.0]


def test_more_and_fewer_entries(capsys):
    start("O2", num_losses=1)
    amp.load_state_dict({"loss_scaler0": entry(4.0), "loss_scaler1": entry(8.0), "loss_scaler2": entry(2.0)})
    out = capsys.readouterr().out
    assert "Warning: state_dict contains 3 entries, while 1 loss_scalers are used" in out
    assert "Skipping loss_scaler[1], since num_losses was set to 1" in out
    assert "loss_scaler[2]" not in out
    start("O2", num_losses=3)
    amp.load_state_dict({"loss_scaler0": entry(16.0)})
    assert "contains 1 entries, while 3" in capsys.readouterr().out
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [16.0, 1024.0, 1024.0]


@pytest.mark.parametrize(
    "foreign",
    [
        {"loss_scaler0": entry(4.0), "model": {}},
        {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 0},
        {"loss_scaler0": 4.0},
        {"loss_scaler0": {"loss_scale": 4.0}},
        {"loss_scaler0": entry(4.0), "loss_scaler1": entry("x")},
    ],
)
@pytest.mark.parametrize("initialized", [True, False])
def test_a_foreign_dict_changes_nothing(foreign, initialized):
    if initialized:
        start("O2", num_losses=2)
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match=r"(?i)nothing was loaded"):
        amp.load_state_dict(foreign)
    assert amp.state_dict() == before
    if not initialized:
        amp.initialize(torch.nn.Linear(1, 1), opt_level="O2", num_losses=2, verbosity=0)
        assert amp._amp_state.loss_scalers[0].loss_scale() == 65536.0


def test_a_static_scaler_takes_a_loaded_scale_and_stays_static():
    model, optimizer = start("O2", loss_scale=8.0)
    amp.load_state_dict({"loss_scaler0": entry(32.0)})
    step(model, optimizer, data())
    scaler = amp._amp_state.loss_scalers[0]
    assert (scaler.loss_scale(), scaler.dynamic, scaler._unskipped) == (32.0, False, 4)


def test_the_scale_may_be_set_by_hand():
    model, optimizer = start("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    with amp.scale_loss(torch.ones(1), optimizer) as scaled:
        assert scaled.item() == 4.0
        (scaled * 0 + sum(p.float().sum() for p in model.parameters())).backward()
