"""Built-in prompts for the load generator: varied, of a wanted length, and no two alike from their first words on.

The texts are our own. Pure: lengths are counted in words; who calls knows how many words make a token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from hamburger.clients.json_lines import check_text, read_rows
from hamburger.clients.output_files import reading

TASKS = (
    "Summarise these notes in three short paragraphs for a reader in a hurry.",
    "Write a letter to a neighbour that mentions at least two of these facts.",
    "Explain step by step what could be learned from this, and what could not.",
    "Write a Python function with a docstring that stores such records, and show how it is used.",
    "List the five most important points as bullets and give a reason for each.",
    "Tell a short story for children in which all of this happens on one day.",
    "Turn the notes into a dialogue between a teacher and a curious pupil.",
    "Compute a plausible total cost for the work described and show every step.",
)
FACTS = (
    "The ferry leaves the north pier at six and carries forty bicycles in summer.",
    "A baker needs about eleven kilograms of flour for a hundred loaves of rye bread.",
    "The observatory keeps its old brass telescope in a room without windows.",
    "Rainwater from the roof fills two tanks, and the second one leaks a litre an hour.",
    "In spring the river rises slowly, so the fields behind the mill are planted late.",
    "The library lends out maps, tools and a sewing machine for two weeks at a time.",
    "Each battery holds nine units of energy and loses a tenth of it every month.",
    "The village clock was repaired twice last year and still runs four minutes slow.",
    "Seven volunteers painted the hall green because blue paint was too expensive.",
    "The train driver reported fog, a fallen branch and a flock of geese on the line.",
    "Honey from the upper meadow is darker than honey from the orchard by the lake.",
    "The new bridge may carry lorries of up to twelve tonnes, but only one at once.",
    "Two of the sensors disagree at night, and nobody knows which of them is right.",
    "The museum sells postcards of a painting that it returned to its owner in May.",
    "Potatoes, leeks and onions are stored in sand, and apples never stand beside them.",
    "The programme reads a file of dates, sorts them and prints every missing day.",
    "A letter takes three days to the island, or five when the wind is from the west.",
    "The choir rehearses on Tuesdays in a gymnasium with a surprisingly good echo.",
)


def built_in_prompts(number: int, words: int, seed: int) -> list[str]:
    """`number` prompts of `words` words each; same arguments, same prompts."""
    return list(islice(endless_prompts(words, seed), number))


def endless_prompts(words: int, seed: int, variant: int = 0) -> Iterator[str]:
    """Prompts of `words` words each, made as they are taken; same arguments, same prompts.

    Each begins with a number of its own, so that a server's prefix cache does not answer for the model; of a seed that
    it has answered before, it does. Another variant has the same texts behind other numbers.
    """
    rng = random.Random(seed)
    while True:
        yield _prompt(rng, words, variant)


def _prompt(rng: random.Random, words: int, variant: int) -> str:
    number = (rng.randrange(10**9) + variant * 618_033_989) % 10**9  # apart in their first digits
    text = [f"Case-{number}:"]
    task = rng.choice(TASKS).split()
    while len(text) + len(task) < words:
        text += rng.choice(FACTS).split()
    del text[max(1, words - len(task)) :]  # the task at the end stays whole as far as there is room
    return " ".join((text + task)[:words])


def read_prompts(path: Path) -> list[str]:
    """The "prompt" of every line of --dataset, a JSON Lines file, plain or gzipped.

    Raises OSError that names the option, or ValueError that names file and line.
    """
    prompts = []
    with reading("--dataset", path):
        for number, row in read_rows(path):
            prompt = row.get("prompt") if isinstance(row, dict) else None
            if not isinstance(prompt, str) or not prompt:
                raise ValueError(f'{path}, line {number}: expected {{"prompt": "some text"}}')
            check_text(f'{path}, line {number}: "prompt"', prompt)
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts
