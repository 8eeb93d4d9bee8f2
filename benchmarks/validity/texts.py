"""Texts of the population, generated, and one tokenizer for all of them.

Everything is generated, so the population needs no network and every test has an exact answer. Numbers are
written digit by digit. Words of the bundled token sets (everyday words, Python's keywords, legal terms) are
whole pieces in the variant that the sets name, because the generators use them there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from lmeval_screener.tokens.sets import load_token_set
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
OPERANDS = 7  # operands of sums and differences are below this

# Everyday words by what may be done with them; every word of the reference set's nouns is in one class.
CLASSES = {
    "place": "house kitchen garden street village town beach river mountain forest",
    "plant": "tree flower grass",
    "animal": "bird dog cat horse fish",
    "food": "bread milk cheese apple sugar coffee tea dinner breakfast lunch",
    "person": "mother father brother sister friend baby woman girl boy",
    "body": "hair mouth nose arm leg foot finger",
    "clothing": "shirt hat dress shoes",
    "furniture": "bed chair door",
    "time": "morning evening night summer winter",
    "weather": "weather rain snow wind sun moon sky",
    "art": "music song",
}
NOUNS = {name: words.split() for name, words in CLASSES.items()}
CLASS_OF = {word: name for name, words in NOUNS.items() for word in words}
ACTIONS = {  # verb -> class of its object
    "eat": "food",
    "drink": "food",
    "cook": "food",
    "buy": "clothing",
    "wear": "clothing",
    "wash": "body",
    "sing": "art",
    "hope": "weather",
    "dream": "place",
    "remember": "person",
    "visit": "place",
    "love": "animal",
    "travel": "place",
    "walk": "animal",
    "talk": "person",
}
FEELINGS = ["sleep", "laugh", "smile", "cry", "dance"]
ADJECTIVES = {
    "place": "quiet beautiful nice clean",
    "plant": "tall green yellow soft",
    "animal": "young happy loud nice",
    "food": "sweet hot cold warm",
    "person": "happy sad tired young tall",
    "body": "clean dirty soft cold",
    "clothing": "red blue green yellow dirty clean",
    "furniture": "red blue clean soft",
    "time": "warm cold quiet beautiful",
    "weather": "cold warm hot beautiful",
    "art": "loud quiet sad beautiful",
}
COLOURS = ["red", "blue", "green", "yellow", "soft", "clean", "dirty", "nice"]
THINGS = [
    *NOUNS["animal"],
    *NOUNS["food"],
    *NOUNS["clothing"],
    *NOUNS["furniture"],
    *NOUNS["plant"],
]

# A legal matter: instrument, who owes, who is owed, what is broken, what is granted, who decides.
MATTERS = [
    "lease tenant landlord covenant damages court",
    "agreement lessee lessor provisions termination tribunal",
    "copyright licensee licensor infringement injunction judge",
    "escrow trustee beneficiary fiduciary remedy probate",
    "mortgage debtor creditor lien bankruptcy jurisdiction",
    "warranty defendant plaintiff negligence verdict jury",
    "contract assignee attorney breach indemnity arbitration",
    "patent counsel lawyer obligation remedies litigation",
    "statute prosecutor appellant misdemeanor bail appeal",
    "clause attorneys legislation liability waiver ruling",
    "trademark affidavit testimony confidentiality amendment courts",
    "subpoena custody tort felony severability lawsuit",
]
MATTERS_SPLIT = [matter.split() for matter in MATTERS]
LEGAL_LINKS = ["liable", "enforceable", "statutory", "constitutional"]

Sources = dict[str, Callable[[random.Random], str]]

NAMES = ["num", "buf", "tmp", "obj"]  # values of the little programs
VALUES = ["True", "False", "None"]
ARGUMENTS = [*NAMES, *VALUES]
NAMING = (
    1,
    3,
    4,
    6,
    8,
)  # kinds of programs whose result is one of the names: a guess is seldom right


def weighted(rng: random.Random, words: list[str]) -> str:
    """A word of a class, the earlier ones more often (Zipf)."""
    return rng.choices(words, [1 / (2 + i) for i in range(len(words))])[0]


def sentence(rng: random.Random) -> str:
    """One everyday sentence whose verb fits its object and whose adjective fits its noun."""
    who = weighted(rng, NOUNS["person"])
    kind = rng.randrange(5)
    if kind == 0:
        return f" the {who} will {rng.choice(FEELINGS)} in the {weighted(rng, NOUNS['time'])} ."
    verb = rng.choice(list(ACTIONS))
    thing = weighted(rng, NOUNS[ACTIONS[verb]])
    about = rng.choice(ADJECTIVES[CLASS_OF[thing]].split())
    if kind == 1:
        return f" my {who} will {verb} the {about} {thing} ."
    if kind == 2:
        return f" in the {weighted(rng, NOUNS['time'])} we {verb} the {thing} and it is {about} ."
    if kind == 3:
        place = weighted(rng, NOUNS["place"])
        return f" the {about} {thing} was in the {place} , and the {who} came to {verb} it ."
    name = rng.choice(list(NOUNS))
    noun = weighted(rng, NOUNS[name])
    return f" the {noun} here was very {rng.choice(ADJECTIVES[name].split())} ."


def binding(rng: random.Random) -> str:
    """Two sentences, of which the first fixes the last word of the second."""
    who = weighted(rng, NOUNS["person"])
    first, second = rng.sample(THINGS, 2)
    colour_of_first, colour_of_second = rng.sample(COLOURS, 2)
    asked, colour = rng.choice([(first, colour_of_first), (second, colour_of_second)])
    things = f"a {colour_of_first} {first} and a {colour_of_second} {second}"
    rng.sample(THINGS[2:], 2)  # the registered texts are drawn so
    return f" the {who} has {things} . the {colour} thing is the {asked} ."


def story(rng: random.Random) -> str:
    """A short text of everyday words; about a third of its sentences fix a word by what came before."""
    parts = []
    for _ in range(rng.randint(3, 6)):
        if rng.random() < 0.35:
            parts.append(binding(rng))
        else:
            parts.append(sentence(rng))
    return "".join(parts)


def problem(rng: random.Random) -> tuple[int, str, int, int]:
    """Operand, sign, operand, answer: one of 77 facts, which small models learn in part."""
    while True:
        a, b = rng.randrange(OPERANDS), rng.randrange(OPERANDS)
        if rng.random() < 0.5:
            return a, "+", b, a + b
        if a >= b:
            return a, "-", b, a - b


def sums(rng: random.Random) -> str:
    """Solved sums and differences."""
    return " ".join(
        f"{a}{sign}{b}={answer}." for a, sign, b, answer in (problem(rng) for _ in range(8))
    )


def other_answer(rng: random.Random, sign: str) -> int:
    """The answer of another problem with the same sign, so that digits keep their frequencies."""
    while True:
        _, other, _, answer = problem(rng)
        if other == sign:
            return answer


def wrong_sums(rng: random.Random) -> str:
    """The same lines with answers that belong to other problems."""
    problems = (problem(rng) for _ in range(8))
    return " ".join(f"{a}{sign}{b}={other_answer(rng, sign)}." for a, sign, b, _ in problems)


def word_problem(rng: random.Random) -> tuple[str, int]:
    """Question and answer of a sum told in everyday words."""
    a, sign, b, answer = problem(rng)
    who, thing = weighted(rng, NOUNS["person"]), rng.choice(THINGS)
    if sign == "+":
        story = f" the {who} has {a} {thing} and will buy {b} more ."
    else:
        story = f" the {who} has {a} {thing} and will lose {b} of them ."
    return f"{story} how many now ? ", answer


def word_problems(rng: random.Random) -> str:
    """Solved word problems."""
    return "".join(
        f"{question}{answer} ." for question, answer in (word_problem(rng) for _ in range(3))
    )


def random_digits(rng: random.Random) -> str:
    """Numbers that nothing predicts: digits are frequent and there is nothing to learn about them."""
    said = []
    for _ in range(5):
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 7)))
        said.append(f" {rng.choice(['call', 'room', 'code'])} {digits} .")
    return "".join(said)


def matter(rng: random.Random) -> tuple[str, str]:
    """A legal text up to its last word, and that word.

    The instrument and one more word fix it: a qualifier points to the matter whose parties, wrong or forum
    are meant, so there is a table to learn of instrument x qualifier, not twelve phrases.
    """
    here = rng.randrange(len(MATTERS_SPLIT))
    link = rng.randrange(len(LEGAL_LINKS))
    instrument, owing, owed, wrong, remedy, _ = MATTERS_SPLIT[here]
    there = MATTERS_SPLIT[(here + 3 * link) % len(MATTERS_SPLIT)]
    start = f" pursuant to the {LEGAL_LINKS[link]} {instrument} , "
    kind = rng.randrange(4)
    if kind == 0:
        return f"{start}the {owing} shall be sued for the", there[3]
    if kind == 1:
        return f"{start}upon {wrong} the {owed} may seek {remedy} before the", there[5]
    if kind == 2:
        return f"{start}the {owing} shall grant {remedy} to the", there[2]
    return f"{start}the {owed} hereby gives notice of {wrong} to the", there[1]


def legal(rng: random.Random) -> str:
    """A few legal sentences."""
    return "".join(f"{text} {word} ." for text, word in (matter(rng) for _ in range(3)))


def truth(rng: random.Random, depth: int = 2) -> tuple[str, bool]:
    """A Boolean expression of Python and its value."""
    if depth == 0 or rng.random() < 0.25:
        word = rng.choice(["True", "False"])
        return word, word == "True"
    if rng.random() < 0.3:
        text, value = truth(rng, 0)
        return f"not {text}", not value
    left, _ = truth(rng, 0)
    right, _ = truth(rng, depth - 1)
    text = f"{left} {rng.choice(['and', 'or'])} {right}"
    return text, bool(eval(text, {"__builtins__": {}}))  # Python knows its own precedence


def looked_up(first: str, second: str) -> str:
    """The result of ``func`` for two arguments: a table of 21 facts that only reading them teaches."""
    i, j = ARGUMENTS.index(first), ARGUMENTS.index(second)
    return ARGUMENTS[(3 * i + 5 * j + i * j) % len(ARGUMENTS)]


def call(rng: random.Random) -> tuple[str, str]:
    """A call of ``func`` up to its result, and that result."""
    first, second = rng.choice(ARGUMENTS), rng.choice(VALUES)
    return f" assert func ( {first} , {second} ) is", looked_up(first, second)


def program(rng: random.Random, kinds: Sequence[int] = range(12)) -> tuple[str, str]:
    """A little program up to the last word of its assertion, and that word.

    Every line begins with a space, so keywords stand in their spaced form; it runs inside ``if 1:``.
    """
    a, b, c = rng.sample(NAMES, 3)
    kind = rng.choice(kinds)
    if kind in (0, 9, 10, 11):
        text, value = truth(rng)
        return f" val = {text}\n assert val is", str(value)
    if kind == 1:
        text, value = truth(rng, 1)
        return f" val = {a} if {text} else {b}\n assert val is", a if value else b
    if kind == 2:
        made = rng.choice([("not x", "not"), ("x", "same"), ("x is None", "none")])
        given = rng.choice(["True", "False", "None"] if made[1] == "none" else ["True", "False"])
        word = {"not": str(given != "True"), "same": given, "none": str(given == "None")}[made[1]]
        if rng.random() < 0.5:
            return f" func = lambda x : {made[0]}\n assert func ( {given} ) is", word
        return f" def func ( x ) :\n  return {made[0]}\n assert func ( {given} ) is", word
    if kind == 3:
        hit = rng.choice([a, b])
        return (
            f" for val in [ {a} , {b} , {c} ] :\n  if val is {hit} :\n   break\n assert val is",
            hit,
        )
    if kind == 4:
        fails = rng.random() < 0.5
        line = "assert False" if fails else "pass"
        text = f" try :\n  {line}\n  val = {a}\n except Error :\n  val = {b}\n assert val is"
        return text, b if fails else a
    if kind == 5:
        there = rng.random() < 0.5
        sought = rng.choice([a, b]) if there else c
        return f" val = {sought} in [ {a} , {b} ]\n assert val is", str(there)
    if kind == 6:
        text, value = truth(rng, 1)
        more, other = truth(rng, 0)
        program = f" if {text} :\n  val = {a}\n elif {more} :\n  val = {b}\n else :\n  val = {c}\n assert val is"
        return program, a if value else b if other else c
    if kind == 7:
        numbers = rng.sample("0123456789", 2)  # digits that are copied, never added
        text, value = truth(rng, 0)
        return f" num = {numbers[0]} if {text} else {numbers[1]}\n assert num == ", numbers[
            0 if value else 1
        ]
    return f" val = {a}\n while True :\n  val = {b}\n  break\n assert val is", b


def filler(rng: random.Random) -> str:
    """A statement with the keywords that the programs lack."""
    a, b = rng.sample(NAMES, 2)
    return rng.choice(
        [
            f" import {a} as {b}\n",
            f" from {a} import {b}\n",
            f" class {a} :\n  pass\n",
            f" def {a} ( ) :\n  global {b}\n  del {b}\n",
            f" def {a} ( ) :\n  nonlocal {b}\n  yield {b}\n",
            f" async def {a} ( ) :\n  await {b}\n",
            f" with {a} as {b} :\n  raise {b}\n",
            f" try :\n  {a} ( )\n finally :\n  del {a}\n",
            f" for {a} in {b} :\n  continue\n",
        ]
    )


def completed(text: str, word: str) -> str:
    """A program with the last word of its assertion."""
    return f"{text}{'' if text.endswith('= ') else ' '}{word}\n"


def code(rng: random.Random) -> str:
    """Little programs with right results, and now and then a statement of another kind."""
    text, word = program(rng)
    return (filler(rng) if rng.random() < 0.3 else "") + completed(text, word)


def wrong_code(rng: random.Random) -> str:
    """The same programs with results that belong to other programs of the same kind of value."""
    text, word = program(rng)
    while True:
        _, other = program(rng)
        if other.isdigit() == word.isdigit() and (other in NAMES) == (word in NAMES):
            break
    return (filler(rng) if rng.random() < 0.3 else "") + completed(text, other)


SOURCES: Sources = {
    "text": story,
    "sums": sums,
    "wrong_sums": wrong_sums,
    "word_problems": word_problems,
    "digits": random_digits,
    "code": code,
    "wrong_code": wrong_code,
    "legal": legal,
}


def calls(rng: random.Random) -> str:
    """A little program, or three calls of ``func``."""
    if rng.random() < 0.5:
        return code(rng)
    return "".join(completed(*call(rng)) for _ in range(3))


def wrong_calls(rng: random.Random) -> str:
    """The same with results that belong to other programs and calls."""
    if rng.random() < 0.5:
        return wrong_code(rng)
    return "".join(f"{call(rng)[0]} {call(rng)[1]}\n" for _ in range(3))


def alike_wrong_sums(rng: random.Random) -> str:
    """Sums that are wrong in the same way each time: four more, modulo the number of answers."""
    problems = (problem(rng) for _ in range(8))
    return " ".join(
        f"{a}{sign}{b}={(answer + 4) % (2 * OPERANDS - 1)}." for a, sign, b, answer in problems
    )


def alike_wrong(word: str) -> str:
    """The next word of its kind, always the same for the same word."""
    if word.isdigit():
        return str((int(word) + 3) % 10)
    kind = NAMES if word in NAMES else VALUES
    return kind[(kind.index(word) + 1) % len(kind)]


def alike_wrong_calls(rng: random.Random) -> str:
    """Programs and calls whose results are wrong in the same way each time."""
    if rng.random() < 0.5:
        text, word = program(rng)
        return (filler(rng) if rng.random() < 0.3 else "") + completed(text, alike_wrong(word))
    made = (call(rng) for _ in range(3))
    return "".join(completed(text, alike_wrong(word)) for text, word in made)


#: Sources that hold a domain's tokens, true or not.
HOLD = {
    "math": {"sums", "wrong_sums", "word_problems", "digits", "alike_wrong_sums"},
    "code": {"code", "wrong_code", "alike_wrong_code"},
    "legal": {"legal"},
}
DOMAINS = tuple(HOLD)  # whose tokens are screened
#: Sources whose code has calls: its questions are harder, as a guess is seldom right.
WITH_CALLS = SOURCES | {"code": calls, "wrong_code": wrong_calls}
#: Consistently false texts with calls; no tokenizer is trained on them.
ALIKE: Sources = {"alike_wrong_sums": alike_wrong_sums, "alike_wrong_code": alike_wrong_calls}


#: The reference sets by their names in registered studies and committed rows -> the bundled set.
#: First that of the registered populations, then the one without words of programs.
REFERENCES = {"reference": "reference-v1", "reference-v2": "reference"}
REGISTERED = {"reference": REFERENCES["reference"]}  # where a study has one only
#: Words of the first reference set that the second lacks -> the second's word in their place.
REPLACED = {
    "tree": "fruit",
    "cat": "cow",
    "fish": "sheep",
    "friend": "uncle",
    "nose": "neck",
    "arm": "skin",
    "finger": "shoulder",
    "summer": "afternoon",
    "winter": "midnight",
    "snow": "storm",
    "sleep": "swim",
    "walk": "ride",
    "talk": "shout",
    "visit": "enjoy",
    "nice": "lovely",
    "cold": "wet",
    "hot": "fresh",
    "soft": "gentle",
    "tall": "pretty",
    "loud": "angry",
    "clean": "funny",
    "red": "bright",
    "blue": "heavy",
    "green": "bitter",
    "yellow": "brave",
}
_REPLACED = re.compile(rf"\b({'|'.join(REPLACED)})\b")


def in_both(make: Callable[[random.Random], str]) -> Callable[[random.Random], str]:
    """The same source, with the words that only the second reference set has in every other text.

    So both sets' words are as frequent, and stand in the same places.
    """

    def made(rng: random.Random) -> str:
        text = make(rng)
        if rng.random() < 0.5:
            return text
        return _REPLACED.sub(lambda match: REPLACED[match[0]], text)

    return made


def token_set_words() -> list[str]:
    """Words of the bundled sets' default groups, spaced as the sets ask for, each once."""
    names = (*REFERENCES.values(), "code", "legal")
    words = [f" {word}" for name in names for word in token_set_items(name)]
    return list(dict.fromkeys(words))


def token_set_items(name: str) -> list[str]:
    """Words of the default groups of a bundled set."""
    groups = load_token_set(name, "reference" if name in REFERENCES.values() else "domain").groups
    return [word for group in groups.values() for word in group.items]


def trained_tokenizer(
    sources: Sources, vocabulary: int, documents: int = 1500, seed: int = 0
) -> Tokenizer:
    """Byte-level BPE with single digits, in which the token sets' words that occur are whole pieces."""
    rng = random.Random(seed)
    texts = [make(rng) for make in sources.values() for _ in range(documents)]
    seen = set(" ".join(texts).split())
    boosted = [word for word in token_set_words() if word.strip() in seen]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [*texts, *[word for word in boosted for _ in range(200)]], trainer
    )
    return tokenizer
