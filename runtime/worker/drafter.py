"""Who drafts: what every drafter is given after each step, and what it leaves for the next one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .input_batch import BatchView

NO_DRAFT = -1  # in place of a draft where there is none, and of all that come after it


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftInput:
    """A step that was computed and sampled. All tensors are on the device; rows are those of the batch.

    Padding rows have any contents and write nowhere. A captured step is given the same tensors each time.
    """

    batch: BatchView  # positions, slot mappings, block tables and lengths as attention has seen them
    request_ids: Sequence[str]  # by row, where the step is not captured; for tests
    sampled: Tensor  # [rows, 1 + drafts] int32, what the row sampled at each of its last tokens
    num_accepted: Tensor  # [rows] int32, how many of the row's drafts held
    newest: Tensor  # [rows] int32, the row's newest token, which is not computed yet: sampled[num_accepted]
    num_computed: Tensor  # [rows] int32, tokens of the row that are computed and hold: where `newest` stands
    num_samples: Tensor  # [rows] int32, that the row has in this step
    first_samples: Tensor  # [rows] int32, where they begin among the batch's
    capacities: Tensor  # [rows] int32, tokens of the row that there are blocks for
    hidden: Tensor  # [tokens, H] of the last layer, normed, as the LM head takes it
    aux_hidden: Tensor | None  # [tokens, n * H], the residual sums that Drafter.wants_aux names, if any
    num_drafts: int  # that are wanted of each row

    @property
    def is_sampling(self) -> Tensor:
        """Whether a row has a newest token, [rows] bool: not amid a prompt."""
        return self.num_samples > 0


class Drafter(Protocol):
    """Proposes the tokens that may come after each row's newest. Whatever it proposes, no answer changes.

    A proposal may be made twice for one step, where its samples were chosen again; the second counts.
    """

    wants_aux: tuple[int, ...]  # the layers whose residual sums it is given

    def propose(self, step: DraftInput, draft_ids: Tensor) -> None:
        """Write draft_ids [rows, k] int32: the first `step.num_drafts` of each row, NO_DRAFT for none.

        Called after every step that has any of its rows, of prompts too, with 0 drafts as well, so that what
        it keeps of tokens is complete. Reads nothing back: a step waits for nobody.
        """
