"""The exact law: every sampler x every kind of proposal x every setting x gamma 1..3, and what it must refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specpipe.audit import exact
from specpipe.audit.exact import FULL, GAMMAS, PROPOSALS, RULES, SETTINGS, exact_law, law_error
from specpipe.audit.finding import FAILED, PASSED
from specpipe.chance import Chance
from specpipe.distribution import Rows, in_vocabulary
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.samplers.block import Block
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from tests import wrong_rules
from tests.wrong_rules import TOKEN_RULES, FrozenPrefix, OtherSettings

SOFT, ONE_HOT = PROPOSALS["soft q"], PROPOSALS["one-hot q"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("sampler", [Rejection, Block, ExactMatch])
def test_the_joint_law_of_four_tokens_is_the_targets(sampler: type, settings: str) -> None:
    """C5, C7, C14-C19, C38, C39: theory.md section 8a, in float64."""
    rule = RULES.get(settings, FULL)
    for name, proposer in PROPOSALS.items():
        for gamma in GAMMAS:
            assert law_error(sampler(), proposer, gamma, SETTINGS[settings], rule) <= 1e-12, (name, gamma)


def test_every_setting_that_shapes_the_law_is_in_the_sweep() -> None:
    """A setting that is added later must not be forgotten here, alone and together with the others."""
    about_ending_or_reporting = {"max_new_tokens", "stop", "include_stop_str_in_output", "ignore_eos"}
    about_ending_or_reporting |= {"logprobs", "logprobs_mode"}
    shaping = set(vars(GenerationSettings())) - about_ending_or_reporting
    assert shaping == {name for settings in SETTINGS.values() for name in settings}
    assert shaping - {"banned_token_ids"} == set(SETTINGS["all together"])


# ---- what it must refuse ----


BLOCK_RULES = ["TokenResidual", "BlockResidual", "Unclipped", "WhileBelowW", "LastBelowW", "FirstFailure"]
WRONG = {name: rule for name, rule in TOKEN_RULES.items() if name != "right"}
WRONG |= {name: getattr(wrong_rules, name)() for name in [*BLOCK_RULES, "SecondChance", "ShiftedRow", "Redraw"]}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str) -> None:
    """theory.md sections 2 and 4: also block acceptance with the token residual, which 150,000 samples do not see."""
    assert law_error(WRONG[name], SOFT, 3, SETTINGS["temperature 1"]) > 1e-3


@pytest.mark.parametrize(
    "settings", ["repetition_penalty", "frequency_penalty", "presence_penalty", "min_new_tokens", "all together"]
)
def test_settings_frozen_at_the_step_start_are_caught(settings: str) -> None:
    """C38, C39: penalties and min_new_tokens see the exact prefix at each place of a block."""
    assert law_error(FrozenPrefix(), SOFT, 2, SETTINGS[settings], FULL) > 1e-3


@pytest.mark.parametrize("bonus_only", [False, True])
@pytest.mark.parametrize(
    ("settings", "left_out"),
    [("temperature 0.7", {"temperature": 1.0}), ("top_k", {"top_k": 0}), ("top_p", {"top_p": 1.0})],
)
def test_settings_that_miss_some_rows_are_caught(settings: str, left_out: dict[str, Any], bonus_only: bool) -> None:
    """C14, C15: filters or temperature of the request that do not reach the verifier, or not its bonus row."""
    assert law_error(OtherSettings(bonus_only, **left_out), SOFT, 2, SETTINGS[settings], FULL) > 1e-3


def test_a_q_that_was_not_drawn_from_is_caught() -> None:
    """C2, C19: a padded draft's law handed back without dropping the padding's share, as it was before."""

    class Padded:
        def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
            draft = PROPOSALS["padded vocabulary"].propose(sequences, lengths)
            assert draft.probs is not None
            return Draft(draft.tokens, draft.lengths, draft.probs * 0.5 + 0.5 / 3)

    assert law_error(Rejection(), Padded(), 2, SETTINGS["temperature 1"]) > 1e-3


@pytest.mark.parametrize("gamma", [4, 5, 8])
@pytest.mark.parametrize("sampler", [Rejection, Block, ExactMatch])
def test_long_drafts_are_explored_step_by_step(sampler: type, gamma: int) -> None:
    """All that one step may emit, continued by the target; also under settings that look back."""
    for name in ("temperature 1", "frequency_penalty"):
        for proposer in exact.long_proposals(gamma).values():
            assert exact.step_error(sampler(), proposer, gamma, SETTINGS[name]) <= 1e-12


class Late(Rejection):
    """Keeps every draft behind the third unseen."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        n, y = super().accept(x[:3], p, None if q is None else q[:3], chance)
        return (n, y) if n < min(3, len(x)) or len(x) <= 3 else (len(x), chance.draw(p[len(x)]))


