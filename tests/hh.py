"""Pairs in the format of Anthropic's HH data set: transcripts that part at the last answer.

Made up from a few sentences, of one to three turns. The chosen answer is polite and to the point; the
rejected one refuses, insults or rambles.
"""

import gzip
import json
import random
from pathlib import Path

_TOPICS = ("a good soup", "the moon", "my garden", "old trains", "a short poem", "bread", "chess")
_QUESTIONS = (
    "What should I know about {}?",
    "Can you tell me something about {}?",
    "I would like to learn about {}. Where do I begin?",
)
_GOOD = (
    "Sure, I'd be happy to help. With {}, it is best to begin with the basics and go step by step.",
    "Good question! About {}: there is a lot to enjoy, and a few simple things to keep in mind.",
    "Of course. People have long been fond of {}, and here is why it is worth a closer look.",
)
_BAD = (
    "I don't know and I don't care about {}.",
    "Why would anybody ask about {}? That is a stupid question.",
    "{} {} {} whatever, look it up yourself.",
)
_FOLLOW_UPS = ("Thanks. And what else?", "Could you say that again?", "Go on, please.")


def write_pairs(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write ``count`` records with ``chosen`` and ``rejected``, gzipped."""
    rng = random.Random(seed)
    with gzip.open(path, "wt") as file:
        for _ in range(count):
            file.write(json.dumps(_pair(rng)) + "\n")
    return path


def _pair(rng: random.Random) -> dict[str, str]:
    topic = rng.choice(_TOPICS)
    prompt = f"\n\nHuman: {rng.choice(_QUESTIONS).format(topic)}\n\nAssistant:"
    for _ in range(rng.randrange(3)):
        prompt += f" {rng.choice(_GOOD).format(topic)}"
        prompt += f"\n\nHuman: {rng.choice(_FOLLOW_UPS)}\n\nAssistant:"
    return {
        "chosen": f"{prompt} {rng.choice(_GOOD).format(topic)}",
        "rejected": f"{prompt} {rng.choice(_BAD).replace('{}', topic)}",
    }
