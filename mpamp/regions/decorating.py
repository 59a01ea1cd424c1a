"""A region as a decorator: of functions, methods, generators, coroutines and async generators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["decorate"]

MakeRegion = Callable[[], AbstractContextManager[Any]]


def decorate(function: Any, region: MakeRegion) -> Any:
    """Return a function, generator, coroutine or async generator such that it runs in a new region at each step.

    Raises:
        TypeError: It isn't callable, or it is a class.
    """
    if isinstance(function, staticmethod | classmethod):
        return type(function)(decorate(function.__func__, region))
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"a region decorates functions, got {function!r}; for a class, decorate the methods that should run in it."
        )
    body = _body(function)
    if inspect.isasyncgenfunction(body):
        wrapper: Any = _async_generator(function, region)
    elif inspect.iscoroutinefunction(body):
        wrapper = _coroutine(function, region)
    elif inspect.isgeneratorfunction(body):
        wrapper = _generator(function, region)
    else:

        def wrapper(*a: Any, **k: Any) -> Any:
            with region():
                return function(*a, **k)

    wrapper.__script_unsupported = "a decorated function is not supported in script mode"
    return functools.wraps(function)(wrapper)


def _body(function: Any) -> Any:
    """Return what runs when ``function`` is called: the ``__call__`` of an object, or what a partial one is of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _steps(steps: Any, region: MakeRegion) -> Generator[Any, Any, Any]:
    """Drive a generator or an awaitable's iterator so that each of its steps, and only they, run in the region."""
    step, sent = steps.send if hasattr(steps, "send") else lambda _: next(steps), None
    while True:
        try:
            with region():
                item = step(sent)
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
            step = steps.send if hasattr(steps, "send") else lambda _: next(steps)
        except GeneratorExit:
            with region():
                steps.close()
            raise
        except BaseException as error:
            step, sent = steps.throw, error


class _Awaitable:
    __slots__ = ("_awaitable", "_region")

    def __init__(self, awaitable: Any, region: MakeRegion) -> None:
        self._awaitable, self._region = awaitable, region

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._awaitable.__await__(), self._region)


def _generator(function: Any, region: MakeRegion) -> Any:
    def wrapper(*a: Any, **k: Any) -> Any:
        return (yield from _steps(function(*a, **k), region))

    return wrapper


def _coroutine(function: Any, region: MakeRegion) -> Any:
    async def wrapper(*a: Any, **k: Any) -> Any:
        return await _Awaitable(function(*a, **k), region)

    return wrapper


def _async_generator(function: Any, region: MakeRegion) -> Any:
    async def wrapper(*a: Any, **k: Any) -> Any:
        generator = function(*a, **k)
        step = generator.asend(None)
        try:
            while True:
                try:
                    item = await _Awaitable(step, region)
                except StopAsyncIteration:
                    return
                try:
                    step = generator.asend((yield item))
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step = generator.athrow(error)
        finally:
            await _Awaitable(generator.aclose(), region)

    return wrapper
