"""Which attention serves which step, and what is said about it; the GPUs here are facts on paper."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lamina.common import env
from lamina.common.errors import KernelBuildError, UnsupportedError
from lamina.common.store import Store
from lamina.custom_ops._shared import registry
from lamina.custom_ops.paged_attention import _flash_attn, phases
from lamina.custom_ops.paged_attention._flash_attn import Choice, Facts, Version, choose_version
from lamina.custom_ops.paged_attention.phases import select_by_phase
from lamina.runtime.worker.attention import select_backend

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HOPPER, AMPERE, ADA, BLACKWELL, GEFORCE = (9, 0), (8, 0), (8, 9), (10, 0), (12, 0)
VERSION_4, VERSION_3, VERSION_2 = _flash_attn.VERSIONS
SHAPE: dict[str, Any] = {"head_dim": 128, "block_size": 16}


def version(
    name: str,
    *,
    installed: bool = True,
    beats_ours: bool = True,
    obstacle: str | None = None,
    error: Exception | None = None,
) -> Version:
    """A version with these properties, whose call says its name."""

    def load() -> Callable[..., Any]:
        if error is not None:
            raise error
        return lambda arguments: name

    module = "json" if installed else "no_such_package.inside"
    return Version(name, module, beats_ours, lambda facts: obstacle, load)


def chosen(*versions: Version) -> Choice:
    return choose_version(Facts(HOPPER, 128, 16), versions)


def test_the_most_recent_installed_version_serves() -> None:
    choice = chosen(version("new", installed=False), version("middle"), version("old"))
    assert choice.reason == "middle"
    assert choice.attend is not None


def test_a_version_that_cannot_serve_or_be_imported_leaves_it_to_the_next() -> None:
    refusing = version("new", obstacle="does not take head_dim 7")
    broken = version("middle", error=OSError("libcudart.so.12 is missing"))
    assert chosen(refusing, broken, version("old")).reason == "old"


def test_where_none_serves_every_obstacle_is_reported() -> None:
    refusing = version("new", obstacle="does not take head_dim 7")
    broken = version("old", error=ModuleNotFoundError("No module named 'cutlass'"))
    choice = chosen(refusing, broken)
    assert choice.version is choice.attend is None
    assert choice.reason == (
        "new does not take head_dim 7; old cannot be imported: ModuleNotFoundError: No module named 'cutlass'"
    )


def test_where_none_is_installed_the_packages_are_named() -> None:
    assert "pip install 'flash-attn-4[cu13]'" in chosen(version("new", installed=False)).reason


@pytest.mark.parametrize(
    "version,capability,head_dim,block_size",
    [
        *((VERSION_4, HOPPER, dim, size) for dim in (64, 80, 96, 128, 256) for size in (16, 32, 48, 256)),
        (VERSION_4, HOPPER, 128, 64),
        (VERSION_4, HOPPER, 192, 16),
        (VERSION_4, BLACKWELL, 128, 16),
        (VERSION_4, BLACKWELL, 256, 16),
        (VERSION_3, HOPPER, 72, 32),
        (VERSION_2, AMPERE, 128, 256),
        (VERSION_2, GEFORCE, 64, 512),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_a_version_takes_is_no_obstacle(
    version: Version, capability: tuple[int, int], head_dim: int, block_size: int
) -> None:
    assert version.obstacle(Facts(capability, head_dim, block_size)) is None


@pytest.mark.parametrize(
    "version,facts,obstacle",
    [
        (VERSION_4, Facts(AMPERE, 128, 16), "no paged keys on compute capability 8.0; wanted 9, 10 or 11"),
        (VERSION_4, Facts(GEFORCE, 128, 16), "no paged keys on compute capability 12.0"),
        (VERSION_4, Facts(HOPPER, 72, 16), "head_dim 72; wanted a multiple of 16 up to 256"),
        (VERSION_4, Facts(HOPPER, 272, 16), "head_dim 272"),
        (VERSION_4, Facts(BLACKWELL, 192, 16), "head_dim 192; wanted a multiple of 16 up to 128, or 256"),
        (VERSION_4, Facts(HOPPER, 128, 128), "reads behind a sequence's end with block_size 128"),
        (VERSION_4, Facts(HOPPER, 256, 64), "reads behind a sequence's end with block_size 64"),
        (VERSION_3, Facts(ADA, 128, 16), "compute capability 8.9; wanted 9"),
        (VERSION_3, Facts(HOPPER, 60, 16), "head_dim 60; wanted a multiple of 8 up to 256"),
        (VERSION_3, Facts(HOPPER, 128, 64), "block_size 64; wanted less than 64"),
        (VERSION_2, Facts((7, 5), 128, 256), "compute capability 7.5; wanted 8 or more"),
        (VERSION_2, Facts(AMPERE, 264, 256), "head_dim 264"),
        (VERSION_2, Facts(AMPERE, 128, 16), "block_size 16; wanted a multiple of 256"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_a_version_does_not_take_is_reported_with_what_is_wanted(
    version: Version, facts: Facts, obstacle: str
) -> None:
    assert obstacle in str(version.obstacle(facts))


@pytest.fixture
def op(request: pytest.FixtureRequest) -> str:
    """An op of this test alone, with the names that paged attention's providers have on a GPU."""
    name = f"op_of_{request.node.name}"
    registry.register(
        name,
        check=lambda *args: None,
        providers=tuple(
            registry.Provider(
                name=provider,
                load=lambda provider=provider: lambda *args: provider,
                devices=frozenset({"cuda"}),
                dtypes=_flash_attn.DTYPES if provider == "flash_attn" else None,
            )
            for provider in ("cuda", "triton", "flash_attn")
        ),
    )
    return name


