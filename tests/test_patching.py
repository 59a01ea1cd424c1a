"""Layers over attributes: each can be taken away, in any order, and the owner has its own again after the last."""

from __future__ import annotations

import itertools
import threading
import types
from typing import Any

import pytest

from mpamp.patching import Patches, own_value


class Base:
    def inherited(self) -> str:
        return "base"


def owner() -> Any:
    class Owner(Base):
        value = 1

        def own(self) -> str:
            return "own"

        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

        @staticmethod
        def static() -> str:
            return "static"

    return Owner


def told(word: str) -> Any:
    return lambda below: lambda *args: f"{word} {below(*args)}"


@pytest.mark.parametrize("gone", [*itertools.permutations("abc")], ids="".join)
@pytest.mark.parametrize("name", ["own", "inherited"])
def test_layers_go_in_any_order(gone: tuple[str, ...], name: str) -> None:
    cls = owner()
    before, text = dict(vars(cls)), getattr(cls(), name)()
    layers = {word: Patches() for word in "abc"}
    for word, patches in layers.items():
        patches.wrap(cls, name, told(word))
    for word in gone:
        assert getattr(cls(), name)() == " ".join([*reversed(layers), text])
        layers.pop(word).undo()
    assert getattr(cls(), name)() == text
    assert dict(vars(cls)) == before


def test_a_value_covers_what_is_under_it_whatever_that_becomes() -> None:
    module = types.ModuleType("module")
    module.f = own = lambda: "own"  # type: ignore[attr-defined]
    under, over, top = Patches(), Patches(), Patches()
    under.wrap(module, "f", told("under"))
    over.put(module, "f", lambda: "value")
    top.wrap(module, "f", told("top"))
    under.undo()
    assert module.f() == "top value"
    assert own_value(module, "f") is own
    over.undo()
    assert module.f() == "top own"
    top.undo()
    assert module.f is own


def test_class_and_static_methods_come_back_as_they_were() -> None:
    cls = owner()
    before = dict(vars(cls))
    patches = Patches()
    patches.wrap(cls, "of_class", lambda below: classmethod(lambda _: f"wrapped {below()}"))
    patches.wrap(cls, "static", lambda below: staticmethod(lambda: f"wrapped {below()}"))
    assert (cls.of_class(), cls().static()) == ("wrapped Owner", "wrapped static")
    patches.undo()
    assert dict(vars(cls)) == before


def test_new_names_go_and_missing_ones_cannot_be_wrapped() -> None:
    module, patches = types.ModuleType("module"), Patches()
    with pytest.raises(AttributeError, match="no 'f'"):
        patches.wrap(module, "f", told("a"))
    assert not patches
    assert own_value(module, "f") is None
    patches.put(module, "f", 1)
    assert (bool(patches), patches.names(), own_value(module, "f")) == (True, ["module.f"], None)
    patches.undo()
    assert not hasattr(module, "f")


def test_a_layer_that_cannot_be_made_changes_nothing() -> None:
    cls, patches = owner(), Patches()
    before = dict(vars(cls))
    with pytest.raises(ZeroDivisionError):
        patches.wrap(cls, "own", lambda below: 1 / 0)
    assert dict(vars(cls)) == before
    assert not patches


def test_what_another_has_put_over_it_stays() -> None:
    cls = owner()
    own, under, over = cls.own, Patches(), Patches()
    under.wrap(cls, "own", told("under"))
    theirs = cls.own = told("theirs")(cls.own)
    over.wrap(cls, "own", told("over"))
    assert cls().own() == "over theirs under own"
    under.undo()
    assert cls().own() == "over theirs under own"
    over.undo()
    assert cls.own is theirs
    cls.own = own
    with_more = Patches()
    with_more.wrap(cls, "own", told("more"))
    assert cls().own() == "more own"
    with_more.undo()
    assert cls.own is own


def test_threads_leave_no_trace() -> None:
    cls = owner()
    before, errors = dict(vars(cls)), []

    def work(word: str) -> None:
        try:
            for _ in range(300):
                patches = Patches()
                patches.wrap(cls, "own", told(word))
                assert word in cls().own().split()
                patches.undo()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(word,)) for word in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert dict(vars(cls)) == before
