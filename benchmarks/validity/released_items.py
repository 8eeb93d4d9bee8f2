"""Multiple choice made from WikiText-2: which sentence comes next?

    python benchmarks/validity/released_items.py WIKI.test.txt WIKI.valid.txt -o build/validity/items

One item a paragraph of at least four sentences: the context is its beginning, the answer its next sentence,
and three sentences of like length are the distractors, from other articles (`easy`) or from other paragraphs
of the same article (`hard`). Which paragraphs become easy and which hard is drawn with a fixed seed, so no
context is in both. The article is the `subject`, which makes the slices.
"""

import argparse
import json
import random
import re
from pathlib import Path

SEED = 15
CONTEXT_WORDS = (30, 110)
SENTENCE_WORDS = (8, 40)


def detokenized(text: str) -> str:
    """WikiText's word tokens as ordinary text; `<unk>` stays."""
    text = text.replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".")
    text = re.sub(r'" (.*?) "', r'"\1"', text)
    text = re.sub(r" ([.,;:!?%)\]])", r"\1", text).replace(" 's", "'s").replace("s ' ", "s' ")
    return re.sub(r"([(\[$]) ", r"\1", text).strip()


def articles(text: str) -> dict[str, list[list[str]]]:
    """Title -> paragraphs -> sentences (as word tokens)."""
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in text.splitlines():
        line = line.strip()
        if not line:
            continue
        if (heading := re.fullmatch(r"(=(?: =)*) (.*?) \1", line)) is not None:
            if heading[1] == "=":
                title = heading[2]
            continue
        sentences = [part.strip() + " ." for part in line.removesuffix(" .").split(" . ") if part.strip()]
        found.setdefault(title, []).append(sentences)
    return found


def words(sentence: str) -> int:
    return len(sentence.split())


def usable(sentence: str) -> bool:
    return SENTENCE_WORDS[0] <= words(sentence) <= SENTENCE_WORDS[1]


def split(paragraph: list[str]) -> tuple[str, str] | None:
    """Context and next sentence, at the last place where both lengths fit; None if none does."""
    for k in range(len(paragraph) - 1, 1, -1):
        context = " ".join(paragraph[:k])
        if CONTEXT_WORDS[0] <= words(context) <= CONTEXT_WORDS[1] and usable(paragraph[k]):
            return context, paragraph[k]
    return None


def distractors(answer: str, pool: list[str], rng: random.Random) -> list[str]:
    """Three sentences of a pool, the nearest in length among thirty drawn."""
    drawn = rng.sample(sorted(set(pool) - {answer}), min(30, len(set(pool) - {answer})))
    return sorted(drawn, key=lambda s: abs(words(s) - words(answer)))[:3]


def items(texts: list[str]) -> dict[str, list[dict[str, object]]]:
    rng = random.Random(SEED)
    library = {title: paragraphs for text in texts for title, paragraphs in articles(text).items()}
    sentences = {
        title: [[s for s in paragraph if usable(s)] for paragraph in paragraphs]
        for title, paragraphs in library.items()
    }
    found: dict[str, list[dict[str, object]]] = {"easy": [], "hard": []}
    for title, paragraphs in library.items():
        elsewhere = [
            s for other, groups in sentences.items() if other != title for group in groups for s in group
        ]
        for number, paragraph in enumerate(paragraphs):
            if len(paragraph) < 4 or (parts := split(paragraph)) is None:
                continue
            kind = rng.choice(["easy", "hard"])
            same = [s for other, group in enumerate(sentences[title]) if other != number for s in group]
            wrong = distractors(parts[1], elsewhere if kind == "easy" else same, rng)
            if len(wrong) < 3:
                continue
            choices = [parts[1], *wrong]
            rng.shuffle(choices)
            found[kind].append(
                {
                    "subject": title,
                    "context": detokenized(parts[0]),
                    "choices": [detokenized(choice) for choice in choices],
                    "label": choices.index(parts[1]),
                }
            )
    for group in found.values():
        rng.shuffle(group)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    for kind, group in items([path.read_text("utf-8") for path in args.texts]).items():
        folder = args.output / f"wikitext_next_{kind}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "validation.jsonl").write_text("".join(json.dumps(item) + "\n" for item in group), "utf-8")
        print(f"{kind}: {len(group)} items of {len({item['subject'] for item in group})} articles")


if __name__ == "__main__":
    main()