def select(
    op: str,
    name: str,
    found: Choice,
    dtype: torch.dtype = torch.bfloat16,
    hopper_obstacle: str | None = "too old",
    **more: Any,
) -> registry.Selected:
    return select_by_phase(
        name,
        device=CUDA,
        dtype=dtype,
        op=op,
        find_flash=lambda *facts: found,
        hopper_obstacle=lambda *facts: hopper_obstacle,
        **SHAPE | more,
    )


def served_by(selected: registry.Selected, max_query_len: int, chunk: int = -1) -> Any:
    return selected.call(*[None] * phases.MAX_QUERY_LEN, max_query_len, 1.0, -1, chunk, 0.0)


def test_auto_takes_our_kernels_for_decode_and_a_faster_flash_attention_for_prefill(op: str) -> None:
    selected = select(op, "auto", chosen(version("flash-attn-9")))
    assert [served_by(selected, queries) for queries in (0, 1, phases.LONGEST_DECODE)] == ["cuda"] * 3
    assert served_by(selected, phases.LONGEST_DECODE + 1) == "flash_attn"
    assert served_by(selected, phases.LONGEST_DECODE + 1, chunk=64) == "cuda", "FlashAttention has no chunks"
    assert selected.name == "cuda+flash_attn"
    assert selected.reason == (
        "cuda in decode (first choice), flash_attn in prefill (flash-attn-9 is faster there)"
    )


@pytest.mark.parametrize(
    "found,dtype,why",
    [
        (chosen(version("new", installed=False)), torch.bfloat16, "flash_attn is not installed; pip install"),
        (chosen(version("new", obstacle="does not like it")), torch.float16, "new does not like it"),
        (chosen(version("old", beats_ours=False)), torch.bfloat16, "old was not measured to be faster"),
        (chosen(version("new")), torch.float32, "flash_attn does not take torch.float32"),
    ],
    ids=["missing", "obstacle", "slower", "dtype"],
)
def test_else_auto_takes_our_kernels_for_both_and_says_why(
    op: str, found: Choice, dtype: torch.dtype, why: str
) -> None:
    selected = select(op, "auto", found, dtype)
    assert [served_by(selected, queries) for queries in (1, 4096)] == ["cuda"] * 2
    assert selected.name == "cuda"
    assert f"and in prefill ({why}" in selected.reason


@pytest.mark.parametrize(
    "obstacle,reason",
    [(None, "(its kernel for Hopper)"), ("head_dim is 96", "; not its kernel for Hopper: head_dim is 96)")],
)
def test_auto_says_whether_our_kernel_for_hopper_serves_prefill(
    op: str, obstacle: str | None, reason: str
) -> None:
    missing = chosen(version("new", installed=False))
    assert select(op, "auto", missing, hopper_obstacle=obstacle).reason.endswith(reason)


def test_our_kernel_for_hopper_comes_before_any_flash_attention(op: str) -> None:
    selected = select(op, "auto", chosen(version("flash-attn-9")), hopper_obstacle=None)
    assert [served_by(selected, queries) for queries in (1, 4096)] == ["cuda"] * 2
    assert selected.reason == "cuda in decode (first choice) and in prefill (its kernel for Hopper)"


