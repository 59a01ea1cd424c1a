"""A script or a module run as Python runs it: as ``__main__``, with its own arguments and place to import from."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import click

__all__ = ["Program", "program_of", "run_script"]

INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""


class Program(click.Command):
    """A command whose options end where the program begins: at a script, or after the module of ``-m``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {name for p in self.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-m", "--"):
            at += 2 if args[at] in with_value else 1
        if args[at : at + 1] == ["-m"] and args[at + 1 :]:
            args = [*args[: at + 2], "--", *args[at + 2 :]]
        return super().parse_args(ctx, args)


def program_of(
    context: click.Context, module: str | None, arguments: tuple[str, ...]
) -> tuple[Path | str, tuple[str, ...]]:
    """Return what a command is to run, the path of a script or the name of a module, and its own arguments.

    Raises:
        click.UsageError: Neither is given, or there is no such script.
    """
    if module is not None:
        return module, arguments
    if not arguments:
        raise click.UsageError("Missing argument 'SCRIPT', or -m MODULE.", context)
    script = click.Path(exists=True, dir_okay=False, path_type=Path).convert(arguments[0], None, context)
    return script, arguments[1:]


def run_script(script: Path | str, arguments: Sequence[str] = ()) -> None:
    """Run a script by its path, or a module by its name, as ``python script.py`` and ``python -m module`` do.

    ``__main__`` is the program's from then on, as threads and exit handlers that outlive the call expect.

    Args:
        script: The path of a script, or the name of a module or package.
        arguments: What the program finds in ``sys.argv``.

    Raises:
        SystemExit: The program ended by it, or by an exception that click would take for its own.
        click.ClickException: There is no such module.

    Example:
        >>> import tempfile
        >>> program = Path(tempfile.mkdtemp(), "program.py")
        >>> _ = program.write_text("import sys; print(__name__, sys.argv[1:])")
        >>> before = sys.modules["__main__"], sys.argv, list(sys.path)
        >>> run_script(program, ["--lr", "1"])
        __main__ ['--lr', '1']
        >>> sys.modules["__main__"], sys.argv, sys.path[:] = before
    """
    if isinstance(script, Path):
        sys.path.insert(0, str(script.resolve().parent))
        code, origin, spec = _code_of(script), str(script), None
    else:
        sys.path.insert(0, str(Path.cwd()))
        code, origin, spec = _module_code(script)
    sys.argv = [origin, *arguments]
    try:
        exec(code, _new_main(origin, spec))
    except (EOFError, OSError, KeyboardInterrupt, click.ClickException, click.Abort, click.exceptions.Exit) as error:
        # click takes these for its own, and hides them: end as Python does.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def _code_of(script: Path) -> CodeType:
    with io.open_code(str(script.resolve())) as file:
        return compile(file.read(), str(script), "exec", dont_inherit=True)


def _module_code(name: str) -> tuple[CodeType, str, ModuleSpec]:
    """Return a module's code, where it is from, and its spec; a package's are those of its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise click.ClickException(f"can't find module {name!r}: {error}") from error
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") and spec is not None else None
    if spec is None or code is None:
        raise click.ClickException(f"no module named {name!r} that can be run")
    return code, spec.origin or name, spec


def _new_main(origin: str, spec: ModuleSpec | None) -> dict[str, Any]:
    """Put a new module in ``__main__``'s place and return its namespace."""
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = origin, spec
    main.__loader__ = None if spec is None else spec.loader
    main.__package__ = None if spec is None else spec.parent
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return vars(main)
