"""Torch's names are mpamp's while something is installed, and torch's own again after it, whatever happens between."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from typing import Any

import pytest
import torch

import mpamp
from mpamp import children
from tests import processes

BF16 = torch.bfloat16
FUNCTIONS = ("custom_fwd", "custom_bwd")
FLAGS = ("is_autocast_cache_enabled", "set_autocast_cache_enabled")
Class = type[Any]


def names() -> dict[str, Any]:
    """Return everything that can be meant by torch's names, and what their classes have."""
    forms: list[Any] = [torch, torch.amp, torch.amp.autocast_mode, torch.cuda.amp, torch.cpu.amp]
    found = {f"{m.__name__}.{n}": getattr(m, n) for m in forms for n in ("autocast", "GradScaler") if hasattr(m, n)}
    found |= {f"{m.__name__}.{n}": getattr(m, n) for m in forms[1:] for n in FUNCTIONS if hasattr(m, n)}
    found |= {n: getattr(torch, n) for n in FLAGS}
    for cls in (torch.autocast, torch.cuda.amp.autocast, torch.cpu.amp.autocast, torch.amp.GradScaler):
        found |= {f"{cls.__module__}.{cls.__name__}.{n}": v for n, v in vars(cls).items() if not n.startswith("__weak")}
    dynamo: Any = sys.modules.get("torch._dynamo.variables.ctx_manager")
    if dynamo is not None:
        found |= {f"dynamo.{n}": vars(dynamo.AutocastModeVariable)[n] for n in ("enter", "exit")}
    return {**found, "environment": {n: os.environ.get(n) for n in (children.VARIABLE, "PYTHONPATH")}}


def differences(before: dict[str, Any]) -> list[str]:
    after = names()
    same = {n for n in before if before[n] is after.get(n) or (n == "environment" and before[n] == after[n])}
    return sorted((before.keys() | after.keys()) - same)


def is_ours() -> bool:
    """Tell by an op that torch has no rule for whether a region by torch's name is mpamp's."""
    with torch.autocast("cpu"):
        y = torch.ones(4, 4) @ torch.ones(4, 4)
        assert y.dtype is BF16
        try:
            return torch.fft.hfft2(y).dtype is torch.float32
        except RuntimeError:
            return False


@pytest.fixture
def before() -> Any:
    importlib.import_module("torch._dynamo.variables.ctx_manager")  # what is replaced there is seen, too
    return names()


def test_what_is_replaced_while_installed(before: Any) -> None:
    with mpamp.install():
        assert {n.rpartition(".")[2] for n in differences(before)} == {
            *("__enter__", "__exit__", "__call__", "__init__", "enter", "exit", "environment"),
            *FUNCTIONS,
            *FLAGS,
        }
        assert torch.autocast is before["torch.autocast"]
        assert is_ours()
    assert differences(before) == []
    assert not is_ours()


def test_install_and_uninstall(before: Any) -> None:
    mpamp.uninstall()
    assert differences(before) == []
    mpamp.install()
    mpamp.install()
    assert is_ours()
    mpamp.uninstall()
    assert differences(before) == []
    mpamp.uninstall()
    assert differences(before) == []


def test_blocks_nest(before: Any) -> None:
    with mpamp.install():
        with mpamp.install():
            assert is_ours()
        assert is_ours()
        with pytest.raises(ZeroDivisionError), mpamp.install():
            _ = 1 / 0
        assert is_ours()
    assert differences(before) == []


def test_after_an_exception(before: Any) -> None:
    with pytest.raises(ZeroDivisionError), mpamp.install(), torch.autocast("cpu"):
        _ = 1 / 0
    assert differences(before) == []


