"""A dtype may be given by its name wherever one is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpamp
from mpamp.backends.cpu import amp
from mpamp.errors import UnsupportedDtypeError
from mpamp.testing import check_backend

NAMES = {"bfloat16": torch.bfloat16, "torch.float16": torch.float16, "bf16": torch.bfloat16, "half": torch.float16}
a = torch.ones(2, 2)


@pytest.mark.parametrize(("name", "dtype"), [*NAMES.items(), ("fp32", torch.float32)])
def test_a_region(name: str, dtype: torch.dtype) -> None:
    for region in (mpamp.autocast("cpu", dtype=name), mpamp.autocast("cpu", name, ops={"softmax": "fp32"})):
        with region:
            assert (a @ a).dtype is dtype
        assert region.dtype is dtype
    assert mpamp.autocast("cpu", dtype=name).__reduce__() == mpamp.autocast("cpu", dtype=dtype).__reduce__()
    with amp.autocast(dtype=name):
        assert (a @ a).dtype is dtype


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_region_in_compiled_code(fullgraph: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with mpamp.autocast("cpu", dtype="float16"):
            return x @ x

    assert torch.compile(function, backend="eager", fullgraph=fullgraph)(a).dtype is torch.float16


@pytest.mark.parametrize("name", ["bf17", "", "int8", "float64", "torch"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedDtypeError, match=r"dtype|regions on 'cpu' run in"):
        mpamp.autocast("cpu", dtype=name)
    if name not in ("int8", "float64"):
        with pytest.raises(UnsupportedDtypeError, match="unknown dtype"):
            mpamp.custom_fwd(cast_inputs=name)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_functions(name: str) -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        @mpamp.custom_fwd(cast_inputs=name)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    with mpamp.autocast("cpu"):
        assert Same.apply(a).dtype is NAMES[name]


def test_tables_and_tools() -> None:
    table = mpamp.get_op_table("cpu")
    assert table.policy("mm", "bfloat16") is table.policy("mm", torch.bfloat16)
    model = torch.nn.Linear(2, 2)
    found = mpamp.search_precision(
        model, [a], lambda m, d: float(m(d[0]).detach().float().sum()), dtype="bf16", tolerance=1e9
    )
    assert found.dtype is torch.bfloat16
    report = check_backend("cpu", default_dtype="bf16", sections=["backend"])
    assert report.failures == []
    assert check_backend("cpu", default_dtype="fp16", sections=["backend"]).failures
