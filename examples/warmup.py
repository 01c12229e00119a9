"""Fill the cache once, for instance while a container image is built; then start knowing it is warm.

python examples/warmup.py MODEL
"""

import sys

from lamina import NotWarmError, Runtime, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)
model = sys.argv[1]  # a folder, a .gguf file or a hub id
settings = {"max_num_seqs": 64}  # what is compiled depends on the settings: give both the same

with Runtime.from_pretrained(model, **settings) as runtime:  # compiles what the cache lacks
    runtime.warm_up()
    print("compiled", runtime.stats()["compile"]["compiled"], "pieces")

try:
    with Runtime.from_pretrained(model, require_warm=True, **settings) as runtime:
        output = runtime.generate("Hello, my name is", SamplingParams(max_tokens=16))[0]
        print(output.text)
except NotWarmError as error:
    sys.exit(f"would have compiled: {error}")
