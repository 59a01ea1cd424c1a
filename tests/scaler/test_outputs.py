"""scale(): tensors and containers."""

from __future__ import annotations

from collections import OrderedDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch

from mpamp.scaler import GradScaler
from mpamp.scaler.outputs import map_tensors

Losses = namedtuple("Losses", "main aux")


class Output(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of transformers' models: attributes beside the keys."""

    note = "none"


def one() -> torch.Tensor:
    return torch.ones(())


def test_tensor_is_multiplied_and_differentiable(scaler: GradScaler) -> None:
    loss = torch.ones((), requires_grad=True)
    scaled = scaler.scale(loss)
    scaled.backward()
    assert scaled.item() == 1024.0
    assert loss.grad is not None
    assert loss.grad.item() == 1024.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_torchs(scaler: GradScaler, dtype: torch.dtype) -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for loss in (torch.ones((), dtype=dtype), torch.ones(1, dtype=dtype)):
        ours, theirs = scaler.scale(loss), torchs.scale(loss)
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "value",
    [
        [one()],
        (one(), [one(), (one(),)]),
        Losses(one(), {"a": one()}),
        {"a": one(), "b": [one()]},
        OrderedDict(a=one()),
        deque([one()], maxlen=3),
        MappingProxyType({"a": one()}),
    ],
    ids=lambda v: type(v).__name__,
)
def test_containers_keep_their_class(scaler: GradScaler, value: Any) -> None:
    def check(before: Any, after: Any) -> None:
        assert type(after) is type(before)
        if isinstance(before, torch.Tensor):
            assert after.item() == before.item() * 1024
        elif hasattr(before, "keys"):
            assert list(after) == list(before)
            for key in before:
                check(before[key], after[key])
        else:
            assert len(after) == len(before)
            for b, a in zip(before, after, strict=True):
                check(b, a)

    check(value, scaler.scale(value))


def test_containers_are_not_changed_and_keep_what_else_they_hold(scaler: GradScaler) -> None:
    output = Output(loss=one())
    output.note = "mine"
    counts = defaultdict(list, a=one())
    scaled = scaler.scale(output)
    assert (scaled["loss"].item(), scaled.note, type(scaled)) == (1024.0, "mine", Output)
    assert output["loss"].item() == 1.0
    assert scaler.scale(counts).default_factory is list
    assert scaler.scale(deque([one()], maxlen=3)).maxlen == 3


def test_other_iterables_are_lazy_as_torchs(scaler: GradScaler) -> None:
    scaled = scaler.scale(one() for _ in range(2))
    assert type(scaled) is map
    assert [t.item() for t in scaled] == [1024.0, 1024.0]
    assert [t.item() for t in scaler.scale(UserList([one()]))] == [1024.0]


@pytest.mark.parametrize("value", [3, "loss", None, [one(), None], {"a": "b"}], ids=repr)
def test_what_is_no_tensor_is_refused(scaler: GradScaler, value: Any) -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(value)


class ReadOnly(dict[str, torch.Tensor]):
    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        raise TypeError("read only")


def test_a_mapping_that_takes_no_items_is_made_anew() -> None:
    scaled = map_tensors(torch.Tensor.double, ReadOnly(loss=torch.ones(1)))
    assert type(scaled) is ReadOnly
    assert scaled["loss"].dtype is torch.float64


@pytest.mark.parametrize("make", [list, lambda items: {"items": items}], ids=["list", "mapping"])
def test_a_container_that_holds_itself_is_an_error_that_says_so(make: Any) -> None:
    items: list[Any] = [torch.ones(1)]
    items.append(make(items) if make is not list else items)
    with pytest.raises(ValueError, match="a list in them holds itself"):
        map_tensors(torch.Tensor.double, items)
