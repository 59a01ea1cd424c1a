"""Writes through tensors and pointers that share a weight's memory but not its version counter are seen."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp.engine.casts import aliases
from tests import processes
from tests.torches import HOLDS_STORAGES

BRAIN = torch.bfloat16
Tensor, Parameter = torch.Tensor, nn.Parameter
X = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def cache_is_left_empty() -> Iterator[None]:
    mpamp.clear_cache()
    yield
    mpamp.clear_cache()


class Program:
    """A weight all of whose elements are the same, and uses of it in one region, or in one each."""

    def __init__(self, persistent: bool) -> None:
        self.weight = Parameter(torch.ones(4, 4), requires_grad=False)
        self.persistent = persistent
        self.region = None if persistent else mpamp.autocast("cpu", dtype=BRAIN)

    def __enter__(self) -> Program:
        if self.region is not None:
            self.region.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.region is not None:
            self.region.__exit__(*error)

    def use(self, weight: Tensor | None = None) -> float:
        weight = self.weight if weight is None else weight
        if self.region is not None:
            return functional.linear(X, weight)[0, 0].item() / 4
        with mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=True):
            return functional.linear(X, weight)[0, 0].item() / 4

    def casts_of(self, do: Callable[[], object]) -> int:
        before = mpamp.cache_info().casts
        do()
        return mpamp.cache_info().casts - before


@pytest.fixture(params=[False, True], ids=["region", "persistent"])
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    with Program(request.param) as made:
        yield made


# -- Handed out after a cast was made --------------------------------------------------------------------


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _fill_typed(tensor: Tensor, value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that typed storages will go, once
        tensor.storage().fill_(value)


def _bytes(value: float) -> torch.UntypedStorage:
    return torch.full((16,), float(value)).untyped_storage()


WRITES: dict[str, Callable[[Tensor, float], object]] = {
    "data": lambda w, v: w.data.fill_(v),
    "data of data": lambda w, v: w.data.data.fill_(v),
    "data of detach": lambda w, v: w.detach().data.fill_(v),
    "detach of data": lambda w, v: w.data.detach().fill_(v),
    "view of data": lambda w, v: w.data.view(-1)[:].fill_(v),
    "EMA": lambda w, v: w.data.mul_(0).add_(torch.ones(4, 4), alpha=v),
    "lerp": lambda w, v: w.data.lerp_(torch.full((4, 4), float(v)), 1),
    "foreach": lambda w, v: torch._foreach_copy_([w.data], [torch.full((4, 4), float(v))]),
    "out": lambda w, v: torch.add(torch.zeros(4, 4), v, out=w.data),
    "item": lambda w, v: w.data.__setitem__(slice(None), v),
    "inference": lambda w, v: _in_inference(lambda: w.data.fill_(v)),
    "given": lambda w, v: setattr(w, "data", torch.full((4, 4), float(v))),
    "parameter of data": lambda w, v: Parameter(w.data, requires_grad=False).fill_(v),
    "numpy": lambda w, v: w.numpy().fill(v),
    "numpy of detach": lambda w, v: w.detach().numpy()[:].fill(v),
    "asarray": lambda w, v: np.asarray(w.data).fill(v),
    "dlpack": lambda w, v: torch.from_dlpack(w).fill_(v),  # type: ignore[attr-defined]
    "dlpack's capsule": lambda w, v: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w.detach())).fill_(v),  # type: ignore[attr-defined]
    "NumPy's dlpack": lambda w, v: torch.from_dlpack(w.detach()).numpy().fill(v),  # type: ignore[attr-defined]
    "storage's copy": lambda w, v: _storage(w).copy_(_bytes(v)),
    "typed storage's fill": _fill_typed,
    "set from the storage": lambda w, v: torch.empty(0).set_(_storage(w), 0, (16,), (1,)).fill_(v),
    "set from the weight": lambda w, v: torch.empty(0).set_(w).fill_(v),
    "data of another": lambda w, v: _of_another(w).fill_(v),
}


def test_writes_of_bytes_are_seen(program: Program) -> None:
    for write in (lambda s: s.fill_(0), lambda s: s.__setitem__(slice(0, 64), 0)):
        program.weight.fill_(1)
        assert program.use() == 1
        write(program.weight.untyped_storage())
        assert program.use() == 0


def _in_inference(write: Callable[[], object]) -> None:
    with torch.inference_mode():
        write()


def _of_another(weight: Tensor) -> Tensor:
    other = torch.empty(4, 4)
    other.data = weight
    return other


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen(program: Program, write: Callable[[Tensor, float], object]) -> None:
    assert program.use() == 1
    for value in (2, 3):
        write(program.weight, value)
        assert program.use() == value
    assert program.casts_of(program.use) == 0


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda w: w.data,
    "detach of data": lambda w: w.data.detach(),
    "row of data": lambda w: w.data.view(-1),
    "numpy": lambda w: w.detach().numpy(),
    "view of numpy": lambda w: w.numpy()[:][:],
    "dlpack": lambda w: torch.from_dlpack(w),  # type: ignore[attr-defined]
    "NumPy's dlpack": lambda w: torch.from_dlpack(w.detach()).view(-1),  # type: ignore[attr-defined]
    "another's data": _of_another,
    "set": lambda w: torch.empty(0).set_(w),
}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_writes_are_seen_as_long_as_an_alias_lives(
    program: Program, alias: Callable[[Tensor], Any], before: bool
) -> None:
    if not before:
        program.use()
    held = alias(program.weight)
    assert program.use() == 1
    for value in (2, 3, 4):
        held[:] = value
        assert program.use() == value
    held[:] = 5
    del held
    assert program.use() == 5
    assert program.casts_of(lambda: [program.use() for _ in range(3)]) == 0


def test_aliases_of_before_the_first_region_are_seen(tmp_path: Path) -> None:
    worker = (
        "import torch, mpamp\n"
        "layer = torch.nn.Linear(4, 4, bias=False); held = [p.data for p in layer.parameters()]\n"
        "with torch.no_grad():\n"
        "    for value in range(1, 4):\n"
        "        for each in held: each.fill_(value)\n"
        "        with mpamp.autocast('cpu', dtype=torch.bfloat16, persistent_cache=True):\n"
        "            assert layer(torch.ones(1, 4))[0, 0].item() == 4 * value\n"
    )
    done = processes.python("-c", worker)
    assert done.returncode == 0, done.stderr


# -- Swaps ----------------------------------------------------------------------------------------------


def test_a_swap_and_back_serves_what_is_there(program: Program) -> None:
    weight = program.weight
    first, second = weight.data, torch.full((4, 4), 10.0)
    for i in range(1, 4):
        weight.data = first
        assert program.use() == i
        weight.data = second
        assert program.use() == 9 + i
        first.add_(1)
        second.add_(1)


def test_what_is_written_through_the_weight_while_it_is_elsewhere(program: Program) -> None:
    weight = program.weight
    first, second = weight.data, torch.full((4, 4), 10.0)
    assert program.use() == 1
    weight.data = second
    weight.add_(1)
    assert program.use() == 11
    weight.data = first
    assert program.use() == 1


def test_two_weights_in_one_memory(program: Program) -> None:
    weight, other = program.weight, Parameter(torch.zeros(4, 4), requires_grad=False)
    assert program.use() == 1
    other.data = weight.data
    assert program.use(other) == 1
    for i in range(2, 6):
        (weight, other)[i % 2].fill_(i)
        assert program.use(weight) == program.use(other) == i
        (weight, other)[i % 2].data.fill_(10 * i)
        assert program.use(weight) == program.use(other) == 10 * i


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_weights_swapped_for_an_ema_and_back(fused: bool) -> None:
    def values(region: Callable[[], Any]) -> list[float]:
        weight, out = Parameter(torch.ones(4, 4)), []
        shadow = weight.detach().clone()
        optimizer = torch.optim.SGD([weight], lr=0.25, fused=fused)
        for _ in range(4):
            with region():
                functional.linear(X, weight).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            shadow.lerp_(weight.detach(), 0.5)
            backup, weight.data = weight.data, shadow
            with torch.no_grad(), region():
                out.append(functional.linear(X, weight)[0, 0].item())
            weight.data = backup
        return out

    expected = values(lambda: mpamp.autocast("cpu", dtype=BRAIN))
    assert expected == values(lambda: torch.autocast("cpu", dtype=BRAIN))
    assert expected == values(lambda: mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=True))


def test_many_swaps_hold_little(program: Program) -> None:
    weight, second = program.weight, torch.full((4, 4), 2.0)
    for _ in range(300):
        backup, weight.data = weight.data, second
        weight.data = backup
    assert program.use() == 1
    gc.collect()
    assert sum(type(each) is Tensor and each.numel() == 0 for each in gc.get_objects()) < 200
    assert program.casts_of(program.use) == 0


# -- Programs that only read ----------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], object]] = {
    "data": lambda w: w.data.norm(),
    "detach": lambda w: w.detach().norm(),
    "state": lambda w: torch.save({"w": w}, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.dumps(w),
    "address": lambda w: (w.data_ptr(), w.untyped_storage().data_ptr(), w.untyped_storage().nbytes()),
    "parameter": lambda w: Parameter(w),
    "load": lambda w: torch.empty(4, 4).copy_(w),
}


HOLDS = pytest.mark.skipif(
    not HOLDS_STORAGES,
    reason="torch.save leaves cycles, and before torch 2.10 a collection takes what a cast is known by",
)


@pytest.mark.parametrize("read", [pytest.param(r, id=n, marks=HOLDS if n == "state" else ()) for n, r in READS.items()])
def test_reading_costs_no_cast(program: Program, read: Callable[[Tensor], object]) -> None:
    program.use()
    assert program.casts_of(lambda: [(read(program.weight), program.use()) for _ in range(40)]) == 0


def test_an_alias_that_is_held_costs_no_cast(program: Program) -> None:
    program.use()
    held = [program.weight.data, program.weight.detach(), program.weight.data.view(-1)]
    assert program.casts_of(lambda: [program.use() for _ in range(40)]) == 0
    del held


def test_an_array_costs_a_cast_at_each_use_and_one_after(program: Program) -> None:
    program.use()
    held = program.weight.numpy()
    assert program.casts_of(lambda: [program.use() for _ in range(3)]) == 3
    del held
    assert program.casts_of(lambda: [program.use() for _ in range(3)]) == 1


def test_an_ordinary_step_hands_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[Any] = []
    monkeypatch.setattr(aliases.Record, "note", lambda *args: seen.append(args))
    monkeypatch.setattr(aliases.Record, "hand_out", lambda *args: seen.append(args))
    for _ in range(2):
        with mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=True):
            loss = model(X).float().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert not seen


def test_a_weight_that_shares_memory_with_a_state_that_is_held_is_kept(program: Program) -> None:
    state = {"weight": torch.ones(4, 4)}
    weight = Parameter(state["weight"], requires_grad=False)
    program.use(weight)
    assert program.casts_of(lambda: [program.use(weight) for _ in range(20)]) == 0
    state["weight"].fill_(2)
    assert program.use(weight) == 2


def test_records_go_with_the_memory() -> None:
    with mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=True):
        weight = Parameter(torch.ones(4, 4), requires_grad=False)
        functional.linear(X, weight)
        held = weight.data
        functional.linear(X, weight)
        gone = weakref.ref(weight.untyped_storage())
        del weight, held
        gc.collect()
        left = gone()
        if (
            left is not None
        ):  # before torch 2.10 a storage that the compiled engine holds weakly keeps its Python object
            assert not HOLDS_STORAGES
            with pytest.raises(RuntimeError, match="not allocated"):
                left.tolist()


# -- Kinds of memory --------------------------------------------------------------------------------------


def test_casts_of_memory_that_other_processes_have_are_not_kept(program: Program) -> None:
    program.use()
    program.weight.share_memory_()
    assert program.casts_of(lambda: [program.use() for _ in range(2)]) == 2
    shared = Parameter(torch.ones(4, 4).share_memory_(), requires_grad=False)
    assert program.casts_of(lambda: [program.use(shared) for _ in range(2)]) == 2


def test_loaded_weights_are_kept(program: Program) -> None:
    file = io.BytesIO()
    torch.save(torch.ones(4, 4), file)
    file.seek(0)
    weight = Parameter(torch.load(file), requires_grad=False)
    program.use(weight)
    assert program.casts_of(lambda: program.use(weight)) == 0


# -- Torch as it was --------------------------------------------------------------------------------------


def test_the_class_has_what_it_had() -> None:
    with mpamp.autocast("cpu", dtype=BRAIN):
        pass
    base = torch._C.TensorBase
    for name in ("data", "set_", "numpy"):
        assert getattr(Tensor, name) is getattr(base, name)
    assert Parameter.data is base.data  # type: ignore[attr-defined,comparison-overlap]
    assert inspect.signature(Tensor.__dlpack__).parameters
    tensor = torch.ones(2)
    assert Tensor.data.__get__(tensor).data_ptr() == tensor.data_ptr()  # type: ignore[attr-defined]
    assert "numpy" in repr(tensor.numpy) or callable(tensor.numpy)
    with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
        del tensor.data


def test_a_class_with_its_own_functions_is_called_once(program: Program) -> None:
    calls: list[Any] = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    program.use()
    tensor = torch.ones(4).as_subclass(Own)
    calls.clear()
    _ = tensor.data
    tensor.data = torch.ones(4)
    tensor.numpy()
    assert calls == [Tensor.data.__get__, Tensor.data.__set__, Tensor.numpy]  # type: ignore[attr-defined]


def test_modes_see_what_they_saw(program: Program) -> None:
    calls: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    program.use()
    with Functions():
        data = program.weight.data
    assert calls == [Tensor.data.__get__]  # type: ignore[attr-defined]
    data.fill_(2)
    assert program.use() == 2
    calls.clear()
    with Ops():
        torch._C.TensorBase.data.__get__(program.weight)  # type: ignore[attr-defined]
        expected = list(calls)
        calls.clear()
        data = program.weight.data
    assert calls == expected
    data.fill_(3)
    assert program.use() == 3


def test_in_compiled_code(program: Program) -> None:
    def norm(weight: Tensor) -> Tensor:
        return weight.data.norm()

    def halve(weight: Tensor) -> None:
        weight.data.mul_(0.5)

    program.use()
    assert torch.compile(norm, fullgraph=True, backend="eager")(program.weight).item() == 4
    assert program.use() == 1
    torch.compile(halve, fullgraph=True, backend="aot_eager")(program.weight)
    assert program.use() == 0.5


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda w: w.data.fill_(2), id="data"),
        pytest.param(lambda w: w.detach().data.fill_(2), id="data of detach"),
        pytest.param(lambda w: torch._foreach_add_([w.data], 1), id="foreach"),
    ],
)
def test_data_written_in_compiled_code_is_seen(program: Program, write: Callable[[Tensor], Any], backend: str) -> None:
    """Also where a backend runs the graph as Dynamo wrote it, which names what is behind ``data``."""
    program.use()
    torch.compile(write, backend=backend)(program.weight)
    assert program.use() == 2
    torch._dynamo.reset()


def test_data_handed_out_by_compiled_code_is_followed(program: Program) -> None:
    program.use()
    data, _ = torch.compile(lambda w: (w.data, w + 1), backend="eager")(program.weight)
    for value in (2, 3):
        data.fill_(value)
        assert program.use() == value
    torch._dynamo.reset()


class _Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("mode", [_Seeing, mpamp.trace])
def test_writes_are_seen_where_a_mode_saw_the_cast_being_made(
    program: Program, mode: Callable[[], Any], before: bool
) -> None:
    held = program.weight.data if before else None
    with mode():
        assert program.use() == 1
    held = program.weight.data if held is None else held
    held.fill_(2)
    with mode():
        assert program.use() == 2
        program.weight.untyped_storage().fill_(0)
        assert program.use() == 0


def test_in_other_systems(program: Program) -> None:
    program.use()
    weight = program.weight
    scripted = torch.jit.script(_scripted)
    assert scripted(weight).item() == 16
    torch.func.grad(lambda x: (x * weight.data).sum())(torch.ones(4, 4))
    torch.func.vmap(lambda x: x * weight.data)(torch.ones(2, 4, 4))
    assert program.casts_of(lambda: [program.use() for _ in range(3)]) <= 1
    other = Parameter(torch.full((4, 4), 7.0), requires_grad=False)
    torch.utils.swap_tensors(weight, other)
    assert program.use() == 7


def _scripted(weight: Tensor) -> Tensor:
    return weight.data.sum()


def test_moved_and_back(program: Program) -> None:
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    layer.weight.data.fill_(1)
    assert program.use(layer.weight) == 1
    layer.double()
    layer.weight.data.mul_(2)
    layer.float()
    assert program.use(layer.weight) == 2
    home = layer.weight.data
    layer.weight.data = torch.empty(0)
    home.mul_(2)
    layer.weight.data = home
    assert program.use(layer.weight) == 4
    layer.load_state_dict({"weight": torch.full((4, 4), 3.0)})
    assert program.use(layer.weight) == 3


def test_from_another_thread() -> None:
    with Program(persistent=True) as program:
        program.use()
        for value in (2, 3):
            writer = threading.Thread(target=lambda value=value: program.weight.data.fill_(value))  # type: ignore[misc]
            writer.start()
            writer.join()
            used: list[float] = []
            reader = threading.Thread(target=lambda used=used: used.append(program.use()))  # type: ignore[misc]
            reader.start()
            reader.join()
            assert program.use() == value
            assert used == [value]


def test_verify_cache_finds_what_is_seen_by_nothing(program: Program) -> None:
    import ctypes

    program.use()
    program.weight.data.zero_()
    assert mpamp.verify_cache() == []
    assert program.use() == 0
    ctypes.memset(program.weight.data_ptr(), 1, 64)
    assert len(mpamp.verify_cache()) == 1


def test_what_a_collection_leaves_of_a_record(program: Program) -> None:
    """Before torch 2.10 one takes what a storage's Python object has, such as a record, if it is in a cycle."""
    program.use()
    held = {"array": program.weight.numpy(), "data": program.weight.data}
    for value, name in enumerate(("array", "data", "array"), 2):
        cycle: list[Any] = [program.weight.untyped_storage()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert program.use() == value - 1
        held[name].fill(value) if name == "array" else held[name].fill_(value)
        assert program.use() == value
