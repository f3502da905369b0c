"""Chains of runs: what the links are, and what can be checked of them before the first one runs."""

from pathlib import Path
from typing import Any

import pytest

from hpc_rlhf.chain import _literal, before_the_chain, compose_links
from hpc_rlhf.config import AlgorithmName, RewardName, Stage
from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.errors import UserError

OWN = """\
# @package _global_
run: {name: demo, steps: 9}
model: {path: /base}
data: {prompts: /p.jsonl}
chain:
  first:
    stage: sft
    run: {steps: 3}
    data: {train: '/my data/"d".jsonl', add_bos: true, margin_field: null}
    sampling: {stop_token_ids: [5, 6]}
    learner: {optimizer: {lr: 1.0e-05}}
    cluster: {extra: {hint: nomultithread}}
  second:
    model: {path: '${run.root}/${run.name}-first/policy'}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(OWN)
    return tmp_path


def _links(own: Path, *overrides: str) -> dict[str, Any]:
    links = compose_links(["experiment=mine", *overrides], config_directory=own)
    return {link.name: link.config for link in links}


def test_links_are_runs_of_their_own_in_order(own: Path) -> None:
    links = _links(own, f"run.root={own}")
    assert list(links) == ["first", "second"]
    first, second = links.values()
    assert (first.run.name, first.stage, first.run.steps) == ("demo-first", Stage.SFT, 3)
    assert (second.run.name, second.stage, second.run.steps) == ("demo-second", Stage.ONLINE, 9)
    assert first.data.train == '/my data/"d".jsonl'
    assert first.data.add_bos
    assert first.data.margin_field is None
    assert first.sampling.stop_token_ids == [5, 6]
    assert first.learner.optimizer.lr == 1e-5
    assert first.cluster.extra == {"hint": "nomultithread"}
    assert second.cluster.extra == {}
    assert second.model.path == str(own / "demo-first/policy")
    assert first.chain == second.chain == {}  # each is an ordinary run


def test_the_users_fields_are_of_every_link_or_of_one(own: Path) -> None:
    links = _links(
        own, "chain.second.run.steps=7", "run.steps=5", "run.name=x", "chain.first.algorithm=rloo"
    )
    first, second = links.values()
    assert (first.run.steps, second.run.steps) == (5, 7)
    assert (first.run.name, second.run.name) == ("x-first", "x-second")
    assert second.model.path.endswith("/x-first/policy")
    assert (first.algorithm.name, second.algorithm.name) == (AlgorithmName.RLOO, AlgorithmName.GRPO)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("chain.third.run.steps=3", "no link 'third'; the links are first, second"),
        ("chain.first.run.stepz=3", "chain.first: run.stepz=3: there is no field"),
        ("chain.first.run.name=y", "chain.first.run.name: follows from run.name=demo"),
        ("chain.first=3", "chain.first: expected a name of letters, digits and _, and below it"),
        ("run.stepz=3", "did you mean run.steps"),
    ],
)
def test_what_is_no_chain_is_refused(own: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _links(own, override)


def test_an_experiment_that_is_no_chain_is_one_run() -> None:
    (link,) = compose_links(["experiment=quickstart", "run.name=a"])
    assert (link.name, link.config.run.name) == ("", "a")
    with pytest.raises(UserError, match="has no link 'ppo'; it is no chain of runs"):
        compose_links(["experiment=quickstart", "chain.ppo.run.steps=3"])


@pytest.mark.parametrize("value", ["a=b", "it's", 'say "x"', "back\\slash", 'end\\"\\', "", " x "])
def test_text_survives_the_grammar_of_overrides(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(f"key={_literal(value)}")
    assert parsed.value() == value


def test_models_to_come_are_checked_as_what_they_descend_from(tmp_path: Path) -> None:
    """The chain of the quickstart: policy, reward model, and both in the last link."""
    links = compose_links(["experiment=quickstart_ppo", f"run.root={tmp_path}", "run.name=a"])
    assert [link.name for link in links] == ["sft", "reward_model", "ppo"]
    origin = links[0].config.model.path
    sft, reward, ppo = before_the_chain(links)
    assert sft.config == links[0].config
    assert reward.config.model.path == ppo.config.model.path == origin
    assert ppo.config.reward.model == ppo.config.critic.path == origin
    assert ppo.config.reward.name is RewardName.MODEL
    assert ppo.reward_model_to_come
    assert not reward.reward_model_to_come
    # configurations themselves stay as they are
    assert links[2].config.model.path == str(tmp_path / "a-sft/policy")

    make_tiny_model(tmp_path / "a-sft/policy")  # the first link is complete
    _, reward, ppo = before_the_chain(links)
    assert reward.config.model.path == ppo.config.model.path == str(tmp_path / "a-sft/policy")
    assert ppo.config.reward.model == str(tmp_path / "a-sft/policy")
    assert ppo.reward_model_to_come
