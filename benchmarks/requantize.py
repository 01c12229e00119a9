"""The tensors of a GGUF file in another type: the same weights for a peer that reads such files."""

import argparse
from pathlib import Path

import gguf
import numpy as np

TYPES = {"BF16": gguf.LlamaFileType.MOSTLY_BF16, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
WRITTEN_ANEW = {"general.architecture", "general.file_type", "general.quantization_version"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a .gguf file")
    parser.add_argument("target", type=Path, help="the .gguf file to write")
    parser.add_argument("--type", choices=TYPES, required=True, help="of matrices; vectors stay float32")
    options = parser.parse_args()
    requantize(options.source, options.target, options.type)


def requantize(source: Path, target: Path, type_name: str) -> None:
    """Write the target: the metadata as it is, every matrix dequantized and rounded once to the type."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(TYPES[type_name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for field in reader.fields.values():
        if field.name not in WRITTEN_ANEW and not field.name.startswith("GGUF."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        add_tensor(writer, tensor, gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, tensor: gguf.ReaderTensor, wanted: gguf.GGMLQuantizationType) -> None:
    """A tensor of a reader, as float32 where it is a vector."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if values.ndim == 1:
        writer.add_tensor(tensor.name, values)
    else:
        writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)


if __name__ == "__main__":
    main()
