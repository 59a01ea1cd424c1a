"""The entry point of the ``mpamp`` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the ``mpamp`` command, or say which extra it needs.

    Raises:
        SystemExit: Always: with the command's exit code, or with what to install if click or rich is missing.
    """
    try:
        from mpamp.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"click", "rich"}:
            raise
        sys.exit(f"The mpamp command needs {package}, which is not installed: pip install 'mpamp[cli]'")
    app()


if __name__ == "__main__":
    main()
