"""Megatron without CUDA: what its imports find in the place of torch's compiler."""

from __future__ import annotations

import pytest
import torch

from gyre.training import shims

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is replaced")


def double(value: int) -> int:
    return 2 * value


def test_imports_find_functions_as_they_are() -> None:
    with shims.importing():
        assert torch.compile(double) is double
        assert torch.compile(dynamic=True)(double) is double


def test_the_compiler_is_back_even_after_an_import_that_failed() -> None:
    compiler = torch.compile
    with pytest.raises(ImportError), shims.importing():
        raise ImportError
    assert torch.compile is compiler
