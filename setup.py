"""Builds the C module; all else is in ``pyproject.toml``."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

HERE = Path(__file__).parent
NATIVE = Path("capture", "native")


class BuildExtension(build_ext):
    """Says in one line what is missing: what setuptools says of a command that failed helps nobody."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            raise SystemExit(
                "torch-capture needs a C compiler (cc or gcc) and the headers of Python to build its C module; "
                f"install them (on Debian: apt-get install gcc python3-dev), or a wheel of torch-capture [{error}]"
            ) from None


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "torch-capture does not support free-threaded builds of Python: its C module relies on the GIL. "
        "Use the ordinary build of the same version (python3.14 instead of python3.14t)"
    )


def found(pattern: str) -> list[str]:
    return sorted(str(NATIVE / path.name) for path in (HERE / NATIVE).glob(pattern))


setup(
    ext_modules=[Extension("capture.native._native", sources=found("*.c"), depends=found("*.h"))],
    cmdclass={"build_ext": BuildExtension},
)
