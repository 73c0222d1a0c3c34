"""Every public name can be imported, says what it does, and stands in the API page."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import checkpoints_tools
import pallas_kernels
import specjax

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
NAMED = re.findall(r"^::: specjax\.([\w.]+)$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("name", specjax.__all__)
def test_name_is_documented(name: str) -> None:
    documentation = inspect.getdoc(getattr(specjax, name))
    assert documentation and not documentation.startswith(f"{name}(")  # a dataclass's own
    assert name in NAMED or any(each.startswith(f"{name}.") for each in NAMED)


@pytest.mark.parametrize("name", [each for each in NAMED if "." in each])
def test_name_of_a_module_exists(name: str) -> None:
    module, _, attribute = name.partition(".")
    holder = specjax.parallel if module == "parallel" else import_module(f"specjax.{module}")
    assert getattr(holder, attribute).__doc__


@pytest.mark.parametrize("package", [specjax, pallas_kernels, checkpoints_tools])
def test_no_function_hides_a_module(package: ModuleType) -> None:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        holder, _, name = found.name.rpartition(".")
        if name != "_native":  # the C++ library, which Python does not import
            module = import_module(found.name)
            assert getattr(import_module(holder), name) is module


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=str
)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if not (path.parent / link).exists()]
    assert missing == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
