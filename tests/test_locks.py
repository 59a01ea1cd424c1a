"""Forks and threads at the worst moments: nothing hangs, and what is made is made once.

Each program runs in a process of its own that is killed if it hangs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import search_path

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SECONDS = 240
"""After which a program hangs. None takes a tenth of that, also on a loaded machine."""

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")

HEAD = """
import importlib, os, sys, threading, types
import torch, mpamp
from types import SimpleNamespace
torch.set_num_threads(1)
x = torch.ones(2, 2)
def product():
    with mpamp.autocast("cpu", dtype=torch.bfloat16):
        return str((x @ x).dtype)
def child():
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if product() == "torch.bfloat16" else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(tmp_path: Path, program: str, **modules: str) -> list[str]:
    """Return the words that a program prints, in a folder with some modules."""
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": search_path(ROOT, tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def install(tmp_path: Path, distribution: str, entry: str) -> None:
    info = tmp_path / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mpamp]\n{entry} = {distribution}\n")


# -- Forks ---------------------------------------------------------------------------------------------------

MOMENTS = [
    "mpamp.devices.registry._ask_for",
    "mpamp.plugins.manager.PluginManager.backend",
    "mpamp.devices.state.DeviceState.ask",
    "mpamp.engine.python.kernels._install_one",
    "mpamp.engine.python.kernels.tag_compiler_caches",
]
AT = """
moment = {moment!r}
path, _, name = moment.rpartition(".")
try:
    owner = importlib.import_module(path)
except ModuleNotFoundError:
    module, _, kind = path.rpartition(".")
    owner = getattr(importlib.import_module(module), kind)
original, inside, go_on = getattr(owner, name), threading.Event(), threading.Event()
def paused(*a, **k):
    inside.set()
    go_on.wait(2)  # a fork that waits for this thread is what is looked for: it goes on by itself
    return original(*a, **k)
setattr(owner, name, paused)
seen = []
thread = threading.Thread(target=lambda: seen.append(product()))
thread.start()
assert inside.wait(60), "never came there"
setattr(owner, name, original)
print(child())
go_on.set()
thread.join()
print(seen[0], product())
"""


@needs_fork
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_fork_during_another_threads_first_region(moment: str, tmp_path: Path) -> None:
    assert run(tmp_path, AT.format(moment=moment)) == ["0", "torch.bfloat16", "torch.bfloat16"]


IMPORTED_LATE = """
started, go_on = threading.Event(), threading.Event()
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            started.set()
            go_on.wait(2)
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=product)
thread.start()
assert started.wait(60), "it isn't imported late any more"
print(child())
go_on.set()
thread.join()
"""


@needs_fork
@pytest.mark.parametrize(
    "module", ["mpamp.plugins.manager", "mpamp.plugins.guard", "mpamp.engine.python.kernels", "mpamp.backends.cpu"]
)
def test_a_fork_while_a_part_of_mpamp_is_imported(module: str, tmp_path: Path) -> None:
    assert run(tmp_path, IMPORTED_LATE.format(module=module)) == ["0"]


@needs_fork
def test_a_fork_while_a_plugin_is_imported(tmp_path: Path) -> None:
    install(tmp_path, "slow_pack", "ops.slow")
    program = """
import builtins
builtins.started, builtins.go_on = threading.Event(), threading.Event()
thread = threading.Thread(target=product)
thread.start()
started.wait(60)
print(child())
thread.join()
print(product())
"""
    words = run(tmp_path, program, slow_pack="started.set()\ngo_on.wait(1)\n")
    assert words == ["0", "torch.bfloat16"]


@needs_fork
def test_a_plugin_may_fork_while_it_is_imported(tmp_path: Path) -> None:
    install(tmp_path, "forking", "ops.forking")
    source = "import os\npid = os.fork()\nif pid == 0:\n    os._exit(7)\n"
    source += "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    assert run(tmp_path, "print(product())", forking=source) == ["7", "torch.bfloat16"]


@needs_fork
def test_forks_among_threads_that_use_everything(tmp_path: Path) -> None:
    program = """
stop = threading.Event()
def work(n):
    while not stop.is_set():
        product()
        with mpamp.autocast("cpu", ops={"relu": ("fp32", "promote")[n % 2]}):
            torch.relu(x)
        mpamp.set_op_rules("cpu", {"gelu": "fp32"} if n % 2 else None)
        mpamp.register_op("aten::silu", "fp32")
        mpamp.clear_cache()
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
print({child() for _ in range(30)})
stop.set()
for t in threads: t.join()
"""
    assert run(tmp_path, program) == ["{0}"]


# -- Import locks --------------------------------------------------------------------------------------------

USES = {
    "asks for a device": "mpamp.get_backend('cpu')",
    "asks for its own device": "mpamp.autocast('npu')",
    "enters a region": "product()",
    "registers an op": "mpamp.register_op('aten::silu', 'fp32')",
    "registers a function": "mpamp.register_float_function(torch.nn.functional, 'mish')",
    "sets rules": "mpamp.set_op_rules('cpu', {'relu': 'fp32'})",
    "makes a scaler": "mpamp.GradScaler('cpu')",
}
PLUGIN = """
import builtins, torch, mpamp
from mpamp.plugins.hookspecs import hookimpl
if hasattr(builtins, "imported"):
    imported.set()
    go_on.wait(1)
try:
    {use}
except mpamp.UnknownDeviceError:
    pass
class Npu(mpamp.Backend):
    device_type, autocast_key = "npu", "AutocastPrivateUse1"
    def is_available(self):
        return False
@hookimpl
def mpamp_backends():
    return [Npu()]
@hookimpl
def mpamp_op_rules():
    return {{"gelu": "fp32"}}
"""
CROSSED = """
import builtins
builtins.imported, builtins.go_on, builtins.product = threading.Event(), threading.Event(), product
found = []
def import_it():
    import crossed
def ask():
    imported.wait(60)
    found.append(product())
threads = [threading.Thread(target=import_it), threading.Thread(target=ask)]
for t in threads: t.start()
for t in threads: t.join()
print(found[0], type(mpamp.get_backend('npu')).__name__, mpamp.get_op_table("cpu").policy("gelu", torch.bfloat16))
"""


