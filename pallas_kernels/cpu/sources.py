"""The digest of the C++ sources, which the library remembers from its build.

CMake runs this file as a script. An installed package has no sources and compares nothing; a
repository compares, because the library that is installed may be of other sources.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).resolve().parent


def digest() -> str | None:
    """Sixteen hexadecimal digits; None where the package has no sources."""
    build = HERE / "CMakeLists.txt"
    if not build.is_file():
        return None
    found = hashlib.sha256(build.read_bytes())
    for file in sorted((HERE / "src").rglob("*")):
        if file.suffix in (".h", ".cc"):
            found.update(file.relative_to(HERE).as_posix().encode() + b"\n" + file.read_bytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    print(digest(), end="")
