"""Drafters for tests: what they propose is known beforehand, right or wrong."""

import torch

from lamina.runtime.startup import builder, engine_builder

from ..asking import SMALL


class Scripted:
    """Proposes out of answers that are known by their prompts; a script may spoil them."""

    wants_aux = ()

    def __init__(self, script):
        self.script = script
        self.answers = {}  # by prompt, that and all that comes after it
        self.tokens = {}  # by request, what was seen of it
        self.num_proposals = 0

    def propose(self, step, draft_ids):
        starts = step.batch.query_start_loc.tolist()
        for row, request_id in enumerate(step.request_ids):
            known = self.tokens.setdefault(request_id, {})
            own = slice(starts[row], starts[row + 1])
            positions, ids = step.batch.positions[own].tolist(), step.batch.token_ids[own].tolist()
            known |= dict(zip(positions, ids, strict=True))
            end = int(step.num_computed[row])
            if step.num_drafts and step.is_sampling[row]:
                self.num_proposals += 1
                seen = [*(known.get(place, -1) for place in range(end)), int(step.newest[row])]
                drafts = self.script(self.following(seen, step.num_drafts), end)
                draft_ids[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)

    def following(self, seen, count):
        """The next tokens of an answer that begins like this; those of a prefix-cache hit were not seen."""
        for whole in self.answers.values():
            if len(whole) > len(seen) and all(
                a in (-1, b) for a, b in zip(seen, whole[: len(seen)], strict=True)
            ):
                found = whole[len(seen) : len(seen) + count]
                return [*found, *[0] * (count - len(found))]
        return [0] * count


def all_right(drafts, end):
    return drafts


def all_wrong(drafts, end):
    return [(token + 1) % 320 for token in drafts]


def alternating(drafts, end):
    return [token if (end + place) % 3 else (token + 1) % 320 for place, token in enumerate(drafts)]


def short(drafts, end):
    """Sometimes none, sometimes fewer than wanted."""
    return drafts[: end % 4]


SCRIPTS = {"right": all_right, "wrong": all_wrong, "alternating": alternating, "short": short}


def use(monkeypatch, drafter, *, depth=1):
    """Runtimes that are asked for any drafter get this one, and launch so many steps before one is read."""
    monkeypatch.setattr(
        builder, "new_drafter", lambda resolved: drafter if resolved.config.speculative else None
    )
    monkeypatch.setattr(engine_builder, "DEPTHS", {"cpu": depth, "cuda": depth})


SETTINGS = SMALL | {"dtype": "float64", "compile": False}
