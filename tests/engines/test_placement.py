"""Where a folder's tensors lie in an engine's memory, against parameters that are put together the other way round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from gyre.engines.errors import EngineRefused
from gyre.engines.sglang.placement import Coverage, Heads, parts
from gyre.engines.types import Parameter, RankMemory

HIDDEN, INNER, PADDED, VOCABULARY, HEAD = 8, 13, 16, 26, 4
LAYER = "model.layers.0."
UNKNOWN = -1.0


def folder(heads: int, key_values: int, experts: int) -> dict[str, torch.Tensor]:
    """Tensors in Hugging Face's naming, every element another number."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{LAYER}self_attn.q_proj.weight": (heads * HEAD, HIDDEN),
        f"{LAYER}self_attn.k_proj.weight": (key_values * HEAD, HIDDEN),
        f"{LAYER}self_attn.v_proj.weight": (key_values * HEAD, HIDDEN),
        f"{LAYER}self_attn.q_proj.bias": (heads * HEAD,),
        f"{LAYER}self_attn.k_proj.bias": (key_values * HEAD,),
        f"{LAYER}self_attn.v_proj.bias": (key_values * HEAD,),
        f"{LAYER}self_attn.q_norm.weight": (HEAD,),
        f"{LAYER}self_attn.o_proj.weight": (HIDDEN, heads * HEAD),
        f"{LAYER}mlp.gate.weight": (max(1, experts), HIDDEN),
    }
    for at in [f"{LAYER}mlp.experts.{number}." for number in range(experts)] or [f"{LAYER}mlp."]:
        shapes |= {f"{at}{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}down_proj.weight"] = (HIDDEN, INNER)
    made, count = {}, 0
    for name, shape in shapes.items():
        made[name] = torch.arange(count, count + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        count += made[name].numel()
    return made


def held(
    found: dict[str, torch.Tensor], rank: int, ranks: int, key_values: int, experts: int
) -> dict[str, torch.Tensor]:
    """A rank's parameters, as an engine that shards and fuses them has them."""

    def rows(name: str, index: int = rank, count: int = ranks) -> torch.Tensor:
        return found[name].chunk(count)[index]

    def columns(name: str) -> torch.Tensor:
        return found[name].chunk(ranks, dim=1)[rank]

    def inner(name: str, dim: int) -> torch.Tensor:
        """As SGLang for CPU has it, in whole blocks."""
        more = torch.zeros([PADDED - INNER if at == dim else HIDDEN for at in range(2)], dtype=torch.float64)
        return torch.cat([found[name], more], dim=dim).chunk(ranks, dim=dim)[rank]

    def vocabulary(name: str) -> torch.Tensor:
        padded = torch.full((32, HIDDEN), 0.0, dtype=torch.float64)
        padded[:VOCABULARY] = found[name]
        return padded.chunk(ranks)[rank]

    holders = min(ranks, key_values)
    own = rank // (ranks // holders)
    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    made = {name: vocabulary(name) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for kind in ("weight", "bias"):
        keys = [rows(f"{attention}{name}_proj.{kind}", own, holders) for name in "kv"]
        made[f"{attention}qkv_proj.{kind}"] = torch.cat([rows(f"{attention}q_proj.{kind}"), *keys])
    made[f"{attention}o_proj.weight"] = columns(f"{attention}o_proj.weight")
    for name in ("model.norm.weight", f"{attention}q_norm.weight", f"{mlp}gate.weight"):
        made[name] = found[name]
    at = [f"{mlp}experts.{number}." for number in range(experts)] or [mlp]
    fused = [torch.cat([inner(f"{one}{name}_proj.weight", 0) for name in ("gate", "up")]) for one in at]
    down = [inner(f"{one}down_proj.weight", 1) for one in at]
    if experts:
        return made | {f"{mlp}experts.w13_weight": torch.stack(fused), f"{mlp}experts.w2_weight": torch.stack(down)}
    return made | {f"{mlp}gate_up_proj.weight": fused[0], f"{mlp}down_proj.weight": down[0]}


def told(parameters: dict[str, torch.Tensor]) -> RankMemory:
    return RankMemory("h:1", {name: Parameter(0, one.numel(), one.element_size()) for name, one in parameters.items()})


@given(st.sampled_from([1, 2, 4]), st.sampled_from([(4, 1), (4, 2), (8, 4), (4, 4)]), st.sampled_from([0, 2, 4]))
def test_ranks_have_what_an_engine_that_shards_it_would_have(ranks: int, heads: tuple[int, int], experts: int) -> None:
    found = folder(*heads, experts)
    wanted = [held(found, rank, ranks, heads[1], experts) for rank in range(ranks)]
    memory = [told(one) for one in wanted]
    got = [
        {name: torch.full((one.numel(),), UNKNOWN, dtype=one.dtype) for name, one in there.items()} for there in wanted
    ]
    coverage = Coverage(memory)
    for name, tensor in found.items():
        for part in parts(name, tensor, memory, Heads(heads[1], experts)):
            got[part.rank][part.parameter][part.start : part.start + part.tensor.numel()] = part.tensor.reshape(-1)
            coverage.add(part)
    coverage.check()
    for rank in range(ranks):
        for name, one in wanted[rank].items():
            assert torch.equal(got[rank][name], one.reshape(-1)), (rank, name)


def test_what_the_engine_has_no_place_for_is_refused() -> None:
    found = folder(4, 2, 0)
    memory = [told(held(found, 0, 1, 2, 0))]
    norm = found["model.norm.weight"]
    with pytest.raises(EngineRefused, match=r"rank 0 has no parameter model\.extra\.weight"):
        list(parts("model.extra.weight", norm, memory, Heads(2)))
    with pytest.raises(EngineRefused, match=r"8 elements of 4 bytes .* 8 of 8 bytes"):
        list(parts("model.norm.weight", norm.float(), memory, Heads(2)))
    with pytest.raises(EngineRefused, match="do not fit"):
        list(parts("model.norm.weight", norm.repeat(2), memory, Heads(2)))


def test_a_parameter_that_no_tensor_fills_is_named() -> None:
    found = folder(4, 2, 0)
    memory = [told(held(found, 0, 1, 2, 0))]
    coverage = Coverage(memory)
    for name, tensor in found.items():
        if name != f"{LAYER}self_attn.v_proj.weight":
            for part in parts(name, tensor, memory, Heads(2)):
                coverage.add(part)
    with pytest.raises(EngineRefused, match=r"64 elements of model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        coverage.check()
