"""What a GGUF file's metadata says, in the fields of a config.json, and how families name their tensors."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...common.errors import LoadError, UnsupportedError
from ..config import ARCHITECTURE_OF_MODEL_TYPE
from ..fields import INT32_MAX, Fields
from ..rope import llama3_divisors
from ..rope_config import RopeConfig, mention_unknown
from .gguf_file import GGUFFile, chunks
from .gguf_vocabulary import end_token_ids

DIVISORS, SHORT_DIVISORS, LONG_DIVISORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")
)
ROPE_TENSORS = (DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Of a family's own metadata, what says nothing that the tensors or other fields do not.
IGNORED = frozenset(
    {
        *(
            "vocab_size",
            "tensor_data_layout",
            "attention.value_length",
            "attention.causal",
            "expert_used_count",
        ),
        *("rope.scaling.finetuned", "attention.layer_norm_epsilon"),
    }
)
# Sizes of Gemma whose scores are scaled by the width of a head as hidden_size has it; no field tells.
GEMMA_LAYERS_OF_27B = {46, 62}


def no_fields_of_its_own(file: GGUFFile, own: Fields) -> Mapping[str, Any]:
    """What every family says is all that there is."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a family's files differ from LLaMA's."""

    architecture: str  # in config.json
    layer_modules: Mapping[str, str] = field(default_factory=dict)  # beside LLaMA's, or in their place
    has_interleaved_heads: bool = False  # query and key rows that turn together lie side by side
    norm_offset: float = 0.0  # by how much norms are larger in the file
    config: Callable[[GGUFFile, Fields], Mapping[str, Any]] = no_fields_of_its_own

    def checkpoint_name(self, name: str, path: Path) -> str:
        """A GGUF tensor's name in a Hugging Face checkpoint."""
        module, _, kind = name.rpartition(".")
        modules = {**LAYER_MODULES, **self.layer_modules}
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        if layer is not None and layer[2] in modules:
            return f"model.layers.{layer[1]}.{modules[layer[2]]}.{kind}"
        if module not in MODULES:
            raise UnsupportedError(f"{path} holds the tensor {name}, which {self.architecture} does not have")
        return f"{MODULES[module]}.{kind}"


