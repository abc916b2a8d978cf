from pathlib import Path


def test_sum_is_there():
    assert Path("/app/sum.txt").is_file()


def test_sum_is_right():
    assert Path("/app/sum.txt").read_text().split() == ["108"]
