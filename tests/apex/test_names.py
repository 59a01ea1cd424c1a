"""Modules of apex.amp under apex's names: state, levels, lists and helpers."""

from __future__ import annotations

import pytest
import torch

from mpamp.apex import amp
from mpamp.apex.errors import AmpNotImplementedError
from mpamp.apex.names import amp_state, frontend, functional_overrides, tensor_overrides, torch_overrides, utils


def test_state_and_what_is_printed(capsys):
    assert amp_state._amp_state is amp._amp_state is frontend._amp_state
    amp_state.maybe_print("seen")
    amp._amp_state.verbosity = 0
    amp_state.maybe_print("unseen", rank0=True)
    assert capsys.readouterr().out == "seen\n"
    with pytest.raises(RuntimeError, match="asked"):
        amp_state.warn_or_err("asked")
    amp._amp_state.hard_override = True
    amp_state.warn_or_err("told")
    assert capsys.readouterr().out == "Warning:  told\n"
    p = torch.ones(1, requires_grad=True)
    assert next(amp_state.master_params(torch.optim.SGD([p], lr=1.0))) is p


def test_rank0_only(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    amp_state.maybe_print("first alone", rank0=True)
    amp_state.maybe_print("all")
    assert capsys.readouterr().out == "all\n"


def test_levels_can_be_called():
    properties = frontend.Properties()
    assert frontend.opt_levels["O2"](properties) is properties
    assert (properties.master_weights, properties.loss_scale) == (True, "dynamic")
    assert frontend.opt_levels["O1"].brief.startswith("O1")


LISTS = [functional_overrides, torch_overrides, tensor_overrides]


@pytest.mark.parametrize("module", LISTS)
def test_lists_name_functions_that_o1_casts(module):
    kinds = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS")
    names = [name for kind in kinds for name in getattr(module, kind, [])]
    assert len(names) == len(set(names)) > 30
    assert [name for name in names if not hasattr(module.MODULE, name)] == []


@pytest.mark.parametrize("module", LISTS)
def test_lists_refuse_changes_that_would_do_nothing(module):
    for names in (module.FP16_FUNCS, module.FP32_FUNCS):
        before = list(names)
        for change in (
            lambda names=names: names.append("bilinear"),
            lambda names=names: names.remove(names[0]),
            lambda names=names: names.__iadd__(["x"]),
            lambda names=names: names.__setitem__(0, "x"),
            lambda names=names: names.clear(),
        ):
            with pytest.raises(AmpNotImplementedError, match="register_half_function"):
                change()
        assert list(names) == before
        assert [*names, "more"] == [*before, "more"]


def test_helpers():
    half, wide, ids = torch.ones(1, dtype=torch.float16), torch.ones(1), torch.ones(1, dtype=torch.int64)
    assert utils.is_nested((1,)) is True
    assert utils.is_nested({}) is False
    assert (utils.is_fp_tensor([half, (wide,)]), utils.is_fp_tensor([half, ids])) == (True, False)
    assert (utils.type_string(half), utils.type_string(ids)) == ("HalfTensor", "LongTensor")
    assert utils.collect_fp_tensor_types([half, ids, [wide, half]], {"a": wide.double()}) == {
        "HalfTensor",
        "FloatTensor",
        "DoubleTensor",
    }
    assert utils.should_cache([torch.nn.Parameter(wide)]) is True
    assert utils.should_cache(wide) is utils.should_cache(torch.nn.Parameter(half)) is False
    assert list(utils.as_inplace(["exp"])) == ["exp_"]


def test_casting_helpers(capsys):
    half, wide, ids = torch.ones(1, dtype=torch.float16), torch.ones(1), torch.ones(1, dtype=torch.int64)
    assert [x.dtype for x in utils.maybe_half([wide, half])] == [torch.float16] * 2
    assert utils.maybe_float((half,))[0].dtype is torch.float32
    kwargs = {"a": wide, "b": 3}
    assert [x.dtype for x in utils.casted_args(utils.maybe_half, [wide, ids], kwargs)] == [torch.float16, torch.int64]
    assert (kwargs["a"].dtype, kwargs["b"]) == (torch.float16, 3)
    utils.maybe_half(wide, "linear", verbose=True)
    utils.maybe_float(wide, "softmax", verbose=True)
    assert capsys.readouterr().out == "Float->Half (linear)\n"


def test_functions_of_modules_and_dicts():
    class Holder:
        f = 1

    for holder in (Holder, {"f": 1}):
        assert (utils.has_func(holder, "f"), utils.has_func(holder, "g"), utils.get_func(holder, "f")) == (
            True,
            False,
            1,
        )
        utils.set_func(holder, "g", 2)
        assert utils.get_func(holder, "g") == 2
    assert utils.is_cuda_enabled() is (torch.version.cuda is not None)
    assert bool(utils.get_cuda_version()) is utils.is_cuda_enabled()
