"""Programs that take a row of states beside each token: compiled as eager, for any number of tokens."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lamina.common.errors import CompileError, ShapeError
from lamina.common.store import Store
from lamina.compiler.cache import plan_key
from lamina.compiler.capture.capture import Attend
from lamina.compiler.compile import Program, compile_program, factors_of
from lamina.compiler.config import CompileConfig
from lamina.compiler.execution.plan import Compiled

CPU = torch.device("cpu")
WIDTH = 16
PARAMETERS = {"table": ((10, WIDTH), torch.float32), "fc": ((2 * WIDTH, 2 * WIDTH), torch.float32)}
WEIGHTS = {name: torch.randn(shape) for name, (shape, _) in PARAMETERS.items()}


def forward(
    weights: dict[str, Tensor], token_ids: Tensor, positions: Tensor, attend: Attend, states: Tensor
) -> Tensor:
    embedded = nn.functional.embedding(token_ids, weights["table"])
    x = nn.functional.linear(torch.cat((embedded, states), dim=-1), weights["fc"])
    heads = x.view(-1, 4, 8)
    out = heads.new_empty(heads.shape)
    attend(0, heads, heads, heads, out)
    return out.flatten(1) + positions[:, None]


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    out.copy_(value.cumsum(0))


def program(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Program:
    return Program(forward=forward, parameters=PARAMETERS, device=CPU, states=(width, dtype))


def inputs(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.arange(num_tokens, dtype=torch.int32)
    return ids % 10, ids, torch.randn(num_tokens, WIDTH)


@pytest.fixture(scope="module")
def compiled(shared_store: Store) -> Compiled:
    return compile_program(program(), CompileConfig(verify=True), "fast", shared_store)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 65])
def test_compiled_code_takes_states_of_any_number_of_tokens(compiled: Compiled, num_tokens: int) -> None:
    ids, positions, states = inputs(num_tokens)
    ours = compiled.plan.bind(WEIGHTS, CPU)(ids, positions, attend, states=states)
    torch.testing.assert_close(ours, forward(WEIGHTS, ids, positions, attend, states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, WIDTH), (WIDTH, 7)], ids=str)
def test_states_that_are_no_row_a_token_are_refused(compiled: Compiled, shape: tuple[int, int]) -> None:
    ids, positions, _ = inputs(7)
    states = torch.randn(shape) if shape[0] == 6 else torch.randn(shape).t()
    with pytest.raises(ShapeError, match="wanted a row a token"):
        compiled.plan.bind(WEIGHTS, CPU)(ids, positions, attend, states=states)


def test_a_second_start_loads_what_the_first_compiled(compiled: Compiled, shared_store: Store) -> None:
    again = compile_program(program(), CompileConfig(), "fast", shared_store, require_warm=True)
    assert (again.num_compiled, again.num_loaded) == (0, len(compiled.plan.pieces))


def test_the_plan_key_holds_columns_and_dtype_of_states(tmp_path: Path) -> None:
    programs = (program(), program(8), program(dtype=torch.bfloat16))
    keys = {plan_key(factors_of(one, CompileConfig(), "fast", Store(tmp_path))) for one in programs}
    assert len(keys) == 3


def test_states_of_another_width_than_the_weights_want_fail_in_the_trace(store: Store) -> None:
    with pytest.raises(CompileError, match="could not capture"):
        compile_program(program(8), CompileConfig(), "fast", store)
