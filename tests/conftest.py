"""What holds for all tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor

from tests import combinations, places, processes
from tests.ranks import Reports, reports_of_two

# Each worker of pytest-xdist would otherwise start as many threads as there are cores, and small ops crawl.
torch.set_num_threads(1)
# A build of the compiled engine may lie in the cache directory: whoever runs the tests says which engine is meant.
os.environ.setdefault("MPAMP_ENGINE", "python")


def _import_ipex(moment: str) -> None:
    """Import Intel's extension before mpamp, or after a region of mpamp's has been left."""
    if moment not in ("before", "after"):
        raise pytest.UsageError(f"MPAMP_TEST_IPEX is 'before' or 'after', got {moment!r}")
    if moment == "after":
        import mpamp

        with mpamp.autocast("cpu"):
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16
    import intel_extension_for_pytorch  # noqa: F401


_OTHERWISE_BESIDE_IPEX = {
    "test_native_rows_are_what_torch_registers[cpu]": "it registers kernels for more ops than torch",
    "test_unlisted_functions_run_as_called[O1-mean]": "its mean on the processor is made of sum, which is listed",
    "test_unlisted_functions_run_as_called[O4-mean]": "its mean on the processor is made of sum, which is listed",
    "test_a_vendor_module_imported_later_does_not_stay_on_top": "imported first, it leaves no import to watch for",
}


def _init_context_of_cards_that_are_here(device: torch.device) -> None:
    """Make no context on a device that isn't here: torch would, for its fake tensors, beside another card."""
    if getattr(torch, device.type).is_available():
        _init_gpu_context(device)


_init_gpu_context = fake_tensor.init_gpu_context
fake_tensor.init_gpu_context = _init_context_of_cards_that_are_here

if "MPAMP_TEST_IPEX" in os.environ:
    _import_ipex(os.environ["MPAMP_TEST_IPEX"])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "python_engine: looks into the engine in Python, which the other leaves idle")
    config.addinivalue_line("markers", "place(name): where the test runs, such as 'xpu' or 'fake xpu'")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places.pick(config, items)
    skip = pytest.mark.skip(reason="it looks into the engine in Python")
    for item in items if os.environ.get("MPAMP_ENGINE") == "compiled" else ():
        if item.get_closest_marker("python_engine") is not None:
            item.add_marker(skip)
    combinations.choose(config, items)
    for item in items if "MPAMP_TEST_IPEX" in os.environ else ():
        if item.name in _OTHERWISE_BESIDE_IPEX:
            item.add_marker(pytest.mark.xfail(reason=_OTHERWISE_BESIDE_IPEX[item.name], strict=False))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    places.summarize(terminalreporter)


def pytest_unconfigure() -> None:
    processes.stop()


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Run a module's ``WORKER`` as two processes, once, and return what each reports."""
    return reports_of_two(request.module.WORKER, tmp_path_factory.mktemp("ranks"))
