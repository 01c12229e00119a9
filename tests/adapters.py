"""Adapters that PEFT writes for TINY models, and the models that it merges them into."""

import warnings
from pathlib import Path
from typing import Any

import torch

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(model: Path, folder: Path, *, seed: int = 0, size: float = 0.3, **config: Any) -> Path:
    """A random adapter of a model's folder, as PEFT saves it; both of its matrices are other than zero."""
    from peft import LoraConfig, get_peft_model

    wanted = {"r": 4, "lora_alpha": 8, "target_modules": ALL_MODULES, "task_type": "CAUSAL_LM", **config}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        made = get_peft_model(_base(model), LoraConfig(**wanted))
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=size)
        made.save_pretrained(folder)
    return folder


def write_merged(model: Path, adapter: Path, folder: Path) -> Path:
    """The model with the adapter's weights merged into its own, by PEFT."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers for what it deprecates
        merged = PeftModel.from_pretrained(_base(model), adapter).merge_and_unload()
        merged.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (model / name).exists():
            (folder / name).write_bytes((model / name).read_bytes())
    return folder


def _base(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
