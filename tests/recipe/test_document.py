from __future__ import annotations

from pathlib import Path

from gyre.recipe.document import attribute_docstrings, page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_of_keys_is_what_the_schema_says() -> None:
    assert (DOCS / "recipe.md").read_text() == page(), "run: python -m gyre.recipe.document > docs/recipe.md"


def test_notes_are_found_where_the_schema_has_them() -> None:
    assert attribute_docstrings()["Group", "groups_per_step"] == "B"