def test_an_install_that_fails_leaves_nothing(before: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpamp.standins import installing

    monkeypatch.setattr(installing.COMPILERS, "install", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mpamp.install()
    assert differences(before) == []
    assert not is_ours()


def test_options_of_the_latest_hold() -> None:
    def recasts() -> int:
        mpamp.clear_cache()
        before = mpamp.cache_info().casts
        weight = torch.nn.Parameter(torch.ones(4, 4))
        for _ in range(3):
            with torch.autocast("cpu"):
                _ = torch.ones(1, 4) @ weight
        return mpamp.cache_info().casts - before

    with mpamp.install():
        assert recasts() == 3
        with mpamp.install(persistent_cache=True):
            assert recasts() == 1
        assert recasts() == 3


def test_two_threads_overlap(before: Any) -> None:
    both, inside, first_out = threading.Barrier(2), threading.Barrier(2), threading.Event()
    seen: list[Any] = []

    def work(is_first: bool) -> None:
        both.wait(10)
        with mpamp.install():
            inside.wait(10)
            if not is_first:
                first_out.wait(10)
            seen.append(is_ours())
        first_out.set()

    threads = [threading.Thread(target=work, args=(is_first,)) for is_first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [True, True]
    assert differences(before) == []


def test_many_threads_install_and_uninstall(before: Any) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                with mpamp.install(), torch.autocast("cpu"):
                    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is BF16
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert differences(before) == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_uninstall_while_another_thread_is_in_a_region(before: Any, by_hand: bool) -> None:
    entered, uninstalled = threading.Event(), threading.Event()
    seen: list[Any] = []

    def work() -> None:
        x = torch.ones(2, 2)
        region = torch.autocast("cpu")
        if by_hand:
            region.__enter__()
            entered.set()
            uninstalled.wait(10)
            seen.extend([(x @ x).dtype, torch.fft.hfft2(x @ x).dtype])
            region.__exit__(None, None, None)
        else:
            with region:
                entered.set()
                uninstalled.wait(10)
                seen.extend([(x @ x).dtype, torch.fft.hfft2(x @ x).dtype])
        seen.extend([(x @ x).dtype, torch.is_autocast_enabled("cpu")])

    with mpamp.install():
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(10)
    assert not is_ours()
    with mpamp.install():  # and on again, with the old region still open
        assert is_ours()
    assert differences(before) == ["torch.amp.autocast_mode.autocast.__exit__"]
    uninstalled.set()
    thread.join(30)
    assert seen == [BF16, torch.float32, torch.float32, False]
    assert differences(before) == []


def test_a_region_of_before_is_left_after_install(before: Any) -> None:
    region, x = torch.autocast("cpu"), torch.ones(2, 2)
    region.__enter__()
    with mpamp.install():
        assert is_ours()
        region.__exit__(None, None, None)
        assert (x @ x).dtype is torch.float32
    assert differences(before) == []
    with torch.autocast("cpu"):
        with mpamp.install():
            assert (x @ x).dtype is BF16
            assert is_ours()
        assert (x @ x).dtype is BF16


def test_whoever_imported_the_names_before_has_them(before: Any) -> None:
    autocast, scaler = before["torch.autocast"], before["torch.amp.GradScaler"]

    class Early(autocast):  # type: ignore[misc]
        pass

    with mpamp.install():
        with Early("cpu"):
            y = torch.ones(4, 4) @ torch.ones(4, 4)
            assert torch.fft.hfft2(y).dtype is torch.float32
        assert isinstance(autocast("cpu"), torch.autocast)
        assert isinstance(scaler("cpu"), mpamp.GradScaler)
        assert isinstance(torch.amp.GradScaler("cpu"), scaler)
    assert not isinstance(scaler("cpu"), mpamp.GradScaler)


def test_functions_are_replaced_where_others_have_them(before: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    early, late = types.ModuleType("mpamp_test_early"), types.ModuleType("mpamp_test_late")
    early.custom_fwd = torch.amp.custom_fwd  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpamp_test_early", early)
    monkeypatch.setitem(sys.modules, "mpamp_test_late", late)
    with mpamp.install():
        assert vars(early)["custom_fwd"] is torch.amp.custom_fwd is not before["torch.amp.custom_fwd"]
        late.custom_fwd = torch.amp.custom_fwd  # type: ignore[attr-defined]
        assert mpamp.custom_fwd is not torch.amp.custom_fwd
    assert vars(early)["custom_fwd"] is vars(late)["custom_fwd"] is before["torch.amp.custom_fwd"]


def test_a_function_of_torchs_custom_fwd_keeps_the_forwards_table() -> None:
    """torch's ``custom_bwd`` enters a region by itself: the forward's rules hold in it, as without install."""
    seen: list[torch.dtype] = []

    class Early(torch.autograd.Function):
        @staticmethod
        @functools.partial(torch.amp.custom_fwd, device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        @functools.partial(torch.amp.custom_bwd, device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            seen.append(torch.nn.functional.gelu(grad @ grad).dtype)
            return grad

    with mpamp.install():
        for rules in ({}, {"gelu": "fp32"}):
            x = torch.ones(2, 2, requires_grad=True)
            with mpamp.autocast("cpu", ops=rules):
                y = Early.apply(x)
            y.sum().backward()
    assert seen == [BF16, torch.float32]


def test_import_is_light_and_names_are_there() -> None:
    code = "import sys, mpamp; print('mpamp.standins' in sys.modules, 'install' in dir(mpamp)); mpamp.install"
    done = processes.python("-c", code)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_device_type_of_mpamps_own_region() -> None:
    assert mpamp.autocast(device_type="cpu") is mpamp.autocast("cpu")
    assert mpamp.autocast(device_type="cpu:0", dtype=torch.float16).device_type == "cpu"
    with pytest.raises(TypeError, match="two names of one argument"):
        mpamp.autocast("cpu", device_type="cpu")
