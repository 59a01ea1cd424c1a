"""The same fault in other shapes is named too; what only looks like one isn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mpamp
from mpamp.insight.tracing import Trace
from tests.torches import needs_transforms

BRAIN, HALF = torch.bfloat16, torch.float16


class Of(nn.Module):
    """A module whose forward is a function of it; plain tensors become buffers."""

    def __init__(self, function: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def explained(model: nn.Module, *inputs: Any, dtype: torch.dtype = BRAIN, **options: Any) -> Trace:
    with mpamp.autocast("cpu", dtype, **options):
        return mpamp.explain(model, *inputs)


def kinds(seen: Trace) -> list[tuple[str, str]]:
    return [(finding.kind, finding.op.removeprefix("aten::").partition(".")[0]) for finding in seen.findings]


def x() -> Tensor:
    return torch.randn(32, 64)


def weight(**options: bool) -> nn.Parameter:
    return nn.Parameter(torch.randn(64, 64), **options)


# -- A frozen weight that is cast at every call ----------------------------------------------------------

PLAIN = "a plain tensor"
WEIGHTS = {
    "buffer": (Of(lambda s, x: functional.linear(x, s.w), w=torch.randn(64, 64)), "w", PLAIN),
    "buffer's transpose": (Of(lambda s, x: x @ s.w.T, w=torch.randn(64, 64)), "w", "a view"),
    "in a list": (Of(lambda s, x: functional.linear(x, s.ws[1]), ws=[0, torch.randn(64, 64)]), "ws[1]", PLAIN),
    "in a mapping": (Of(lambda s, x: functional.linear(x, s.ws["a"]), ws={"a": torch.randn(64, 64)}), "ws['a']", PLAIN),
    "data": (Of(lambda s, x: functional.linear(x, s.w.data), w=weight()), "w", "the parameter's .data"),
    "detached": (Of(lambda s, x: functional.linear(x, s.w.detach()), w=weight()), "w", "the parameter's .data"),
    "of the module around": (nn.Sequential(Of(lambda s, x: functional.linear(x, s.get()))), "shared", PLAIN),
}
WEIGHTS["of the module around"][0].register_buffer("shared", torch.randn(64, 64))
WEIGHTS["of the module around"][0][0].get = lambda: WEIGHTS["of the module around"][0].shared


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_cast_at_every_call(name: str) -> None:
    model, called, reason = WEIGHTS[name]
    seen = explained(model, x())
    (finding,) = seen.findings
    assert finding.kind == "weight cast at every call"
    assert finding.text.startswith(f"{called} is cast to bfloat16")
    assert reason in finding.text


def test_what_is_advised_for_a_detached_weight_has_its_cast_kept() -> None:
    model = Of(lambda s, x: functional.linear(x, s.w) + functional.linear(x, s.w), w=weight(requires_grad=False))
    seen = explained(model, x())
    assert (seen.casts, seen.kept_used, seen.findings) == (3, 1, ())


@pytest.mark.parametrize(
    "model",
    [
        Of(lambda s, x: functional.linear(x, s.w * 2), w=weight()),
        Of(lambda s, x: functional.linear(x, s.w[:32]), w=weight(requires_grad=False)),
        Of(lambda s, x: x @ s.w.T, w=weight(requires_grad=False)),
        nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).requires_grad_(False),
    ],
    ids=["made", "part", "transpose", "weight_norm", "frozen"],
)
def test_weights_that_are_cast_once_or_made_anew_are_no_findings(model: nn.Module) -> None:
    assert explained(model, x()).findings == ()


# -- To float32 and back ---------------------------------------------------------------------------------

NORMS = {
    "layer_norm": nn.LayerNorm(64),
    "rms_norm": nn.RMSNorm(64),
    "group_norm": nn.GroupNorm(4, 64),
    "batch_norm": nn.BatchNorm1d(64),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # rms_norm as it is called
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("between", [[], [nn.Dropout(0.1), nn.GELU()]], ids=["", "dropout"])
def test_a_norm_between_products(name: str, between: list[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), NORMS[name], *between, nn.Linear(64, 64))
    seen = explained(model, x(), ops={name: "fp32"})
    assert kinds(seen) == [("round trip", name)]
    assert seen.findings[0].ops == {name: "fallthrough"}
    assert explained(model, x()).findings == ()


def by_hand(s: Of, x: Tensor) -> Tensor:
    y = s.first(x).float()
    return s.second(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_norm_by_hand() -> None:
    seen = explained(Of(by_hand, first=nn.Linear(64, 64), second=nn.Linear(64, 64)), x())
    (finding,) = seen.findings
    assert (finding.kind, finding.modules, finding.ops) == ("round trip", ("second",), {})
    assert "a cast in the code of Of takes bfloat16 to float32, and linear" in finding.text
    assert [(use.calls, use.casts, use.dtypes_out) for use in seen.uses if use.op == "aten::_to_copy"] == [
        (1, 0, ("float32",))
    ]


def test_a_rule_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    with mpamp.module_rules(model, {"1": "fp32"}):
        (finding,) = explained(model, x()).findings
    assert (finding.kind, finding.modules) == ("round trip", ("2",))
    assert "the rule of a LayerNorm" in finding.text
    with mpamp.module_rules(model, {"1": "fp32", "2": "fp32"}):
        assert explained(model, x()).findings == ()


def test_casts_that_code_undoes_itself_or_that_stay_are_no_findings() -> None:
    def attend(s: Of, x: Tensor) -> Tensor:
        y = s.first(x)
        scores = torch.softmax((y @ y.T).float(), -1).to(y.dtype)
        return (scores @ y).float()

    seen = explained(Of(attend, first=nn.Linear(64, 64)), x())
    assert seen.findings == ()
    assert sum(use.calls for use in seen.uses if use.op == "aten::_to_copy") == 3


def test_casts_of_integers_and_of_backward_passes_are_not_listed() -> None:
    layer = nn.Linear(64, 64)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        layer(x().long().float()).sum().backward()
    assert not [use for use in seen.uses if use.op == "aten::_to_copy"]


# -- float64 ---------------------------------------------------------------------------------------------

DOUBLES = {
    "added": Of(lambda s, x: s.layer(x) + s.d, layer=nn.Linear(64, 64), d=torch.randn(64).double()),
    "joined": Of(lambda s, x: torch.cat([s.layer(x), s.d]), layer=nn.Linear(64, 64), d=torch.randn(3, 64).double()),
    "a part": Of(lambda s, x: s.layer(x) * s.d[0], layer=nn.Linear(64, 64), d=torch.randn(3, 64).double()),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_a_float64_buffer(name: str) -> None:
    (finding,) = explained(DOUBLES[name], x()).findings
    assert finding.kind == "float64"
    assert finding.text.startswith("d is float64")


def test_float64_that_code_asks_for() -> None:
    seen = explained(Of(lambda s, x: (s.layer(x).double() * 2).float(), layer=nn.Linear(64, 64)), x())
    assert kinds(seen) == [("float64", "_to_copy")]
    assert "makes float64 of bfloat16" in seen.findings[0].text


def test_a_float64_number_is_none() -> None:
    model = Of(lambda s, x: s.layer(x) * s.d, layer=nn.Linear(64, 64), d=torch.tensor(2.0, dtype=torch.float64))
    assert explained(model, x()).findings == ()


# -- Clean models ----------------------------------------------------------------------------------------


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


SEQUENCE = (4, 16, 64)
CLEAN: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "encoder": (lambda: encoder(False), [SEQUENCE]),
    "encoder, norm first": (lambda: encoder(True), [SEQUENCE]),
    "transformer": (lambda: nn.Transformer(64, 4, 1, 1, 128, batch_first=True), [SEQUENCE, SEQUENCE]),
    "attention": (lambda: nn.MultiheadAttention(64, 4, batch_first=True), [SEQUENCE] * 3),
    "lstm": (lambda: nn.LSTM(64, 64, 2, bidirectional=True), [SEQUENCE]),
    "gru": (lambda: nn.GRU(64, 64), [SEQUENCE]),
    "decoder": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.ConvTranspose2d(32, 8, 2)),
        [(2, 3, 16, 16)],
    ),
    "classifier": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(6272, 64)
        ),
        [(2, 3, 16, 16)],
    ),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_clean_model_has_no_findings(name: str, dtype: torch.dtype, is_training: bool) -> None:
    torch.manual_seed(0)
    make, shapes = CLEAN[name]
    seen = explained(make().train(is_training), *(torch.randn(shape) for shape in shapes), dtype=dtype)
    assert seen.findings == ()
    assert seen.calls > 0


@needs_transforms
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_of_a_clean_model_have_none(transform: str) -> None:
    layer, given = nn.Linear(64, 64), x()
    params = dict(layer.named_parameters())
    runs: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.func.vmap(lambda v: torch.func.functional_call(layer, params, (v,)))(given),
        "grad": lambda: torch.func.grad(lambda p: torch.func.functional_call(layer, p, (given,)).float().sum())(params),
        "jvp": lambda: torch.func.jvp(layer, (given,), (given,)),
    }
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        runs[transform]()
    assert [(use.calls, use.casts) for use in seen.uses if use.op == "aten::linear"] == [(1, 3)]
    assert seen.findings == ()