def checkpoint_config(file: GGUFFile, dtype: torch.dtype) -> dict[str, Any]:
    """What the file's metadata says, in the fields of a config.json."""
    refuse_parts(file)
    family, own = family_of(file), _own_metadata(file)
    if "token_embd.weight" not in file.tensors:
        raise LoadError(f"{file.path} lacks token_embd.weight")
    hidden_size, num_heads = own.integer("embedding_length"), own.integer("attention.head_count")
    rotated = own.integer("rope.dimension_count", None)
    experts = own.integer("expert_count", 0, minimum=0)
    if experts > 1:
        raise UnsupportedError(f"{file.path} mixes {experts} experts; expert_count above 1 is not supported")
    config = {
        "architectures": [family.architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": own.integer("feed_forward_length"),
        "num_hidden_layers": own.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.integer("attention.head_count_kv", num_heads),
        "head_dim": own.integer("attention.key_length", rotated or _head_dim(own)),
        "rms_norm_eps": shortest(own.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": own.integer("context_length"),
        "rope_parameters": _rope_parameters(file, own),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": str(dtype).removeprefix("torch."),
        **_end_tokens(file),
    }
    config |= family.config(file, own)
    types = {architecture: name for name, architecture in ARCHITECTURE_OF_MODEL_TYPE.items()}
    config["model_type"] = types[config["architectures"][0]]
    if rotated not in (None, config["head_dim"]) and "partial_rotary_factor" not in config:
        raise UnsupportedError(
            f"{file.path} rotates {rotated} of {config['head_dim']} dimensions of a head, wanted all"
        )
    mention_unknown(own, IGNORED)
    return config


def refuse_parts(file: GGUFFile) -> None:
    """UnsupportedError for a part of a model that was split, naming all parts and what joins them."""
    count = Fields(file.metadata, str(file.path)).integer("split.count", 1, minimum=0)
    if count < 2:
        return
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.path.stem)
    first, last = (f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in (1, count))
    raise UnsupportedError(
        f"{file.path} is one of {count} parts of a model (split.count), {first} to {last}; join them with "
        f"`llama-gguf-split --merge {first} {stem}.gguf` and give the file that it writes"
    )


def family_of(file: GGUFFile) -> Family:
    """The family that a file is of."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"{file.path} has architecture {name!r}; of GGUF files, {', '.join(FAMILIES)} are supported"
        )
    return FAMILIES[name]


def _own_metadata(file: GGUFFile) -> Fields:
    """The metadata under the family's own name, without it."""
    prefix = f"{file.metadata['general.architecture']}."
    values = {name[len(prefix) :]: value for name, value in file.metadata.items() if name.startswith(prefix)}
    return Fields(values, f"{file.path}: {prefix}*")


def _end_tokens(file: GGUFFile) -> dict[str, Any]:
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    is_id = isinstance(bos, int) and 0 <= bos <= INT32_MAX  # where there is none, some files have -1
    return {"bos_token_id": bos if is_id else None, "eos_token_id": end_token_ids(file) or None}


def shortest(value: float) -> float:
    """The decimal that was meant by a float32, 1e-5 and not 9.999999747e-06."""
    with np.errstate(over="ignore"):  # what is too large becomes inf, which no field takes
        return float(str(np.float32(value)))


def _refuse_unsaid_scaling(file: GGUFFile, own: Fields, kind: str, factor: float | None) -> None:
    """UnsupportedError for a long context that is declared without the numbers that it takes."""
    context, original = (
        own.integer("context_length"),
        own.integer("rope.scaling.original_context_length", None),
    )
    has_divisors = DIVISORS in file.tensors or LONG_DIVISORS in file.tensors
    if kind == "longrope" and LONG_DIVISORS not in file.tensors:
        lacks = f"rope.scaling.type is 'longrope', and {SHORT_DIVISORS} and {LONG_DIVISORS} are missing"
    elif kind in ("linear", "yarn") and not factor and not has_divisors:
        lacks = f"rope.scaling.type is {kind!r}, and rope.scaling.factor is missing"
    elif kind == "none" and not factor and not has_divisors and (original or context) < context:
        lacks = (
            f"context_length {context} is above rope.scaling.original_context_length {original}, and nothing "
            "says how its rope is scaled"
        )
    else:
        return
    raise UnsupportedError(f"{file.path}: {lacks}; convert the model again with a newer converter")


def _rope_parameters(file: GGUFFile, own: Fields) -> dict[str, Any]:
    theta = shortest(own.number("rope.freq_base", 10000.0, positive=True))
    kind = own.text("rope.scaling.type", "none")
    said = own.number("rope.scaling.factor", None) or own.number("rope.scale_linear", None)
    factor = said or 1.0
    original = own.integer("rope.scaling.original_context_length", None)
    known = {"type", "factor", "original_context_length", "finetuned"}
    known |= {"attn_factor"} if LONG_DIVISORS in file.tensors else set()
    unknown = sorted(
        name for name in own.values if name.startswith("rope.scaling.") and name[13:] not in known
    )
    if kind not in ("none", "linear", "yarn", "longrope") or unknown:
        raise UnsupportedError(f"{file.path}: rope scaling {kind!r} with {unknown} is not supported")
    if (LONG_DIVISORS in file.tensors) != (SHORT_DIVISORS in file.tensors):
        raise UnsupportedError(f"{file.path} has one of {SHORT_DIVISORS} and {LONG_DIVISORS}; wanted both")
    _refuse_unsaid_scaling(file, own, kind, said)
    if LONG_DIVISORS in file.tensors:
        return {
            "rope_theta": theta,
            "rope_type": "longrope",
            "short_factor": _divisors(file, SHORT_DIVISORS),
            "long_factor": _divisors(file, LONG_DIVISORS),
            "attention_factor": own.number("rope.scaling.attn_factor", None),
            "original_max_position_embeddings": original,
        }
    if DIVISORS in file.tensors:
        rotated = own.integer("rope.dimension_count", None) or _head_dim(own)
        context = own.integer("context_length")
        return {"rope_theta": theta, **_llama3_parameters(file, theta, rotated, context)}
    if kind == "yarn":
        return {
            "rope_theta": theta,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    if factor != 1.0:
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    return {"rope_theta": theta, "rope_type": "default"}


def _divisors(file: GGUFFile, name: str) -> list[float]:
    held = torch.cat(list(chunks(file.tensors[name]))).flatten()
    return [shortest(value) for value in held.tolist()]


def _head_dim(own: Fields) -> int:
    """Where it is not said, as many heads as there are share the width."""
    width, heads = own.integer("embedding_length"), own.integer("attention.head_count")
    return int(own.integer("attention.key_length", max(1, width // heads)))


def _llama3_parameters(file: GGUFFile, theta: float, rotated: int, context: int) -> dict[str, Any]:
    """The llama3 scaling that gives the divisors in the file, which does not say its parameters."""
    held = torch.tensor(_divisors(file, DIVISORS))
    if len(held) != rotated // 2:
        wanted = f"{rotated // 2}, one for each pair of a head's dimensions"
        raise LoadError(f"{file.path}: {DIVISORS} has {len(held)} numbers; wanted {wanted}")
    factor = shortest(float(held.max()))
    if factor == 1.0 and bool((held == 1.0).all()):
        return {"rope_type": "default"}
    for original in (1 << power for power in range(4, math.ceil(math.log2(max(context, 16))) + 1)):
        parameters: dict[str, Any] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        expected = llama3_divisors(RopeConfig(theta=theta, **parameters), 2 * len(held))
        if torch.allclose(expected, held, rtol=1e-3):
            return parameters
    raise UnsupportedError(
        f"{file.path}: {DIVISORS} fits no llama3 rope scaling with frequency factors 1 and 4"
    )


def _llama_config(file: GGUFFile, own: Fields) -> Mapping[str, Any]:
    """Mistral's files say llama; with a window they are of Mistral."""
    window = own.integer("attention.sliding_window", None)
    return {} if window is None else {"architectures": ["MistralForCausalLM"], "sliding_window": window}


def _phi3_config(file: GGUFFile, own: Fields) -> Mapping[str, Any]:
    """A window of zero is none; the rope may rotate a part of a head."""
    head_dim = _head_dim(own)
    rotated = own.integer("rope.dimension_count", head_dim)
    return {
        "head_dim": head_dim,
        "partial_rotary_factor": rotated / head_dim,
        "sliding_window": own.integer("attention.sliding_window", None, minimum=0) or None,
        "original_max_position_embeddings": own.integer("rope.scaling.original_context_length", None),
    }


def _gemma2_config(file: GGUFFile, own: Fields) -> Mapping[str, Any]:
    """Windows and caps; on which layers, and the scale of scores, follows from the family."""
    heads, layers = own.integer("attention.head_count"), own.integer("block_count")
    width, head_dim = own.integer("embedding_length") // heads, own.integer("attention.key_length")
    return {
        "sliding_window": own.integer("attention.sliding_window"),
        "attn_logit_softcapping": own.number("attn_logit_softcapping", None),
        "final_logit_softcapping": own.number("final_logit_softcapping", None),
        "query_pre_attn_scalar": width if layers in GEMMA_LAYERS_OF_27B else head_dim,
    }


def _gemma3_config(file: GGUFFile, own: Fields) -> Mapping[str, Any]:
    """Gemma 2's; the sliding layers have a rope without scaling and with a theta of their own."""
    sliding = {"rope_theta": own.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    full = _rope_parameters(file, own)
    return {
        **_gemma2_config(file, own),
        "sliding_window_pattern": own.integer("attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


def _granite_config(file: GGUFFile, own: Fields) -> Mapping[str, Any]:
    """The four factors."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {name: shortest(own.number(source, 1.0)) for name, source in names.items()}


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", has_interleaved_heads=True, config=_llama_config),
    "qwen2": Family(architecture="Qwen2ForCausalLM"),
    "qwen3": Family(architecture="Qwen3ForCausalLM", layer_modules=HEAD_NORMS),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM", layer_modules=GEMMA_NORMS, norm_offset=1.0, config=_gemma2_config
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        layer_modules={**GEMMA_NORMS, **HEAD_NORMS},
        norm_offset=1.0,
        config=_gemma3_config,
    ),
    "phi3": Family(architecture="Phi3ForCausalLM", layer_modules=FUSED, config=_phi3_config),
    "granite": Family(architecture="GraniteForCausalLM", has_interleaved_heads=True, config=_granite_config),
    "smollm3": Family(architecture="SmolLM3ForCausalLM", has_interleaved_heads=True),
}


def row_order(file: GGUFFile, family: Family, name: str) -> npt.NDArray[np.int64] | None:
    """Where a checkpoint's rows lie in the file, None where they lie in order."""
    counts = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    count = counts.get(name.split(".")[-2])
    if count is None or not family.has_interleaved_heads:
        return None
    own = _own_metadata(file)
    heads = own.integer(count, own.integer("attention.head_count"))
    rows: npt.NDArray[np.int64] = np.arange(file.tensors[name].shape[0])
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
