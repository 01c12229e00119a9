"""GPTQ against the definition that it speeds up, and inputs of projections against transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import LoadError
from lamina.models.quantizing import calibration
from lamina.models.quantizing.gptq import DAMPING, codes_by_gptq, hessian_of
from lamina.models.quantizing.grids import Fit, Grid, grid_of
from lamina.models.quantizing.recipe import Recipe
from lamina.models.quantizing.source import read_source

from ...families import FAMILIES, oracle

RECIPES = (
    Recipe(scheme="w4a16", group_size=32),
    Recipe(scheme="w4a16", group_size=64, symmetric=False),
    Recipe(scheme="w4a16", group_size=-1),
    Recipe(scheme="int8"),
    Recipe(scheme="fp8"),
)


def problem(num_rows: int, columns: int, num_inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows, and inputs that go together in few directions, some columns much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, columns, generator=generator)
    mixed = torch.randn(columns // 4, columns, generator=generator)
    inputs = torch.randn(num_inputs, columns // 4, generator=generator) @ mixed
    inputs += 0.3 * torch.randn(num_inputs, columns, generator=generator)
    return rows, inputs * torch.rand(columns, generator=generator) * 4


def worse_than_definition(rows: Tensor, hessian: Tensor, grid: Grid, fit: Fit, codes: Tensor) -> float:
    """How much further any code is from what it is for than the nearest one, in steps of its grid.

    A column at a time, the inverse of what is left made anew for each: Optimal Brain Quantization. What is
    left is what these codes leave of it, as a tie that falls the other way changes all that follow.
    """
    hessian = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    left, worst = rows.double().clone(), 0.0
    order = hessian.diagonal().argsort(descending=True).tolist()
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        own = fit.of_group(grid.group_of(column))
        error = left[:, column] - grid.restore(codes[:, column], own)
        least = left[:, column] - grid.restore(grid.codes(left[:, column].float(), own), own)
        worst = max(worst, float(((error.abs() - least.abs()) / own.scale).max()))
        left[:, rest[1:]] -= torch.outer(error / inverse[0, 0], inverse[0, 1:])
    return worst


@given(recipe=st.sampled_from(RECIPES), seed=st.integers(0, 999))
def test_codes_are_those_of_the_definition(recipe: Recipe, seed: int) -> None:
    rows, inputs = problem(6, 192, 300, seed)
    grid, hessian = grid_of(recipe), hessian_of(inputs)
    codes, fit = codes_by_gptq(rows, hessian.clone(), grid, torch.float32)
    assert worse_than_definition(rows, hessian, grid, fit, codes) < 0.01


def output_error(rows: Tensor, restored: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (restored - rows).T).norm() / (inputs @ rows.T).norm())


@given(recipe=st.sampled_from(RECIPES), seed=st.integers(0, 999), columns=st.sampled_from([64, 320]))
def test_outputs_are_nearer_to_the_originals_than_those_of_nearest_weights(
    recipe: Recipe, seed: int, columns: int
) -> None:
    rows, inputs = problem(16, columns, 500, seed)
    grid = grid_of(recipe)
    codes, fit = codes_by_gptq(rows, hessian_of(inputs), grid, torch.bfloat16)
    nearest = grid.restore_rows(grid.codes_of_rows(rows, fit), fit)
    ours = output_error(rows, grid.restore_rows(codes, fit), inputs)
    assert ours < 0.8 * output_error(rows, nearest, inputs)


@given(recipe=st.sampled_from(RECIPES), seed=st.integers(0, 999))
def test_inputs_that_have_nothing_to_do_with_each_other_give_the_nearest_weights(
    recipe: Recipe, seed: int
) -> None:
    rows, _ = problem(5, 64, 1, seed)
    grid = grid_of(recipe)
    codes, fit = codes_by_gptq(rows, torch.diag(torch.rand(64) + 0.5), grid, torch.float32)
    assert torch.equal(codes, grid.codes_of_rows(rows, fit))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.scheme)
def test_columns_whose_inputs_are_never_seen_and_inputs_of_one_direction_are_no_trouble(
    recipe: Recipe,
) -> None:
    rows, inputs = problem(5, 64, 40, 0)
    inputs[:, 7:30] = 0.0
    for seen in (inputs, inputs[:1], torch.zeros(3, 64)):
        codes, fit = codes_by_gptq(rows, hessian_of(seen), grid_of(recipe), torch.float32)
        restored = grid_of(recipe).restore_rows(codes, fit)
        assert bool(restored.isfinite().all())
        nearest = grid_of(recipe).codes_of_rows(rows, fit)
        assert torch.equal(codes[:, 7:30], nearest[:, 7:30])


def test_inputs_that_are_not_finite_are_refused() -> None:
    rows, inputs = problem(5, 64, 40, 0)
    inputs[3, 3] = float("nan")
    with pytest.raises(LoadError, match="inputs on the calibration text that are not finite"):
        codes_by_gptq(rows, hessian_of(inputs), grid_of(RECIPES[0]), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_projection_is_asked_for_with_the_inputs_that_transformers_gives_it(
    tmp_path: Path, family: str
) -> None:
    folder = FAMILIES[family].save(tmp_path / "model")
    source = read_source(folder, Recipe(scheme="int8"))
    windows = [[(37 * i + 5 * n) % 317 + 3 for i in range(length)] for n, length in enumerate((19, 1, 24))]
    seen: dict[str, Tensor] = {}

    def multiply(parameter: str, inputs: Tensor) -> Tensor:
        seen[parameter] = inputs.clone()
        weights = [source.tensors[name].read() for name in source.specs[parameter].sources]
        return inputs @ torch.cat(weights).T

    calibration.run(source, windows, multiply, torch.device("cpu"))
    theirs = inputs_of(oracle(folder, FAMILIES[family].architecture), windows)
    assert {module.parameter for module in source.modules} == seen.keys()
    for module in source.modules:
        ours, exact = seen[module.parameter], theirs[module.name]
        assert ours.shape == exact.shape
        assert float((ours - exact).norm()) <= 2e-5 * float(exact.norm()), module.name


@torch.no_grad()
def inputs_of(model: Any, windows: list[list[int]]) -> dict[str, Tensor]:
    seen: dict[str, list[Tensor]] = {}

    def listen(name: str, module: torch.nn.Module) -> None:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.setdefault(name, []).append(inputs[0].flatten(0, 1))

        module.register_forward_pre_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            listen(name, module)
    for ids in windows:
        model(torch.tensor([ids]))
    return {name: torch.cat(parts) for name, parts in seen.items()}


def test_a_config_says_nothing_of_the_order_in_which_columns_were_taken(tiny_folder: Path) -> None:
    """Groups stay columns side by side, so that every reader's kernels for unordered ones serve them."""
    from lamina.models.quantizing.compressed_tensors import quantization_config

    said = json.dumps(quantization_config(RECIPES[0], ["lm_head"]))
    assert '"actorder": null' in said