def test_auto_says_its_choice_once_with_the_reason(op: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lamina"):
        for _ in range(3):
            select(op, "auto", chosen(version("flash-attn-10")))
    said = [message for message in caplog.messages if message.startswith("attention on")]
    assert said == [
        "attention on cuda torch.bfloat16: cuda in decode (first choice), "
        "flash_attn in prefill (flash-attn-10 is faster there)"
    ]


@pytest.mark.parametrize("name", ["cuda", "triton", "flash_attn"])
def test_a_named_provider_serves_every_step(op: str, name: str) -> None:
    selected = select(op, name, chosen(version("new", beats_ours=False)))
    assert [served_by(selected, queries) for queries in (1, 4096)] == [name] * 2
    assert (selected.name, selected.reason) == (name, "chosen by the caller")


def test_a_named_flash_attention_that_cannot_run_is_refused(op: str) -> None:
    with pytest.raises(UnsupportedError, match="pip install 'flash-attn-4"):
        select(op, "flash_attn", chosen(version("new", installed=False)))
    with pytest.raises(UnsupportedError, match="new does not like it"):
        select(op, "flash_attn", chosen(version("new", obstacle="does not like it")))
    with pytest.raises(UnsupportedError, match=r"does not take torch\.float32"):
        select(op, "flash_attn", chosen(version("new")), torch.float32)


def test_a_cache_in_fp8_is_never_given_to_flash_attention(op: str) -> None:
    faster = chosen(version("new"))
    assert select(op, "auto", faster, is_fp8=True).name == "cuda"
    assert select(op, "triton", faster, is_fp8=True).name == "triton"
    with pytest.raises(UnsupportedError, match="flash_attn does not take a cache in FP8"):
        select(op, "flash_attn", faster, is_fp8=True)


def test_a_cache_in_fp8_that_cuda_kernels_do_not_read_is_tritons(op: str) -> None:
    faster = chosen(version("new"))
    for unread in ({"dtype": torch.float32}, {"head_dim": 72}):
        assert select(op, "auto", faster, is_fp8=True, **unread).name == "triton"
        with pytest.raises(UnsupportedError, match=r"FP8; wanted (bfloat16 or|a multiple of 16)"):
            select(op, "cuda", faster, is_fp8=True, **unread)


def test_flash_attention_is_never_looked_for_on_a_cpu() -> None:
    def find_flash(*facts: Any) -> Choice:
        raise AssertionError(facts)

    selected = select_by_phase("auto", device=CPU, dtype=torch.float32, find_flash=find_flash, **SHAPE)
    assert selected == registry.select("paged_attention", device=CPU, dtype=torch.float32)


def test_the_runtime_refuses_what_cannot_run_where_it_is() -> None:
    with pytest.raises(UnsupportedError, match="flash_attn does not run on cpu"):
        select_backend("flash_attn", device=CPU, dtype=torch.bfloat16, **SHAPE)
    with pytest.raises(UnsupportedError, match="attention is 'fast'; wanted auto, cuda, triton, flash_attn"):
        select_backend("fast", device=CPU, dtype=torch.bfloat16, **SHAPE)


def test_the_real_provider_names_what_to_install() -> None:
    if any(_flash_attn._is_installed(version) for version in _flash_attn.VERSIONS):
        pytest.skip("FlashAttention is installed")
    with pytest.raises(UnsupportedError, match=r"not installed; pip install 'flash-attn-4"):
        registry.select("paged_attention", device=CUDA, dtype=torch.bfloat16, provider="flash_attn")


def test_auto_passes_over_a_package_that_is_not_there() -> None:
    def missing() -> registry.Call:
        raise UnsupportedError("not installed")

    def broken() -> registry.Call:
        raise KernelBuildError("no compiler")

    registry.register(
        "op_with_an_optional_package",
        check=lambda *args: None,
        providers=(
            registry.Provider(name="kernel", load=broken),
            registry.Provider(name="package", load=missing),
            registry.Provider(name="reference", load=lambda: lambda *args: "formula"),
        ),
    )
    selected = registry.select("op_with_an_optional_package", device=CPU, dtype=torch.float32)
    assert (selected.name, selected.reason) == ("reference", "no compiler; not installed")


def test_compiled_kernels_of_flash_attention_stay_in_the_store(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    folder = Store(tmp_path).outside_folder("flash_attention")
    assert folder.is_dir()
    env.keep_flash_attention_kernels(folder)
    assert env.os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(folder)
    env.keep_flash_attention_kernels(tmp_path)  # what is set already stays
    assert env.os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(folder)
    assert env.os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
