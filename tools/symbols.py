"""Compare what a library of the compiled engine takes from torch with the list in the repository.

    symbols.py LIBRARY              compare; what is new or gone is an error
    symbols.py LIBRARY --write      write the list

The list is that of torch 2.13 on Linux: what isn't in it may be missing, or be called otherwise, in another version. A
library that wasn't stripped is also searched for look-ups in pybind11's registry of types, which is torch's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "engine" / "compiled" / "symbols.txt"
REGISTRY = "pybind11::detail::type_caster_generic"
"""Through which pybind11 looks types up: an ABI of its own, which changes between versions of torch."""

_OF_OTHERS = re.compile(r"@|^_?Py|^_ITM_|^__|^(?:operator |std::|vtable for (?:std|__cxxabiv1)::|typeinfo for std::)")


def _nm(library: Path, *options: str) -> list[str]:
    command = ["nm", "-C", *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def of_torch(library: Path) -> set[str]:
    """Return the symbols that a library takes from torch."""
    undefined = (line.split(maxsplit=1)[1] for line in _nm(library, "-D", "--undefined-only"))
    return {symbol for symbol in undefined if not _OF_OTHERS.search(symbol)}


def lookups(library: Path) -> list[str]:
    """Return the functions in a library that look types up in pybind11's registry; none are seen in a stripped one."""
    return [line for line in _nm(library) if REGISTRY in line]


def listed() -> set[str]:
    """Return the symbols of the list."""
    return set(LIST.read_text(encoding="utf-8").splitlines())


def difference(found: Iterable[str], known: Iterable[str]) -> str:
    """Return what is new and what is gone, a symbol a line; an empty text where nothing is."""
    found, known = set(found), set(known)
    return "".join([f"new:  {s}\n" for s in sorted(found - known)] + [f"gone: {s}\n" for s in sorted(known - found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = of_torch(options.library)
    if options.write:
        LIST.write_text("".join(f"{symbol}\n" for symbol in sorted(found)), encoding="utf-8")
        return
    told = difference(found, listed()) + "".join(f"looks up: {line}\n" for line in lookups(options.library))
    if told:
        raise SystemExit(f"{told}See that each minor version of torch has what is new, then add --write.")
    print(f"{len(found)} symbols of torch, as in {LIST.name}")


if __name__ == "__main__":
    main()
