"""A wheel with compiled engines in it is one of this Python and platform; ``tools/wheel.py`` puts them there."""

from pathlib import Path

from setuptools import Distribution, setup

ENGINES = Path(__file__).parent / "mpamp" / "engine" / "compiled" / "prebuilt"


class MpampDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return ENGINES.is_dir() and any(ENGINES.iterdir())


setup(distclass=MpampDistribution)
