"""The names that users may import, listed: a change of one is a change of this file and of the changelog."""

import subprocess
import sys
from importlib import import_module

import pytest

PUBLIC = {
    "lamina": """
        AsyncRuntime BeamSearchParams ClassificationOutput ClosedError CompileConfig CompileError
        CompletionOutput ConfigError EmbeddingOutput EngineDeadError EngineError KernelBuildError LaminaError
        LoadError LogitsError
        Logprob NotWarmError OutOfBlocksError Pass PassReport ProcessorError QuantizedModel RequestError
        RequestOutput Runtime SamplingParams ScoreOutput ShapeError StoreError StreamDelta StructuredOutputs
        Draft Eagle LoRAConfig NGram UnsupportedError WeightGroup profile quantize register_model
    """,
    "lamina.compiler.passes": """
        Any_ CANONICALISE Call Match PASS_NAMES Pass PassReport all_but copy_graph dtype_of emit erase_dead
        find replace shape_of
    """,
    "lamina.models": """
        AttentionSpec ModelDefinition ParameterSpec find_model gemma2 gemma3 granite llama mistral phi3 qwen2
        qwen3 register_model smollm3
    """,
    "lamina.testing": """
        BODIES Program State Step Traced apply assert_same_bits check_idempotent check_memory check_report
        check_values check_values_of_ops check_well_formed programs results_of run trace
    """,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_those_listed_here(name: str) -> None:
    module = import_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name].split())
    assert all(getattr(module, one) is not None for one in module.__all__)


def test_names_at_the_top_are_those_of_their_rooms() -> None:
    import lamina
    from lamina.compiler.passes import Pass, PassReport
    from lamina.models import register_model

    assert (lamina.Pass, lamina.PassReport, lamina.register_model) == (Pass, PassReport, register_model)


def test_without_hypothesis_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import lamina.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: lamina.testing draws programs by Hypothesis; pip install hypothesis"
    )
