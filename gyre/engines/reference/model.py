"""The model: transformers' own code with the slot attention, and its weights as named tensors.

Invariant: a weight update either names only known tensors of the right shapes, or changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gyre.engines.reference.slots import ATTENTION, Plan, Shape, attention
from gyre.errors import UserError


class Model:
    """A causal language model of full attention from a local Hugging Face folder."""

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        # Seconds of import: kept off the path of everything but a starting engine.
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, attention)
        self.path = path
        self._net = _load_net(path, dtype)
        self._net.set_attn_implementation(ATTENTION)
        self._parameters: dict[str, torch.nn.Parameter] = dict(self._net.named_parameters())
        for parameter in self._parameters.values():
            parameter.data = parameter.data.clone()  # memory of our own, so that `release` really frees it
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._places = _places(self._shapes)
        self._missing: set[str] = set()
        config = self._net.config
        self.context_length = int(config.max_position_embeddings)
        self.vocab_size = int(self._net.get_input_embeddings().num_embeddings)
        self.eos_ids = _eos_ids(self._net)
        heads = int(config.num_attention_heads)
        self.shape = Shape(
            layers=int(config.num_hidden_layers),
            heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            dtype=dtype,
            chosen=int(config.num_experts_per_tok) if getattr(config, "num_experts", 0) else 0,
        )
        self._routed: list[torch.Tensor] = []
        if self.shape.chosen:
            self._watch_routers()

    def _watch_routers(self) -> None:
        """Each layer's router says which experts it chose, in the order of the layers."""
        for layer in self._net.base_model.layers:
            layer.mlp.gate.register_forward_hook(lambda _module, _inputs, found: self._routed.append(found[-1]))

    def routed(self) -> torch.Tensor | None:
        """Experts of the rows of the last `hidden`, [tokens, layers, chosen]; None for a dense model."""
        return torch.stack(self._routed, dim=1) if self.shape.chosen else None

    @property
    def ready(self) -> bool:
        """True if every tensor holds weights."""
        return not self._missing

    @property
    def missing(self) -> list[str]:
        """Tensors without weights since `resume`."""
        return sorted(self._missing)

    def hidden(self, tokens: list[int], positions: list[int], plan: Plan) -> torch.Tensor:
        """Final hidden states, [tokens, hidden]; the plan says which rows belong to which slot."""
        self._routed.clear()
        out = self._net.base_model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            plan=plan,
        )
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] in float32."""
        return self._net.get_output_embeddings()(hidden).float()

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors in by their Hugging Face names.

        Raises ValueError, before any copy, for an unknown name or shape.
        """
        wanted = [(name, tensor) for name, tensor in named if not self._is_tied(name)]
        for name, tensor in wanted:
            place = self._places.get(name)
            if place is None:
                raise ValueError(f"the model has no parameter {name!r}")
            if place.shape != tensor.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model needs {list(place.shape)}")
        for name, tensor in wanted:
            place = self._places[name]
            self._parameters[place.parameter].data[place.index].copy_(tensor)
            self._missing.discard(name)

    def load_folder(self, path: str) -> None:
        """Copy in the weights of another folder of the same architecture.

        Raises ValueError and changes nothing else.
        """
        try:
            fresh = _load_net(path, self.shape.dtype)
        except (OSError, ValueError, UserError) as error:
            raise ValueError(f"no weights in {path}: {error}") from error
        held = {name: parameter.data for name, parameter in fresh.named_parameters()}
        places = _places({name: tensor.shape for name, tensor in held.items()})
        self.load([(name, held[place.parameter][place.index]) for name, place in places.items()])

    def _is_tied(self, name: str) -> bool:
        """The output embedding of a tied model is the input embedding; senders may still name it."""
        return name == "lm_head.weight" and name not in self._parameters

    def release(self) -> None:
        """Free the parameters' memory; their contents are gone."""
        for parameter in self._parameters.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._missing = set(self._places)

    def resume(self) -> None:
        """Take the parameters' memory again. It is not `ready` until every parameter was loaded."""
        for name, parameter in self._parameters.items():
            parameter.data = torch.zeros(self._shapes[name], dtype=self.shape.dtype)

    def checksum(self) -> dict[str, Any]:
        """Digests as SGLang's weights checker reports them: 16 hex digits a tensor, and one over all."""
        sums: dict[str, str] = {}
        for name in sorted(self._parameters):
            data = self._parameters[name].data.contiguous().view(torch.uint8)
            sums[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
        return {"checksums": sums, "digest": hashlib.sha256(json.dumps(sums).encode()).hexdigest()}


@dataclass(frozen=True)
class Place:
    """Where a named tensor of a Hugging Face folder lies: a part of a parameter."""

    parameter: str
    index: tuple[int | slice, ...]
    shape: torch.Size


def _places(shapes: dict[str, torch.Size]) -> dict[str, Place]:
    """Every tensor's place. transformers keeps a layer's experts in two stacked parameters; folders, and whoever sends
    weights, name the projections of each expert."""
    places: dict[str, Place] = {}
    for name, shape in shapes.items():
        prefix, dot, last = name.rpartition(".experts.")
        if not dot or last not in ("gate_up_proj", "down_proj"):
            places[name] = Place(name, (), shape)
            continue
        rows = shape[1] // 2 if last == "gate_up_proj" else shape[1]
        for expert in range(shape[0]):
            for part, projection in enumerate(("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)):
                index = (expert, slice(part * rows, (part + 1) * rows))
                tensor = f"{prefix}.experts.{expert}.{projection}.weight"
                places[tensor] = Place(name, index, torch.Size((rows, shape[2])))
    return places


def _load_net(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    if not (Path(path) / "config.json").is_file():
        raise UserError(f"{path} is not a Hugging Face model folder: config.json is missing")
    net = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    kinds = set(getattr(net.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UserError(f"{path}: the reference engine serves full attention only, this model has {sorted(kinds)}")
    return net.eval().requires_grad_(False)


def _eos_ids(net: Any) -> frozenset[int]:
    for config in (getattr(net, "generation_config", None), net.config):
        found = getattr(config, "eos_token_id", None)
        if isinstance(found, int):
            return frozenset([found])
        if isinstance(found, list):
            return frozenset(found)
    return frozenset()
