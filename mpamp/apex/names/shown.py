"""Lists that scripts may read, and whose changes would have no effect."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import AmpNotImplementedError

__all__ = ["Shown"]


class Shown(list[str]):
    """A list of the functions that amp casts; it can't be changed.

    Example:
        >>> Shown("exp log")
        ['exp', 'log']
    """

    def __init__(self, names: str = "") -> None:
        super().__init__(names.split())

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AmpNotImplementedError(
            "apex.amp.lists are shown as they are: changing them changes nothing here. Before amp.initialize call "
            "amp.register_half_function(module, name), register_float_function or register_promote_function; or give "
            "one region other rules by mpamp.autocast(device, ops={...})."
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
