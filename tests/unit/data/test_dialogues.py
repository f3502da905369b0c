"""Every format of demonstrations and pairs, and every record that is refused."""

from typing import Any

import pytest

from hpc_rlhf.config import DataConfig
from hpc_rlhf.data.dialogues import Dialogue, read_demonstration, read_margin, read_pair
from hpc_rlhf.data.records import BadRecord

USER = {"role": "user", "content": "3+5?"}
GOOD, BAD = {"role": "assistant", "content": "8"}, {"role": "assistant", "content": "9"}
SYSTEM = {"role": "system", "content": "Be brief."}
HH = "\n\nHuman: 3+5?\n\nAssistant: Which base?\n\nHuman: Ten.\n\nAssistant:"
TURNS = (
    USER,
    {"role": "assistant", "content": "Which base?"},
    {"role": "user", "content": "Ten."},
)
CHAT = DataConfig(chat_template=True)


@pytest.mark.parametrize(
    ("record", "config", "expected"),
    [
        ({"prompt": "3+5=", "completion": "8"}, DataConfig(), Dialogue("3+5=", "8")),
        ({"prompt": "3+5?", "completion": "8"}, CHAT, Dialogue((USER,), (GOOD,))),
        ({"prompt": [USER], "completion": [GOOD]}, DataConfig(), Dialogue((USER,), (GOOD,))),
        ({"messages": [USER, GOOD]}, DataConfig(), Dialogue((), (USER, GOOD))),
        (
            {"q": "3+5=", "a": "8"},
            DataConfig(prompt_field="q", completion_field="a"),
            Dialogue("3+5=", "8"),
        ),
        (
            {"messages": [USER, GOOD]},
            DataConfig(system="Be brief."),
            Dialogue((SYSTEM,), (USER, GOOD)),
        ),
        (
            {"messages": [SYSTEM, USER, GOOD]},
            DataConfig(system="Another."),
            Dialogue((), (SYSTEM, USER, GOOD)),
        ),
    ],
)
def test_demonstrations(record: dict[str, Any], config: DataConfig, expected: Dialogue) -> None:
    assert read_demonstration(record, config, place="d:1") == expected


@pytest.mark.parametrize(
    ("record", "config", "prompt", "answers"),
    [
        ({"prompt": "3+5=", "chosen": "8", "rejected": "9"}, DataConfig(), "3+5=", ("8", "9")),
        ({"prompt": "3+5?", "chosen": "8", "rejected": "9"}, CHAT, (USER,), ((GOOD,), (BAD,))),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
            DataConfig(),
            (USER,),
            ((GOOD,), (BAD,)),
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
            DataConfig(),
            (USER,),
            ((GOOD,), (BAD,)),
        ),
        (  # UltraFeedback: a text prompt beside whole conversations
            {"prompt": "3+5?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            DataConfig(system="Be brief."),
            (SYSTEM, USER),
            ((GOOD,), (BAD,)),
        ),
        ({"chosen": HH + " 8", "rejected": HH + " 9"}, DataConfig(), HH, (" 8", " 9")),
        ({"chosen": HH + " 8", "rejected": HH + " 9"}, CHAT, TURNS, ((GOOD,), (BAD,))),
        (  # they part before the last turn: only messages can say what the assistant says
            {"chosen": HH + " 8", "rejected": "\n\nHuman: 3+5?\n\nAssistant: 9"},
            CHAT,
            (USER,),
            ((*TURNS[1:], GOOD), (BAD,)),
        ),
    ],
)
def test_pairs(record: dict[str, Any], config: DataConfig, prompt: Any, answers: Any) -> None:
    chosen, rejected = read_pair(record, config, place="d:1")
    assert chosen == Dialogue(prompt, answers[0])
    assert rejected == Dialogue(prompt, answers[1])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "d:7: no key 'completion' .its keys: 'prompt'.; expected 'messages', or"),
        ({"completion": "a"}, "d:7: no key 'prompt'"),
        ({"prompt": "a", "completion": None}, "d:7: 'completion' is null"),
        ({"prompt": "a", "completion": " \n"}, "d:7: completion: the completion is empty"),
        ({"prompt": "a", "completion": 8}, "d:7: 'completion' is neither text nor a list"),
        ({"prompt": "a", "completion": [GOOD]}, "both be text, or both messages"),
        ({"messages": []}, "'messages' is neither text nor a list"),
        ({"messages": [{"role": "user"}]}, "message 1 has no 'role' and 'content'"),
        ({"messages": [USER]}, "the conversation has no assistant message"),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "an assistant message is empty",
        ),
    ],
)
def test_demonstrations_that_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        read_demonstration(record, DataConfig(), place="d:7")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "d:7: no key 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected: the completion is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "is text, the other messages"),
        ({"chosen": "b", "rejected": "c"}, r"there is no prompt: .*begin with '\\n\\nHuman:'"),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, "differ first in message 1"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "differ first in message 2"),
        ({"chosen": HH + " 8", "rejected": HH}, "rejected: the completion is empty"),
        ({"chosen": HH + " 8", "rejected": HH + "9\n\nHuman: No."}, "assistant's last turn only"),
    ],
)
def test_pairs_that_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        read_pair(record, DataConfig(), place="d:7")


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf")])
def test_margins_that_are_refused(value: Any) -> None:
    with pytest.raises(BadRecord, match="d:7: 'm' is"):
        read_margin({"m": value}, DataConfig(margin_field="m"), place="d:7")


def test_margins() -> None:
    assert read_margin({"m": 2}, DataConfig(margin_field="m"), place="d:7") == 2.0
    assert read_margin({"m": 2}, DataConfig(), place="d:7") == 0.0
