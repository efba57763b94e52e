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
islands|bridges|railways|ships|airplanes|bicycles|clocks|
cheese|olive oil|tea|chocolate|honey|spices|bread|rice|wine|ice cream|breakfast|
ants|spiders|wolves|elephants|owls|sharks|horses|butterflies|coral reefs|mushrooms|oak trees|
roses|the eye|the brain|bones|blood|muscles|allergies|headaches|the flu|stress|good posture|yoga|
running|tennis|basketball|hiking|camping|fishing|photography|painting|sculpture|ballet|
rock music|the piano|movies|comic books|fairy tales|poetry|newspapers|museums|libraries|
schools|exams|homework|universities|holidays|birthdays|weddings|gifts|good manners|
small talk|leadership|teamwork|creativity|patience|courage|happiness|loneliness|fear|
anger|forgiveness|trust|freedom|justice|human rights|elections|the law|the police|
hospitals|farms|factories|banks|money|credit cards|advertising|small businesses|start-ups|
marketing|electricity|batteries|light|sound|heat|atoms|chemical reactions|water|ice|fire|
steel|glass|plastic|paper|cotton|the telephone|radio|television|smartphones|video games|
social media|email|passwords|cloud computing|robots|artificial intelligence|databases|
web browsers|spreadsheets|Python|JavaScript|algorithms|statistics|averages|percentages|
geometry|algebra|calculus|graphs|logic|philosophy|ethics|psychology|economics|history|
archaeology|maps|time zones|calendars|the seasons|storms|the wind|fog|the ocean|the Arctic|
the Sahara|the Amazon|the Moon|Mars|comets|galaxies|rockets|telescopes|submarines|elevators|
traffic|public transport|houses|furniture|cleaning|laundry|clothes|shoes|perfume"""
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
    "Describe {} in detail.",
    "What should everybody know about {}?",
    "Write three questions about {} for a quiz, with their answers.",
    "I know nothing about {}. Where do I start?",
    "Write the introduction of an essay on {}.",
    "Give me some ideas for a talk about {}.",
    "Write a conversation between two friends about {}.",
    "How has {} changed over time?",
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

_THINGS = """\
a lamp|a kettle|a pair of shoes|a tent|a phone|a camera|a bicycle helmet|a backpack|a desk|
a coffee mug|an umbrella|a water bottle|a board game|a mystery novel|a mobile app|a small café|
a podcast|a bakery|a science museum|a yoga class|a food truck|a travel blog|a garden center|
a music festival|a language school|a pet shop"""
_MAKES = (
    "Write a product description for {}.",
    "Suggest ten names for {}.",
    "Write a slogan for {} and say why it works.",
    "What should I look for when I choose {}?",
    "Write a short review of {}.",
    "Write a tweet that announces {}.",
)
_GOALS = """\
sleep better|learn the guitar|save money|eat healthier|run five kilometres|write every day|
get along with a difficult colleague|prepare for an exam|plan a birthday party|pack for a trip|
clean the kitchen|start a garden|read more books|make new friends|stop procrastinating|
give a good presentation|raise a puppy|repair a flat tire|grow tomatoes|cook rice|
remember names|stay calm in an argument|find a job|set up a home office|learn to code|
spend less time on the phone|write a cover letter|choose a laptop|take better photos|
organise a small library"""
_WAYS = (
    "How can I {}?",
    "Give me a list of tips to {}.",
    "Make a plan for one week that helps me to {}.",
    "I want to {}, but I have little time. What do you suggest?",
    "What are common mistakes when people try to {}?",
    "Write a short dialogue in which someone asks how to {}.",
)
_PAIRS = """\
a virus and a bacterium|a list and a dictionary in Python|weather and climate|tea and coffee|
cats and dogs|a lake and a pond|a simile and a metaphor|speed and velocity|
an alligator and a crocodile|a comet and an asteroid|empathy and sympathy|stocks and bonds|
HTTP and HTTPS|a city and a town|
a stack and a queue|fiction and non-fiction|an opera and a musical|mass and weight|
a moth and a butterfly|jogging and walking|a novel and a short story|
a process and a thread|gas and electric stoves"""
_COMPARES = (
    "What is the difference between {}?",
    "Compare {} in a short paragraph.",
    "Make a table in plain text that compares {}.",
)
_LETTERS = """\
ask my boss for a day off|thank a friend for a gift|apologise to a customer for a late delivery|
invite my neighbours to a barbecue|ask a professor about a grade|decline a job offer|
ask for a refund|introduce myself to a new team|remind a colleague of a deadline|
complain about noise|congratulate my sister on her new job|cancel a subscription|
recommend a student|ask for a letter of recommendation|resign from a job|book a hotel room|
report a broken elevator|ask a landlord to repair a window"""
_WRITES = (
    "Write a polite email to {}.",
    "Write a short and friendly message to {}.",
    "Draft a formal letter to {}.",
)
_PLACES = """\
France|Japan|Brazil|Egypt|Canada|Kenya|India|Norway|Mexico|Australia|Italy|Peru|Turkey|Iceland|
Morocco|Thailand|Greece|Poland|Argentina|Vietnam|New York|London|Rome|Tokyo|Cairo|Sydney|Berlin"""
_TRIPS = (
    "What is {} known for?",
    "Plan a trip of three days to {}.",
    "Describe a typical breakfast in {}.",
    "Tell me about the history of {}.",
    "Which animals live in {}?",
)
_FOODS = """\
pancakes|vegetable soup|tomato sauce|chocolate cake|fried rice|apple pie|lentil curry|guacamole|
banana bread|an omelette|potato salad|pizza dough|lemonade|oatmeal cookies|roast chicken|hummus"""
_COOKS = (
    "Give me a simple recipe for {}.",
    "What goes well with {}?",
    "How do I make {} without eggs or milk?",
)
_NUMBERS = (
    "A box holds {a} apples. How many apples are in {b} boxes? Explain your steps.",
    "What is {a} plus {b}?",
    "What is {a} times {b}? Show how you get there.",
    "Anna has {a} coins and gives {b} of them away. How many are left?",
    "A train goes {a} kilometres an hour. How far does it go in {b} hours?",
    "Count from {b} to {a}.",
)
_PASSAGES = """\
The library opened its new reading room on Monday. It has forty seats, large windows and a quiet
corner for children. The mayor said that more people borrow books than ever before.|
Honey bees tell each other where flowers are by dancing. The angle of the dance shows the direction,
and its length shows the distance. Scientists have studied this language for a hundred years.|
Our team met on Tuesday to talk about the delay. The supplier cannot deliver the parts before May.
We decided to look for a second supplier and to tell the customers this week.|
Maria moved to the coast last spring. She misses her friends, but she likes the sea and has found
work in a small hotel. In the evenings she paints boats.|
The new bus line connects the station with the hospital. It runs every ten minutes during the day.
Some residents complain about the noise, while others are glad to leave their cars at home.|
Plants take in light, water and carbon dioxide and make sugar and oxygen. The green pigment that
catches the light is called chlorophyll. Without plants there would be no animals.|
The company sold more phones than last year but earned less, since parts and transport became more
expensive. It plans to raise its prices in the autumn and to open a factory nearer to them.|
A storm hit the island on Friday night. Trees fell on roads and two villages had no power until
Sunday. Nobody was hurt, and volunteers helped to clear the streets."""
_EDITS = (
    "Summarize this text in one sentence:",
    "Rewrite this text in a more formal style:",
    "List the main points of this text:",
    "Correct any mistakes in this text and return it:",
    "Write three questions about this text:",
    "Continue this text:",
    "Turn this text into a short poem:",
)
_TALK = """\
Hello!|Hi, how are you?|Who are you?|What can you do?|Tell me a joke.|I feel sad today.|I am bored.|
Thank you for your help.|What is your favourite colour?|Can you help me with my homework?|
Good morning! What should I do today?|Tell me something interesting.|What is the meaning of life?|
I had a bad day at work.|Do you dream?|Give me a riddle.|Say something nice.|
I cannot decide what to eat."""
_GRIDS = (
    (_MAKES, _THINGS),
    (_WAYS, _GOALS),
    (_COMPARES, _PAIRS),
    (_WRITES, _LETTERS),
    (_TRIPS, _PLACES),
    (_COOKS, _FOODS),
)


def questions(seed: int = 0) -> list[str]:
    """All of them, in a seeded order."""
    topics, heroes, turns, tasks = map(_split, (_TOPICS, _HEROES, _TURNS, _TASKS))
    found = [ask.format(topic) for ask in _ASKS for topic in topics]
    for asks, names in _GRIDS:
        found += [ask.format(name) for ask in asks for name in _split(names)]
    found += [f"{edit}\n\n{text}" for edit in _EDITS for text in _split(_PASSAGES)]
    found += [ask.format(a=a, b=b) for ask in _NUMBERS for a in range(12, 97, 7) for b in (3, 5, 8)]
    found += _split(_TALK)
    found += [f"Tell me a story about {hero} {turn}." for hero in heroes for turn in turns]
    for task in tasks:
        found += [f"Write a {lang} function that {task}." for lang in ("Python", "JavaScript", "C")]
    found += _renames()
    random.Random(seed).shuffle(found)
    return found


def _split(names: str) -> list[str]:
    return [" ".join(name.split()) for name in names.split("|")]


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
