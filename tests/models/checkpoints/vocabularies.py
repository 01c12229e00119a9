"""Fetch llama.cpp's vocabularies and the ids it expects (77 MB), out of a source package on the index."""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
TARGET = Path(__file__).resolve().parent.parent.parent.parent / "cache_dir" / "vocabularies"
SERVED = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


def main() -> None:
    """Place each vocabulary with its texts and ids in cache_dir/vocabularies."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name]
        subprocess.run([*command, "--no-binary", "llama-cpp-python", PACKAGE], check=True)
        (archive,) = Path(name).glob("*.tar.gz")
        TARGET.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as package:
            for member in package.getmembers():
                path = Path(member.name)
                vocabulary = path.name.removeprefix("ggml-vocab-").split(".gguf")[0]
                if path.parent.name == "models" and vocabulary in SERVED:
                    content = package.extractfile(member)
                    assert content is not None
                    (TARGET / path.name).write_bytes(content.read())


if __name__ == "__main__":
    main()
