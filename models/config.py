"""What a checkpoint's config.json says, checked and in one shape."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from ..common.errors import ConfigError, LoadError, UnsupportedError, shown
from .fields import Fields, read_json
from .registry import find_model
from .rope_config import RopeConfig, mention_unknown, read_rope, refuse

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
ARCHITECTURE_OF_MODEL_TYPE = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

# Fields that change the arithmetic in a way Lamina does not do, with the values that change nothing; a model
# that does what one of them says reads it.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    "sliding_window": (),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "no_rope_layers": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "alibi": (False,),
    "is_causal": (True,),
    "parallel_attn": (False,),
}
# Fields of training, of generation and of other programs.
IGNORED_FIELDS = frozenset(
    {
        *("_attn_implementation", "_name_or_path", "_sliding_window_pattern", "add_cross_attention"),
        *("architectures", "attention_dropout", "attn_implementation", "auto_map", "bad_words_ids"),
        *("cache_implementation", "chunk_size_feed_forward", "classifier_dropout"),
        *("cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample"),
        *("early_stopping", "embd_pdrop", "finetuning_task", "hidden_dropout", "id2label"),
        *("initializer_range", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference"),
        *("classifier_from_token", "is_matryoshka", "matryoshka_dimensions"),  # read beside the modules
        *("sbert_ce_default_activation_function", "sentence_transformers"),
        *("label2id", "length_penalty", "max_length", "max_new_tokens", "max_window_layers", "min_length"),
        *("model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences"),
        *("original_max_position_embeddings", "output_attentions", "output_hidden_states", "output_past"),
        *("quantization_config", "compression_config"),  # read beside the weights
        *("output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads"),
        *("repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id"),
        *("task_specific_params", "temperature", "tie_encoder_decoder", "tokenizer_class", "top_k"),
        *("top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version"),
        *("typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache"),
    }
)


def is_frozen(value: object) -> bool:
    """Whether a value is a frozen dataclass, which can be compared and be part of a key."""
    parameters: Any = getattr(value, "__dataclass_params__", None)
    return not isinstance(value, type) and parameters is not None and bool(parameters.frozen)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes and constants of a model; what LLaMA does not have defaults to what changes nothing."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] = ()  # full, sliding or chunked _attention of each layer; empty: all full
    sliding_window: int | None = None  # positions that a token of a sliding layer sees, its own included
    attention_chunk_size: int | None = (
        None  # a chunked layer's tokens see their own chunk of so many positions
    )
    sliding_rope: RopeConfig | None = None  # of the sliding layers, where they have another
    rotated_layers: tuple[bool, ...] = ()  # whether each layer rotates; empty: all do
    attention_scale: float | None = None  # of query @ key; None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_divisor: float = 1.0
    dtype: torch.dtype = torch.float32
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    ranks: int = 1  # that share the model out; heads and columns above are then those of one of them
    num_labels: int = 0  # classes that a sequence may get; 0: the model gives none
    own: object = None  # what only this model has: a frozen dataclass that its definition makes and reads

    def __post_init__(self) -> None:
        if self.own is not None and not is_frozen(self.own):
            raise ConfigError(f"own is {self.own!r:.80}; wanted a frozen dataclass, or None")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; wanted an integer >= 1")
        if self.hidden_act not in ACTIVATIONS:
            wanted = " and ".join(repr(name) for name in ACTIVATIONS)
            raise UnsupportedError(f"hidden_act is {shown(self.hidden_act)}; supported are {wanted}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads is {self.num_kv_heads}; "
                f"wanted a divisor of num_attention_heads {self.num_heads}"
            )
        for name in ("head_dim", "rotary_dim"):
            if getattr(self, name) % 2:
                wanted = "an even number, since rotary embedding turns pairs"
                raise ConfigError(f"{name} is {getattr(self, name)}; wanted {wanted}")
        self._check_layers()
        if self.dtype not in DTYPES.values():
            raise UnsupportedError(f"dtype is {self.dtype}; supported are {', '.join(DTYPES)}")

    def _check_layers(self) -> None:
        for name in ("layer_types", "rotated_layers"):
            values = getattr(self, name)
            if values and len(values) != self.num_layers:
                raise ConfigError(
                    f"{name} has {len(values)} entries; wanted one for each of {self.num_layers}"
                )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING, CHUNKED})
        if unknown:
            wanted = f"{FULL!r}, {SLIDING!r} and {CHUNKED!r}"
            raise UnsupportedError(f"layer_types holds {unknown}; supported are {wanted}")
        for kind, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
            if kind in self.layer_types and getattr(self, name) is None:
                raise ConfigError(f"{name} is None; wanted an integer >= 1, since layers are {kind}")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """What each layer's tokens see: all before them, a window, or their own chunk."""
        return self.layer_types or (FULL,) * self.num_layers

    @property
    def sliding_layers(self) -> tuple[bool, ...]:
        """Whether each layer's tokens see a window alone."""
        return tuple(kind == SLIDING for kind in self.layer_kinds)

    @property
    def vocab_rows(self) -> int:
        """How many rows a rank has of what has one for each id; the last ones of the last are padding."""
        return -(-self.vocab_size // self.ranks)

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated, the first ones."""
        return int(self.head_dim * self.rope.rotated_share)

    @property
    def declared_positions(self) -> int:
        """How many positions the checkpoint is meant for, stretched by its rope scaling where that is not
        counted in max_position_embeddings: by the convention of linear, dynamic and yarn."""
        rope, most = self.rope, self.max_position_embeddings
        if rope.rope_type in ("linear", "dynamic"):
            return int(most * (rope.factor or 1.0))
        if rope.rope_type == "yarn":
            return max(most, int((rope.original_max_position_embeddings or most) * (rope.factor or 1.0)))
        return most

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, origin: str = "config.json") -> Self:
        """The config that a config.json's content describes.

        Raises ConfigError for a value that cannot be, UnsupportedError for one that cannot be honoured.
        """
        architecture = _architecture(Fields(raw, origin))
        definition = find_model(architecture)
        fields = Fields({**definition.defaults, **raw}, origin)
        own = dict(definition.config(fields))
        config = cls(architecture=architecture, **_common(fields, own) | own)
        refuse(fields, REFUSED_FIELDS)
        mention_unknown(fields, REFUSED_FIELDS.keys() | IGNORED_FIELDS)
        return config


def read_model_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder. LoadError where it has none; else as from_dict."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise LoadError(f"{folder} has no config.json; wanted a folder that holds a Hugging Face checkpoint")
    return ModelConfig.from_dict(read_json(path), origin=str(path))


def _common(fields: Fields, own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every model has, but for the rope where the model has read it."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.error(
            "head_dim",
            None,
            f"a number, since num_attention_heads {num_heads} does not divide hidden_size {hidden_size}",
        )
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers(fields),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": fields.integer("head_dim", hidden_size // num_heads),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "hidden_act": fields.text("hidden_act", "silu"),
        "rope": own["rope"] if "rope" in own else read_rope(fields),
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        "layer_types": fields.texts("layer_types"),
        "attention_chunk_size": fields.integer("attention_chunk_size", None),
        "attention_bias": fields.boolean("attention_bias", False),
        "mlp_bias": fields.boolean("mlp_bias", False),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "dtype": _dtype(fields),
        "bos_token_id": fields.integer("bos_token_id", None, minimum=0),
        "eos_token_ids": fields.token_ids("eos_token_id"),
    }


def layer_types(fields: Fields, *, sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """`layer_types` of config.json, else what the rule says of each layer's index."""
    given = fields.texts("layer_types")
    return given or tuple(SLIDING if sliding(index) else FULL for index in range(num_layers(fields)))


def num_layers(fields: Fields) -> int:
    """How many there are; a number that no model has would take all memory before anything is read."""
    return int(fields.integer("num_hidden_layers", maximum=10_000))


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures") or [
        ARCHITECTURE_OF_MODEL_TYPE.get(fields.text("model_type", ""))
    ]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise fields.error(
            "architectures", fields.values.get("architectures"), 'a list such as ["LlamaForCausalLM"]'
        )
    return names[0]


def _dtype(fields: Fields) -> torch.dtype:
    name = fields.text("dtype", None) or fields.text("torch_dtype", "float32")
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise fields.error("dtype", name, f"one of {', '.join(DTYPES)}")
    return dtype
