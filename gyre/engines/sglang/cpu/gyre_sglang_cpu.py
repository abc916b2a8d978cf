"""What SGLang 0.5.23 needs to serve without a GPU; copied into its environment by `gyre engine install sglang`.

Owns the changes, and there are no others: two torchvision operators are declared whose compiled library cannot load
beside torch for CPU (`declare_torchvision`, called by a .pth file at every start); and SGLang's own plugin mechanism
(`register`, by entry point) replaces four things that ask CUDA for what plain memory needs not, and two copies of KV
pages that only the compiled kernels have. Invariant: nothing here changes what is computed.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any


class TorchvisionFirst(importlib.abc.MetaPathFinder):
    """Declares the operators just before torchvision is imported for the first time; never finds a module itself."""

    def __init__(self) -> None:
        self.library: Any = None
        self.asked = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and not self.asked:
            self.asked = True  # first of all: importing torch may ask for torchvision
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # declarations live as long as this object
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def declare_torchvision() -> None:
    """Called by the .pth file, perhaps more than once: costs nothing until torchvision is imported."""
    if not any(isinstance(finder, TorchvisionFirst) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFirst())


def register() -> None:
    """Called by SGLang in each of its processes."""
    import sglang.srt.mem_cache.pool_host.mha as host_pool
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    memory = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(memory, _pin_nothing, HookType.REPLACE)
    loader = "sglang.srt.model_loader.remote_instance_weight_loader_utils.register_memory_region"
    HookRegistry.register(loader, _register_parameters, HookType.REPLACE)
    sender = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk"
    HookRegistry.register(sender, _no_pinned_indices, HookType.BEFORE)
    host_pool.transfer_kv_all_layer_direct_lf_pf = _pages_to_host
    host_pool.transfer_kv_per_layer_direct_pf_lf = _layer_from_host


def _pin_nothing(buffer: Any, registration_granularity_bytes: Any = None) -> None:
    """Host memory is device memory here: there is nothing to pin."""


def _register_parameters(model: Any, transfer_engine: Any) -> dict[str, tuple[int, int, int]]:
    """Each parameter by itself: name -> (address, elements, bytes an element). CUDA would list whole segments."""
    regions = {}
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        if transfer_engine.register_memory(parameter.data_ptr(), nbytes) != 0:
            raise RuntimeError(f"{name}: {nbytes} bytes could not be registered with the transfer engine")
        regions[name] = (parameter.data_ptr(), parameter.numel(), parameter.element_size())
    return regions


def _no_pinned_indices(self: Any, request: Any, *_: Any, **__: Any) -> None:
    """The prefill side would pin its page numbers in memory of the host."""
    type(request.disagg_kv_sender).supports_host_tensor_indices = False


def _pages_to_host(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Device to host, all layers. src_ptrs: one [rows, ...] tensor a layer, keys of all layers before values;
    dst_ptrs: one [pages, layers, page_size, ...] tensor for keys, one for values; row numbers in whole pages. SGLang
    names the arguments."""
    layers = len(src_ptrs) // len(dst_ptrs)
    starts = zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True)
    for source, target in starts:
        for kind, pages in enumerate(dst_ptrs):
            for layer in range(layers):
                page = pages[target // page_size, layer]
                page.copy_(src_ptrs[kind * layers + layer][source : source + page_size].reshape(page.shape))


def _layer_from_host(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """Host to device, one layer: the reverse of `_pages_to_host`."""
    starts = zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True)
    for source, target in starts:
        for pages, rows in zip(src_ptrs, dst_ptrs, strict=True):
            page = rows[target : target + page_size]
            page.copy_(pages[source // page_size, layer_id].reshape(page.shape))
