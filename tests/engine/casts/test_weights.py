"""What is a weight, and how all tensors are found."""

from __future__ import annotations

import sys
import threading

import torch

from mpamp.engine.casts import weights


def test_a_search_for_tensors_finds_each_of_every_class() -> None:
    class Own(torch.Tensor):
        pass

    class OwnParameter(torch.nn.Parameter):
        pass

    made = [
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).as_subclass(Own),
        OwnParameter(torch.ones(2)),
    ]
    found = weights.live_tensors()
    assert [sum(tensor is each for tensor in found) for each in made] == [1, 1, 1, 1]
    assert all(issubclass(type(each), torch.Tensor) for each in found)


def test_a_search_for_tensors_finds_those_that_a_graph_holds() -> None:
    leaf = torch.nn.Parameter(torch.ones(2))
    product = leaf * 2
    graph = (product * product).sum()
    found = weights.live_tensors()
    assert [sum(tensor is each for tensor in found) for each in (leaf, product, graph)] == [1, 1, 1]


def test_a_search_for_tensors_harms_no_tuple_that_another_thread_is_building() -> None:
    """A tuple that a list of all objects has hold of can't be resized: those threads get a SystemError."""
    errors: list[BaseException] = []
    stop = threading.Event()

    def build() -> None:
        try:
            while not stop.is_set():
                tuple(len(range(n)) for n in range(30))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(20):
            weights.live_tensors()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
