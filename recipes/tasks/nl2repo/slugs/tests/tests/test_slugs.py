import pytest
from slugs import slugify, unique


@pytest.mark.parametrize(("text", "slug"), [("Hello, World!", "hello-world"), ("--a--b--", "a-b"), ("...", "")])
def test_slugify(text, slug):
    assert slugify(text) == slug


def test_separator():
    assert slugify("a b c", "_") == "a_b_c"


def test_unique_is_the_slug_when_it_is_free():
    assert unique("A b", set()) == "a-b"


def test_unique_counts_from_two():
    assert unique("A b", {"a-b", "a-b-2"}) == "a-b-3"
