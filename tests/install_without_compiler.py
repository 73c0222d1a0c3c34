"""The package as it installs on a machine without a C++ compiler.

Run by `make install-check` and not with the other tests, because pip fetches what the build needs.
The package's dependencies are not installed again: the new environment borrows those of the one
that runs this.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

from tests.conftest import ROOT

DECODE = """
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import specjax

    params = specjax.load("tiny")
    outputs = [
        specjax.decode(params, [[5, 6, 7]], max_new_tokens=8, drafter=drafter).tokens
        for drafter in (specjax.QSpec(), specjax.Autoregressive())
    ]
assert (outputs[0] == outputs[1]).all()
print(specjax.__file__)
for each in caught:
    if issubclass(each.category, RuntimeWarning):
        print(each.message)
"""


def test_it_installs_decodes_exactly_and_says_once_what_it_costs(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    own_build = ["-C", f"build-dir={tmp_path / 'build'}"]  # one without a compiler's traces
    broken = os.environ | {"CXX": str(shutil.which("false"))}
    subprocess.run([*pip, *own_build, str(ROOT)], env=broken, check=True)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))

    command = [str(python), "-c", DECODE]
    cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=cpu, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    where, *warned = result.stdout.splitlines()
    assert Path(where).is_relative_to(environment)
    assert len(warned) == 1 and "without a working C++ compiler" in warned[0]
    assert "times slower" in warned[0]