@pytest.mark.parametrize(
    ("entry", "use"),
    [*(("ops.crossed", use) for use in USES), ("npu", "asks for its own device"), ("npu", "sets rules")],
)
def test_a_plugin_imported_on_one_thread_and_asked_for_on_another(entry: str, use: str, tmp_path: Path) -> None:
    install(tmp_path, "crossed", entry)
    dtype, backend, policy = run(tmp_path, CROSSED, crossed=PLUGIN.format(use=USES[use]))
    assert (dtype, backend) == ("torch.bfloat16", "Npu")
    assert entry == "npu" or policy == "fp32"


@pytest.mark.parametrize("use", [use for use in USES if use != "makes a scaler"])
def test_a_plugin_that_the_user_imports_and_that_uses_mpamp_meanwhile(use: str, tmp_path: Path) -> None:
    install(tmp_path, "crossed", "ops.crossed")
    program = f"""
import builtins
builtins.product = product
mpamp.get_backend("xpu") if {len(use) % 2} else None
import crossed
with mpamp.autocast("cpu", dtype=torch.bfloat16):
    print(torch.nn.functional.gelu(torch.ones(2, dtype=torch.bfloat16)).dtype)
print(type(mpamp.get_backend("npu")).__name__, mpamp.get_op_table("xpu").policy("gelu", torch.bfloat16))
"""
    words = run(tmp_path, program, crossed=PLUGIN.format(use=USES[use]))
    assert words == ["torch.float32", "Npu", "fp32"]


def test_many_threads_ask_for_everything_at_once(tmp_path: Path) -> None:
    for number in range(4):
        install(tmp_path, f"many{number}", f"ops.many{number}")
    source = """
import builtins, mpamp, torch
from mpamp.plugins.hookspecs import hookimpl
count = getattr(builtins, "count", {})
builtins.count = count
mpamp.get_backend(("cpu", "cuda", "xpu", "cpu")[NUMBER])
mpamp.register_op("aten::silu", "fp32")
@hookimpl
def mpamp_backends():
    count[NUMBER] = count.get(NUMBER, 0) + 1
    return []
@hookimpl
def mpamp_op_rules():
    return {("gelu", "relu", "tanh", "elu")[NUMBER]: "fp32"}
"""
    program = """
import random
wrong, start = [], threading.Barrier(16)
def work(n):
    start.wait()
    try:
        for step in range(6):
            what = (n + step) % 4
            if what == 0:
                assert product() == "torch.bfloat16"
            elif what == 1:
                importlib.import_module(f"many{n % 4}")
            elif what == 2:
                mpamp.set_op_rules(("cpu", "cuda", "xpu")[n % 3], {"selu": "fp32"})
            else:
                mpamp.register_op("aten::mish", "fp32")
    except BaseException as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
for t in threads: t.start()
for t in threads: t.join()
def rules(d):
    table = mpamp.get_op_table(d)
    return tuple(str(table.policy(op, torch.bfloat16)) for op in ("gelu", "relu", "tanh", "elu", "silu", "mish"))
import builtins
print(wrong, sorted(builtins.count.items()), set(map(rules, ("cpu", "cuda", "xpu"))), sep="|")
"""
    modules = {f"many{number}": source.replace("NUMBER", str(number)) for number in range(4)}
    wrong, counts, rules = " ".join(run(tmp_path, program, **modules)).split("|")
    assert ast.literal_eval(wrong) == []
    assert ast.literal_eval(counts) == [(n, 1) for n in range(4)]
    assert ast.literal_eval(rules) == {("fp32",) * 6}


def test_compiled_code_and_rules_take_each_others_locks_in_one_order(tmp_path: Path) -> None:
    program = """
import torch._dynamo
stop, wrong = threading.Event(), []
def set_rules():
    while not stop.wait(0.2):  # torch's reset of Dynamo under a thread that compiles can end the process
        mpamp.set_op_rules("cpu", {"gelu": "fp32"})
def compile_it():
    for n in range(6):
        f = torch.compile(lambda x, n=n: product_of(x) + n, backend="eager")
        wrong.append(f(x).dtype is not torch.bfloat16)
def product_of(x):
    with mpamp.autocast("cpu", dtype=torch.bfloat16):
        return x @ x
setter, compiler = threading.Thread(target=set_rules), threading.Thread(target=compile_it)
setter.start(); compiler.start(); compiler.join(); stop.set(); setter.join()
print(len(wrong), sum(wrong))
"""
    assert run(tmp_path, program) == ["6", "0"]


# -- Garbage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_first_region_has_the_collector_look_through_nothing_old(is_enabled: bool, tmp_path: Path) -> None:
    program = f"""
import gc
seen = []
gc.collect()
({{True: gc.enable, False: gc.disable}})[{is_enabled}]()
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
product()
print(max(seen, default=0), gc.isenabled())
"""
    assert run(tmp_path, program) == ["0", str(is_enabled)]
