"""Questions for a chat model to answer, so that a head learns from what it says: made of parts, in
an order that mixes them."""

from __future__ import annotations

import inspect
import random
import textwrap
from types import FunctionType

_TOPICS = """\
the water cycle|photosynthesis|black holes|inflation|the French Revolution|vaccines|tides|
jazz|chess openings|plate tectonics|the immune system|compound interest|climate change|
volcanoes|DNA|electric cars|the Roman Empire|earthquakes|the stock market|sleep|
supply and demand|magnets|bees|the Great Wall of China|machine learning|recursion|
the solar system|democracy|the Renaissance|coffee|rainbows|the human heart|bread baking|
marathon training|public speaking|gardening|meditation|budgeting|time management|
the printing press|gravity|evolution|the internet|hash tables|sorting algorithms|
binary search|operating systems|encryption|relational databases|version control|unit tests|
prime numbers|fractions|probability|the Pythagorean theorem|negative numbers|whales|penguins|
dinosaurs|rain forests|deserts|glaciers|opera|impressionism|haiku|the violin|soccer|swimming|
healthy breakfasts|vitamins|learning a language|job interviews|writing a novel|city planning|
recycling|solar panels|wind power|nuclear energy|the moon landing|the Silk Road|samurai|
ancient Egypt|the Vikings|the Cold War|trade|taxes|insurance|remote work|team meetings|
customer service|friendship|honesty|curiosity|moving house|stars|clouds|snow|rivers|mountains|
islands|bridges|railways|ships|airplanes|bicycles|clocks"""
_ASKS = (
    "Explain {} to a ten-year-old.",
    "What is {}? Answer in three sentences.",
    "Write a short paragraph about {}.",
    "Give me five interesting facts about {}.",
    "What are the most common misunderstandings about {}?",
    "Write a short poem about {}.",
    "List the advantages and disadvantages of {}.",
    "How would you teach a beginner about {}? Go step by step.",
    "Write an email to a friend about {}.",
    "Tell me a short story in which {} matters.",
    "Summarize the history of {}.",
    "Why does {} matter today?",
)
_HEROES = """\
a tailor|a young wolf|an old sailor|a shy ghost|a beekeeper|a lost kite|a queen|a nurse|
a talking tree|a mountain guide|a librarian|a small robot|two rivals|a street musician|
a farmer|a crow|a postman|a retired pirate|an inventor|a child on a night train|a baker|
a goldfish|a blind painter|a judge"""
_TURNS = """\
who finds a door in the forest|who has to keep a secret|and a storm|who loses a bet|
and the forgotten city|who wants to go home|who gets a second chance|and a strange machine|
who learns to listen|and the longest winter|who meets an old enemy|and a broken promise"""
_TASKS = """\
reverses a string|counts vowels in a text|finds the largest number in a list|
checks whether a number is prime|computes a factorial|merges two sorted lists|
removes duplicates|flattens a nested list|counts words in a file|
converts Celsius to Fahrenheit|checks for palindromes|sums the digits of a number|
finds the median|transposes a matrix|reads a CSV file|sorts by length|
computes Fibonacci numbers|finds common elements of two lists|validates an email address|
rolls dice"""


def questions(seed: int = 0) -> list[str]:
    """All of them, in a seeded order."""
    topics, heroes, turns, tasks = map(_split, (_TOPICS, _HEROES, _TURNS, _TASKS))
    found = [ask.format(topic) for ask in _ASKS for topic in topics]
    found += [f"Tell me a story about {hero} {turn}." for hero in heroes for turn in turns]
    for task in tasks:
        found += [f"Write a {lang} function that {task}." for lang in ("Python", "JavaScript", "C")]
    found += _renames()
    random.Random(seed).shuffle(found)
    return found


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split("|")]


def _renames() -> list[str]:
    """Functions of the standard library with a name to change."""
    found = []
    for function in vars(textwrap).values(), vars(inspect).values(), vars(random).values():
        for each in function:
            if isinstance(each, FunctionType) and each.__code__.co_argcount:
                source = inspect.getsource(each)
                if len(source) < 700:
                    old = each.__code__.co_varnames[0]
                    ask = f"Rewrite this code with `{old}` renamed to `given`"
                    found.append(f"{ask}, and change nothing else:\n\n```\n{source}```")
    return found
