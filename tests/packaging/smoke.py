"""Use an installed Lamina on tiny models, its own and another package's: smoke.py FOLDER-OF-THE-VENV."""

import sys
import tempfile
from pathlib import Path

import torch
import transformers

import lamina

PROMPT = [1, 5, 9]


def check(prefix: str) -> None:
    """Lamina, compiled, writes what transformers writes."""
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        max_position_embeddings=256,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with lamina.Runtime.from_pretrained(folder, dtype="float32") as runtime:
            params = lamina.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            written = list(runtime.generate([PROMPT], params)[0].outputs[0].token_ids)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert written == expected[0, len(PROMPT) :].tolist(), (written, expected)
    print(f"{prefix}: generated {written}, as transformers does")


def main() -> None:
    venv = Path(sys.argv[1]).resolve()
    assert venv in Path(lamina.__file__).resolve().parents, f"{lamina.__file__} is not the installed package"
    check("Llama")
    check("Olmo2")


if __name__ == "__main__":
    main()