@pytest.mark.parametrize("gamma", [5, 8])
def test_what_is_wrong_in_long_drafts_alone_is_caught(gamma: int) -> None:
    for proposer in exact.long_proposals(gamma).values():
        assert exact.step_error(Late(), proposer, gamma, SETTINGS["temperature 1"]) > 1e-3
        assert exact.step_error(TOKEN_RULES["bonus from the previous row"], proposer, gamma, {"temperature": 1}) > 1e-5


# ---- the finding ----


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SETTINGS", {"temperature 1": {"temperature": 1.0}})
    monkeypatch.setattr(exact, "PROPOSALS", {"soft q": SOFT, "one-hot q": ONE_HOT})


@pytest.mark.usefixtures("few_cases")
def test_a_finding_counts_the_cases_and_names_the_worst() -> None:
    done: list[int] = []
    right = exact_law(Rejection(), {"as configured": {"temperature": 0.5, "top_k": 2}}, 5, done.append)
    assert (right.result, len(right.numbers["cases"]), sum(done)) == (PASSED, 12 + 6, 12 + 6)
    assert right.numbers["largest_error"] <= 1e-12
    wrong = exact_law(TOKEN_RULES["correction from p"])
    assert wrong.result == FAILED
    assert "soft q" in wrong.reason or "one-hot q" in wrong.reason
    assert "gamma" in wrong.reason


@pytest.mark.usefixtures("few_cases")
def test_the_runs_own_draft_length_is_part_of_it() -> None:
    assert exact_law(Late(), gamma=3).result == PASSED
    assert exact_law(Late(), gamma=5).result == FAILED


@pytest.mark.usefixtures("few_cases")
def test_a_sampler_that_fails_is_a_finding_too() -> None:
    class Broken(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            return len(x), chance.draw(p[0] * 0)

    found = exact_law(Broken())
    assert found.result == FAILED
    assert "without mass" in found.reason


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("source", ["torch", "numpy", "uniforms"])
def test_randomness_that_cannot_be_explored_is_refused(source: str) -> None:
    class Own(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            own = {"torch": lambda: torch.rand(()).item(), "numpy": np.random.default_rng().random}
            v = own[source]() if source in own else chance.uniforms(len(x))[1]
            return 0, int(v * 3)

    with pytest.raises(UserError, match=r"sampler: Own .*chance\.passes and chance\.draw"):
        exact_law(Own())


def test_logits_over_a_drafts_ids_become_those_over_the_targets() -> None:
    """C18, C19: placed at target ids, padding and unknown tokens dropped; the law is renormalised over the rest."""
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.5, 0.5]]).log()
    placed = in_vocabulary(q, 5, torch.tensor([4, 0, 7, -1])).softmax(-1)
    assert torch.allclose(placed[0], torch.tensor([2 / 3, 0, 0, 0, 1 / 3]))
    assert torch.allclose(in_vocabulary(q, 3).softmax(-1)[0], torch.tensor([1 / 6, 1 / 3, 1 / 2]))
    assert in_vocabulary(q, 6)[0].tolist() == pytest.approx([*q[0].tolist(), -torch.inf, -torch.inf])
