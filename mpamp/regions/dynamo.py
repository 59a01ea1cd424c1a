"""A region in the code that Dynamo compiles, wherever it is kept: a constant, guarded on by value.

Dynamo has no public way to say what entering an object means. It asks by an object's type what stands for it while it
traces: there regions have an entry. What stands for one is a context as torch's own are, so that a graph may break
inside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..engine.compiling import Contexts, run_while_tracing
from ..importing import after_import
from ..torch_internals import (
    DYNAMO,
    SUPPORTED_NODES,
    attribute_method,
    constant_variable,
    context_variable,
    enter_autocast,
    equals_match,
    exit_autocast,
    register_constant,
    type_handlers,
)

__all__ = ["Entered", "is_known_to_dynamo", "serve_dynamo"]

_ATTRIBUTES = ("device_type", "dtype", "enabled", "keeps_casts")
_known: list[type] = []
"""What stands for a region, once Dynamo is imported."""


def is_known_to_dynamo() -> bool:
    """Tell whether Dynamo knows regions: a torch may come whose Dynamo can't be told of them."""
    return bool(_known)


class Entered:
    """Regions of ``torch.autocast`` in the graph that is being made, entered while it is, until ``leave``."""

    __slots__ = ("_modes", "_proxies")

    def __init__(self, tx: Any, contexts: Contexts) -> None:
        self._modes: list[Any] = []
        self._proxies: list[Any] = []
        tx.output.add_cleanup_hook(self._end)  # where no graph comes of it
        for context in contexts:
            # torch's cache is on in them: kernels take it as the sign to look for a mark.
            self._modes.append(enter_autocast(*context, True))
            self._proxies.append(_node(tx, enter_autocast, (*context, True)))

    def leave(self, tx: Any) -> None:
        """Leave them, here and in the graph."""
        self._end()
        while self._proxies:
            _node(tx, exit_autocast, (self._proxies.pop(),))

    def _end(self) -> None:
        while self._modes:
            exit_autocast(self._modes.pop())


def _node(tx: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return tx.output.create_node("call_function", function, args, {})


def serve_dynamo(region: type, contexts_of: Callable[[Any], Contexts]) -> None:
    """Have Dynamo know the regions of a class, now or once it is imported.

    Args:
        region: The class; its objects are equal where they mean the same.
        contexts_of: Returns the contexts that stand for one, where it is entered.
    """
    if region not in SUPPORTED_NODES:
        register_constant(region)  # Dynamo guards on such objects by value
    after_import(DYNAMO, lambda: _register(region, contexts_of))


def _register(region: type, contexts_of: Callable[[Any], Contexts]) -> None:
    try:
        places, sourceless = type_handlers()
        variable = _variable(contexts_of)
    except (AttributeError, ImportError, TypeError):  # another Dynamo than those known
        return
    guard = equals_match()

    def wrap(self: Any, value: Any) -> Any:
        self.install_guards(guard)
        return variable(value, source=self.source)

    for handlers in places:
        handlers[region] = wrap
    sourceless[region] = lambda tx, value: variable(value)
    _known[:] = [variable]


@run_while_tracing
def _same(region: Any) -> Any:
    return region


def _variable(contexts_of: Callable[[Any], Contexts]) -> type:
    """Return the class of what stands for a region while Dynamo traces; derived from Dynamo's own, which is big."""
    base: Any = context_variable()

    class RegionVariable(base):  # type: ignore[misc]
        _nonvar_fields = {"region", "entered", *base._nonvar_fields}  # noqa: RUF012

        def __init__(self, region: Any, **options: Any) -> None:
            options.pop("target_values", None)
            super().__init__(target_values=None, **options)
            self.region = region
            self.entered: list[Entered] = []

        def enter(self, tx: Any) -> Any:
            self.entered.append(Entered(tx, contexts_of(self.region)))
            return self

        def exit(self, tx: Any, *args: Any) -> Any:
            self.entered.pop().leave(tx)
            return constant_variable(None)

        def reconstruct_type(self, codegen: Any) -> None:
            """Load what returns the region when it is called: the code that goes on after a graph break does so."""
            again = functools.partial(_same, self.region)
            name = codegen.tx.output.install_global("mpamp_region", again)
            codegen.append_output(codegen.create_load_global(name, add=True))

        def as_python_constant(self) -> Any:
            return self.region

        def python_type(self) -> type:
            return type(self.region)

        def _attribute(self, tx: Any, name: str) -> Any:
            if name in _ATTRIBUTES:
                return constant_variable(getattr(self.region, name))
            return getattr(super(), getattr_name)(tx, name)

    getattr_name = attribute_method(base)
    setattr(RegionVariable, getattr_name, RegionVariable._attribute)
    return RegionVariable
