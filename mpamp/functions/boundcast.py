"""What a function registered on one object is replaced by: it goes with the object into copies and pickles."""

from __future__ import annotations

import copy
import weakref
from types import FunctionType
from typing import Any

from ..rules.policy import CastPolicy
from .annotated import casting

__all__ = ["BoundCast"]


class BoundCast:
    """An object's method with its arguments cast; a bound method would run the original's weights in copies of it.

    It doesn't keep the object alive, as an attribute of it.
    """

    def __init__(self, owner: Any, function: FunctionType, policy: CastPolicy) -> None:
        self._owner = weakref.ref(owner)
        self._function = casting(function, policy)
        self._policy = policy
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__module__, self.__doc__ = function.__module__, function.__doc__

    @property
    def __self__(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(f"the object is gone on which {self.__qualname__} was registered.")
        return owner

    @property
    def __wrapped__(self) -> Any:
        return self._function.__wrapped__.__get__(self.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._owner(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundCast:
        return _of(copy.deepcopy(self.__self__, memo), self)

    def __reduce__(self) -> Any:
        return _restored, (self.__self__, self.__name__, self._policy.value)


def _of(owner: Any, original: BoundCast) -> BoundCast:
    return BoundCast(owner, original._function.__wrapped__, original._policy)


def _restored(owner: Any, name: str, policy: str) -> BoundCast:
    """Return what a pickle holds; the owner has nothing but its class yet."""
    return BoundCast(owner, getattr(type(owner), name), CastPolicy.parse(policy))
