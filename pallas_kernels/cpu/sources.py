"""The digest of the C++ sources, which the build stores in the library.

CMake runs this file as a script. A repository compares the digests, because the installed library
may come from other sources. An installed package has no sources and compares nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).resolve().parent


def digest() -> str | None:
    """The digest, sixteen hexadecimal digits; None if the package has no sources."""
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
