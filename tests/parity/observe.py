"""What one call did under autocast: the ops that it came down to, their dtypes, and the dtypes that came out.

``python -m tests.parity.observe`` prints that, for every row of torch's native tables, under torch's own
autocast before mpamp is imported, in mpamp's regions, under torch's autocast again, and under none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity.arguments import Maker, arguments

LOWER = (torch.bfloat16, torch.float16)
FAKE = "fake "
PLACES = ("cpu", "fake cuda", "fake xpu", "cuda")
"""Where calls are made: on a device, or on fake tensors of one, for which no card is needed."""
Observation = dict[str, Any]
Regime = Callable[[str, torch.dtype], contextlib.AbstractContextManager[Any]]
_QUERIES = ("prim::device",)
_MOVES = ("aten::_to_copy", "aten::to", "aten::detach", "aten::alias", *_QUERIES)


class Recorder(TorchDispatchMode):
    """Records every op below autocast, casts only if ``moves``, with the dtypes of the tensors that it is given."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.ops: list[str] = []
        self._left_out = _QUERIES if moves else _MOVES

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in self._left_out:
            self.ops.append(f"{func}({dtypes_of((args, kwargs))})")
        return func(*args, **(kwargs or {}))


def dtypes_of(values: Any) -> str:
    """Return the dtypes of the tensors in ``values``, in order."""
    found = [str(v.dtype).removeprefix("torch.") for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
    return ", ".join(found)


def forms(lower: torch.dtype) -> dict[str, list[torch.dtype]]:
    """Return the dtypes that a call's floating tensors take in turn, by the name of the form."""
    full, double = torch.float32, torch.float64
    other = next(d for d in LOWER if d is not lower)
    return {
        "float32": [full],
        "parameters": [full],
        "lower": [lower],
        "float32, lower": [full, lower],
        "lower, float32": [lower, full],
        "other": [other],
        "lower, other": [lower, other],
        "float64": [double],
        "float64, float32": [double, full],
        "float32, float64": [full, double],
        "float64, lower": [double, lower],
    }


def observe(op: OpOverload, place: str, lower: torch.dtype, form: str, regime: Regime) -> Observation:
    """Call ``op`` in ``regime`` and return what happened."""
    recorder, device = Recorder(), device_of(place)
    with tensors_at(place):
        args, kwargs = arguments(op, Maker(device, forms(lower)[form], form == "parameters"))
        with regime(device, lower), recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                out = f"-> {dtypes_of(op(*args, **kwargs))}"
            except Exception as error:  # whatever an op raises on these dtypes
                out, reason = "raises", f"{type(error).__name__}: {error}"[:200]
            else:
                reason = ""
    return {"ops": recorder.ops, "out": out, "reason": reason}


def tensors_at(place: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the tensors of ``place`` can be made."""
    return FakeTensorMode(allow_non_fake_inputs=True) if place.startswith(FAKE) else contextlib.nullcontext()


def observe_row(op: OpOverload, place: str, regime: Regime) -> dict[str, Observation]:
    """Return what happened in every form that the call can take, for both lower dtypes."""
    found = {}
    for lower in LOWER:
        for form, dtypes in forms(lower).items():
            if len(dtypes) <= dtypes_taken(op) and not (form == "parameters" and place.startswith(FAKE)):
                found[f"{str(lower).removeprefix('torch.')}: {form}"] = observe(op, place, lower, form, regime)
    return found


def dtypes_taken(op: OpOverload) -> int:
    """Return how many floating tensors a call of ``op`` has here."""
    make = Maker("cpu", [torch.float32])
    arguments(op, make)
    return make.made


def rows(place: str) -> list[str]:
    """Return the overloads that have a kernel at a device's Autocast key, ours included once one is installed."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device_of(place).upper()}")
    return sorted(n for n in found if n.startswith("aten::") and can_be_called(n, place))


def can_be_called(name: str, place: str) -> bool:
    """Tell whether an overload can be called here at all.

    Those that name dimensions (until torch 2.12) can't: ``torch.ops`` takes no named tensors. Nor can cuDNN's RNN
    on fake tensors: its autocast kernel lays the weights out anew, on a card. Layers of quantized weights take these
    packed, as only torch.ao makes them.
    """
    own = name.removeprefix("aten::")
    if "::" in own or own.startswith(("quantized_", "fbgemm_")):
        return False
    left_out = ("imname", ".names_", "_cudnn_rnn") if place.startswith(FAKE) else ("imname", ".names_")
    return not any(part in name for part in left_out)


def overload(name: str) -> OpOverload:
    op, _, which = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, op), which or "default")


def device_of(place: str) -> str:
    return place.removeprefix(FAKE)


def place_of(device: str) -> str:
    """Return where calls of a device can be made on any machine."""
    return device if device == "cpu" else FAKE + device


def is_here(place: str) -> bool:
    """Tell whether this machine has such a place; beside a card, fake tensors of another device can't be made."""
    if place.startswith(FAKE):
        card = torch.accelerator.current_accelerator(check_available=True)
        return card is None or card.type == device_of(place)
    return place == "cpu" or bool(getattr(torch, place).is_available())


@contextlib.contextmanager
def torchs(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Switch torch's own autocast on, also for a device that isn't on this machine."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


@contextlib.contextmanager
def none(device: str, dtype: torch.dtype) -> Iterator[None]:
    """No autocast at all."""
    yield


@contextlib.contextmanager
def stand_ins(place: str) -> Iterator[None]:
    """On fake tensors, stand in for the one op that looks for its device's library before it does anything."""
    if not place.startswith(FAKE):
        yield
        return

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any) -> torch.Tensor:
        return query + key + value

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes another kernel's place
        library.impl("scaled_dot_product_attention", attention, "CompositeImplicitAutograd")
    try:
        yield
    finally:
        library._destroy()


def observe_all(regime: Regime, only: dict[str, list[str]]) -> dict[str, dict[str, dict[str, Observation]]]:
    """Return the observations of every row in ``only``, by place and overload."""
    found = {}
    for place, names in only.items():
        with stand_ins(place):
            found[place] = {name: observe_row(overload(name), place, regime) for name in names}
    return found


def main() -> None:
    """Write what torch's autocast does to one file; then, with mpamp imported, what it and its absence do."""
    torch.set_num_threads(1)
    logging.disable()  # fake tensors log every error
    only = {place: rows(place) for place in PLACES if is_here(place)}
    found = {"torch": observe_all(torchs, only)}
    assert "mpamp" not in sys.modules
    import mpamp

    found["mpamp"] = observe_all(mpamp.autocast, only)
    found["torch, outside"] = observe_all(torchs, only)
    found["none"] = observe_all(none, only)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
