"""The files and folders that CONTRIBUTING.md and the READMEs of the packages name exist, and every room has a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "trainer/README.md", "orchestrator/README.md", "datasets/README.md")
PATH = re.compile(r"`([\w./-]+(?:\.py|\.md|\.toml|\.yaml|\.txt|/))`")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    folder = (ROOT / page).parent
    # Not in the repository: the user's own file, what may never exist, and the files of a run.
    named = set(PATH.findall((ROOT / page).read_text())) - {"digits.py", "utils.py", "__init__.py"}
    assert len(named) >= 10
    assert sorted(each for each in named if not ((folder / each).exists() or (ROOT / each).exists())) == []


@pytest.mark.parametrize("package", ["trainer", "orchestrator"])
def test_every_room_of_a_package_is_in_its_readme(package: str) -> None:
    rooms = {file.parent.name for file in (ROOT / package).glob("*/__init__.py")}
    named = set(re.findall(r"`(\w+)/`", (ROOT / package / "README.md").read_text()))
    assert rooms - named == set()


def test_every_file_of_datasets_is_in_its_readme() -> None:
    files = {file.name for file in (ROOT / "datasets").glob("*.py")}
    assert files - set(re.findall(r"`(\w+\.py)`", (ROOT / "datasets" / "README.md").read_text())) == set()
