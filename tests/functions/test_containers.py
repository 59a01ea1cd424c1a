"""Containers that tensors come in: cast and of their class, or as they were; never an error, never twice the work."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import mpamp
from mpamp.functions.containers import map_tensors, tensors_in

BRAIN = torch.bfloat16


class Slots(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Named(tuple):  # type: ignore[type-arg]
    name = "none"


class Frozen(Mapping[str, Any]):
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


class FrozenSlots(Mapping[str, Any]):
    __slots__ = ("keys_", "values_")

    def __init__(self, keys: tuple[str, ...], values: tuple[Any, ...]) -> None:
        self.keys_, self.values_ = keys, values

    def __getitem__(self, key: str) -> Any:
        return self.values_[self.keys_.index(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_)

    def __len__(self) -> int:
        return len(self.keys_)


class Computed(Mapping[str, Any]):
    """Makes its items when asked: there is nothing to put others into."""

    def __getitem__(self, key: str) -> Any:
        return torch.ones(2)

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


class ReadOnly(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")


class ReadOnlyList(list):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")


class Must(list):  # type: ignore[type-arg]
    def __init__(self, must: Any) -> None:
        super().__init__(must)


class MustDict(dict):  # type: ignore[type-arg]
    def __init__(self, must: Any) -> None:
        super().__init__(must)


class NoCopy(list):  # type: ignore[type-arg]
    def __copy__(self) -> Any:
        raise RuntimeError("no copy")


class NoCopyDict(dict):  # type: ignore[type-arg]
    def __copy__(self) -> Any:
        raise RuntimeError("no copy")


class Mirrored(collections.OrderedDict):  # type: ignore[type-arg]
    """Has its items as attributes too, as the outputs of models do."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def x() -> torch.Tensor:
    return torch.ones(2, 2)


CAST: dict[str, Callable[[], Any]] = {
    "list": lambda: [x(), 1],
    "tuple": lambda: (x(), "a"),
    "dict": lambda: {"a": x(), "b": None},
    "namedtuple": lambda: collections.namedtuple("Pair", "a b")(x(), 1),
    "torch.return_types": lambda: torch.max(x(), 0),
    "PackedSequence": lambda: torch.nn.utils.rnn.pack_sequence([x()]),
    "tuple subclass with slots": lambda: Slots((x(),)),
    "tuple subclass with attributes": lambda: Named((x(),)),
    "OrderedDict": lambda: collections.OrderedDict(a=x()),
    "defaultdict": lambda: collections.defaultdict(list, a=x()),
    "Counter": lambda: collections.Counter({"a": x()}),  # type: ignore[dict-item]
    "ChainMap": lambda: collections.ChainMap({"a": x()}, {"b": x()}),
    "UserDict": lambda: collections.UserDict({"a": x()}),
    "UserList": lambda: collections.UserList([x()]),
    "deque": lambda: collections.deque([x()], maxlen=3),
    "MappingProxyType": lambda: types.MappingProxyType({"a": x()}),
    "own mapping": lambda: Frozen({"a": x()}),
    "own mapping with slots": lambda: FrozenSlots(("a", "b"), (x(), 1)),
    "read-only dict": lambda: ReadOnly(a=x()),
    "read-only list": lambda: ReadOnlyList([x()]),
    "list with constructor arguments": lambda: Must([x()]),
    "dict with constructor arguments": lambda: MustDict({"a": x()}),
    "list that can't be copied": lambda: NoCopy([x()]),
    "dict that can't be copied": lambda: NoCopyDict(a=x()),
    "dict with attributes": lambda: Mirrored(a=x()),
    "deep": lambda: {"a": [collections.deque([Frozen({"b": (Slots((x(),)),)})])]},
}
LEFT: dict[str, Callable[[], Any]] = {
    "mapping that computes": Computed,
    "ParameterDict": lambda: torch.nn.ParameterDict({"a": x()}),
    "ParameterList": lambda: torch.nn.ParameterList([x()]),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=x()),
    "dataclass": lambda: dataclasses.make_dataclass("Data", ["a"])(x()),
    "set": lambda: {x()},
    "iterator": lambda: iter([x()]),
}


def received(value: Any) -> list[Any]:
    """Return what a decorated function and a Function that casts get, in a region."""
    got: list[Any] = []
    mpamp_function = mpamp.lower_precision_function(got.append)

    class F(torch.autograd.Function):
        @staticmethod
        @mpamp.custom_fwd(cast_inputs=BRAIN, device_type="cpu")
        def forward(ctx: Any, value: Any) -> torch.Tensor:
            got.append(value)
            return torch.ones(1)

    with mpamp.autocast("cpu", dtype=BRAIN):
        mpamp_function(value)
        F.apply(value)
    return got


@pytest.mark.parametrize("make", CAST.values(), ids=CAST)
def test_what_can_be_made_anew_is_cast_and_keeps_its_class(make: Callable[[], Any]) -> None:
    value = make()
    for got in received(value):
        assert type(got) is type(value)
        assert got is not value
        assert {t.dtype for t in tensors_in(got) if t.is_floating_point()} == {BRAIN}
        assert {t.dtype for t in tensors_in(value) if t.is_floating_point()} == {torch.float32}, "the caller's own"
        assert len(got) == len(value)


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_what_can_not_passes_as_it_is(make: Callable[[], Any]) -> None:
    value = make()
    assert all(got is value for got in received(value))


def test_what_else_a_container_holds_is_kept() -> None:
    named = Named((x(),))
    named.name = "kept"
    queue, default = received(collections.deque([x()], maxlen=3)), received(collections.defaultdict(list, a=x()))
    assert [got.name for got in received(named)] == ["kept", "kept"]
    assert [got.maxlen for got in queue] == [3, 3]
    assert [got.default_factory for got in default] == [list, list]
    assert [got.a.dtype for got in received(Mirrored(a=x()))] == [BRAIN, BRAIN]


def test_a_container_that_holds_itself() -> None:
    cyclic: list[Any] = [x()]
    cyclic.append({"me": (cyclic,)})
    for got in received(cyclic):
        assert got[0].dtype is BRAIN
        assert got[1]["me"][0] is cyclic
    assert len(tensors_in(cyclic)) == 1


def test_the_same_container_twice_is_cast_twice() -> None:
    inner = [x()]
    for got in received([inner, inner]):
        assert [each[0].dtype for each in got] == [BRAIN, BRAIN]


@pytest.mark.parametrize("wrap", [lambda v: [v, 1], lambda v: (v,), lambda v: {"a": v}, lambda v: Slots((v,))])
def test_the_work_is_linear_in_the_depth(wrap: Callable[[Any], Any]) -> None:
    def looks(depth: int) -> int:
        value: Any = x()
        for _ in range(depth):
            value = wrap(value)
        seen: list[torch.Tensor] = []
        counted = Calls()
        with counted:
            map_tensors(value, torch.Tensor.double, lambda t: bool(seen.append(t)) or True)
        assert len(seen) == 1
        return counted.count

    assert looks(160) < 4.4 * looks(40)  # quadratic would be 16 times


class Calls:
    """Counts calls of Python functions."""

    count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"
