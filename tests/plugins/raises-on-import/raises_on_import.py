"""A plugin whose vendor's library is missing."""

from __future__ import annotations

raise ImportError("libbroken.so: cannot open shared object file")
