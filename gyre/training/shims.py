"""What megatron-core needs in order to run on a machine without CUDA, and nothing else.

Owns every monkeypatch of the training room. Invariant: where CUDA exists, nothing here changes anything, so
that CPU and GPU share one code path (facts/megatron.md, section 2).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Make `torch.cuda.current_device()` name the CPU, process-wide. Does nothing with CUDA; may be called
    again."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = lambda *args, **kwargs: _NoStream()  # type: ignore[assignment, return-value]


def cuda_names_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """A scope in which "cuda" means the CPU; empty with CUDA. For building and stepping Megatron's
    optimizer."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaNamesOnCpu()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Imports and calls of Megatron without its lines about kernels that are not installed and options that
    we do not set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("megatron", "torch.distributed"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports of Megatron, quietly; without CUDA also without torch's compiler, which its decorators would load (a
    third of a rank's start, in CPU time) for fused functions that need a GPU and that we never call on a CPU."""
    compile_ = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        with quiet():
            yield
    finally:
        torch.compile = compile_


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """In the place of `torch.compile`, called and as a decorator with options: the function itself."""
    return function or (lambda decorated: decorated)


def router_without_transformer_engine() -> None:
    """Megatron's router of experts asks whether this function is None, and names it only where Transformer Engine is
    installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def token_dispatch_without_streams() -> None:
    """Megatron's dispatcher of tokens to experts makes a CUDA stream, on which it copies their numbers to the host, as
    an array where they are sizes to send; without CUDA they are on the host, in a tensor."""
    if torch.cuda.is_available():
        return
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return value.numpy() if as_numpy and torch.is_tensor(value) else value

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoStream()
    token_dispatcher.maybe_move_tensor_to_cpu = on_host


class _NoStream:
    """Stands for a CUDA stream: every method does nothing (megatron-core >= 0.19 asks for one)."""

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *args, **kwargs: self


class _CudaNamesOnCpu(TorchFunctionMode):
    """Redirects device="cuda", makes `.cuda()` the identity, and names types as `torch.cuda.*`.

    Megatron's optimizer writes the string "cuda" and compares `tensor.type()` with 'torch.cuda.FloatTensor'.
    """

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and (device == "cuda" or getattr(device, "type", None) == "cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


install()
