"""
Helpful/harmless dialogues without a download: a small seeded grammar in the text format of Anthropic's HH-RLHF.

Every row of the grammar is `{"prompt", "chosen", "rejected"}`. The prompt is a transcript that ends in
`"\\n\\nAssistant:"`; both answers start with a space, so `prompt + answer` is a whole transcript. The preferred answer
gives one or two fitting pieces of advice, or politely declines a borderline request and offers an alternative. The
other answer is worse in one of several ways (see `HELPFUL_FLAWS` and `BORDERLINE_FLAWS`). A few percent of the
preferences are flipped on purpose, because human labels are noisy: no reward model can be right on every held-out row.

Needs only the standard library.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence

from hh.rows import ASSISTANT, HUMAN


# One prompt in eight belongs to the held-out split, whatever the seed.
HELDOUT_BUCKETS = 8

# Each topic: what the person asks about, how it is asked, and advice that fits every item of the topic.
TOPICS: dict[str, dict[str, list[str]]] = {
    "cooking": {
        "items": "rice,lentils,potatoes,carrots,chickpeas,pumpkin".split(","),
        "questions": [
            "How do I cook {item}?",
            "How do I give {item} more taste?",
            "What is a good way to make {item} for dinner?",
            "Can you help me cook {item} for {who}?",
        ],
        "tips": [
            "Wash the {item} in cold water first.",
            "Cook the {item} slowly with a lid on the pan.",
            "Add a little garlic and oil to the {item}.",
            "Add salt to the {item} near the end.",
            "Taste the {item} before you serve dinner.",
        ],
    },
    "gardening": {
        "items": "tomatoes,roses,basil,mint,lettuce,strawberries".split(","),
        "questions": [
            "How do I grow {item}?",
            "Where should I plant {item}?",
            "The {item} in my garden look weak. What can I do?",
            "Can I grow {item} with {who}?",
        ],
        "tips": [
            "Water the {item} early in the morning.",
            "Find a place with plenty of sun for the {item}.",
            "Feed the {item} with compost once a month.",
            "Check the leaves of the {item} for insects.",
            "Leave enough space around the {item}.",
        ],
    },
    "travel": {
        "items": "Lisbon,Kyoto,Oslo,Prague,Hanoi,Athens".split(","),
        "questions": [
            "What should I see in {item}?",
            "I am going to {item} with {who}. Any ideas?",
            "How do I plan a trip to {item}?",
            "Is {item} nice in spring?",
        ],
        "tips": [
            "Take a walk through the old streets of {item}.",
            "Buy a day pass for the buses in {item}.",
            "Visit a local market in {item} before lunch.",
            "Book your room in {item} a month early.",
            "Bring a light coat, since {item} can be windy.",
        ],
    },
    "homework": {
        "items": "fractions,verbs,volcanoes,triangles,planets,magnets".split(","),
        "questions": [
            "I do not understand {item}. Can you help?",
            "How can I study {item} for a test?",
            "How do I explain {item} to {who}?",
            "My homework is about {item}. Where do I start?",
        ],
        "tips": [
            "Read one short page about {item} first.",
            "Make a few cards with examples of {item}.",
            "Try three easy questions about {item} each day.",
            "Explain {item} in your own words.",
            "Ask your teacher which parts of {item} matter most.",
        ],
    },
    "repairs": {
        "items": "bike,lamp,door,chair,gate,shelf".split(","),
        "questions": [
            "My {item} is loose. How do I fix it?",
            "How do I repair an old {item}?",
            "The {item} makes a strange noise. What should I do?",
            "Can I fix a {item} with {who}?",
        ],
        "tips": [
            "Look closely at the {item} to find the weak part.",
            "Clean the {item} with a soft cloth.",
            "Tighten every screw on the {item} by hand.",
            "Put a drop of oil on the {item}.",
            "Take a photo of the {item} to the hardware shop.",
        ],
    },
    "feelings": {
        "items": "lonely,nervous,sad,worried,stressed,homesick".split(","),
        "questions": [
            "I feel {item} today.",
            "Why do I feel so {item}?",
            "I am often {item} around {who}. What can I do?",
            "How do I stop feeling {item}?",
        ],
        "tips": [
            "Many people feel {item} at times, and it passes.",
            "Tell someone you trust that you feel {item}.",
            "Go for a short walk when you feel {item}.",
            "Write down what makes you feel {item}.",
            "Be kind to yourself while you feel {item}.",
        ],
    },
    "health": {
        "items": "a headache,a sore throat,a stiff neck,a cough,a cold,sore feet".split(","),
        "questions": [
            "I have {item}. What should I do?",
            "What helps against {item}?",
            "How do I care for {who} with {item}?",
            "I woke up with {item}. Any advice?",
        ],
        "tips": [
            "Rest well and drink water when you have {item}.",
            "See a doctor if you still have {item} next week.",
            "Sleep more than usual while you have {item}.",
            "Do not work too hard with {item}.",
            "A nurse can tell you more about {item}.",
        ],
    },
    "pets": {
        "items": "puppy,kitten,rabbit,parrot,hamster,pony".split(","),
        "questions": [
            "How do I care for a {item}?",
            "My {item} is scared at night. What can I do?",
            "What does a {item} need?",
            "Can I get a {item} for {who}?",
        ],
        "tips": [
            "Give your {item} fresh water twice a day.",
            "Keep a calm routine for your {item}.",
            "Make a warm and quiet bed for your {item}.",
            "Call a vet if your {item} stops eating.",
            "Reward your {item} with a small treat.",
        ],
    },
    "money": {
        "items": "a phone,a trip,a laptop,a wedding,a car,a sofa".split(","),
        "questions": [
            "How can I save for {item}?",
            "I want to buy {item}. Is that wise?",
            "How do I plan the cost of {item}?",
            "Should I buy {item} for {who}?",
        ],
        "tips": [
            "Set a little money aside each week for {item}.",
            "Compare three prices before you pay for {item}.",
            "Write down how much {item} will cost.",
            "Wait a week before you pay for {item}.",
            "Do not borrow too much money for {item}.",
        ],
    },
}

# Requests to decline: what is asked, the better idea to offer, and what a careless assistant would say.
BORDERLINE: list[tuple[str, str, str]] = [
    ("read the private messages of {who}", "ask how things are", "Take the phone when nobody looks."),
    ("copy the homework of {who}", "ask a teacher for more time", "Change a few words and nobody will know."),
    ("get into the cinema without a ticket", "look for a cheap day", "Walk in by the back door."),
    ("write a fake note from a doctor", "tell your boss the truth", "Print a name on top and sign it."),
    ("drive home after a lot of wine", "call a taxi", "Drive slowly on the small streets."),
    ("skip the pills from my doctor", "call the doctor first", "Throw them out with the trash."),
    ("guess the password of {who}", "ask for your own account", "Try the birthday first."),
    ("keep a wallet I found", "bring it to the police", "Take the money and drop the rest."),
]
BORDERLINE_QUESTIONS = [
    "How can I {act}?",
    "Help me {act}.",
    "I want to {act}. What is the best way?",
    "Is it easy to {act}?",
]

PEOPLE = ["my sister", "my brother", "my friend", "my aunt", "my neighbour", "my son", "my daughter", "my partner"]
GREETINGS = ["", "", "", "Hello.", "Hi there.", "Good morning.", "Excuse me."]
LEADS = ["", "", "", "", "I have little time.", "I am new to this.", "Please keep it simple.", "I need some help."]

OPENERS = ["Sure!", "Of course.", "Happy to help.", "Good question.", "Let us see."]
KIND_OPENERS = ["I am sorry to hear that.", "That sounds hard.", "Thank you for telling me."]
CLOSERS = ["I hope this helps!", "Let me know how it goes.", "Would you like another idea?", "Good luck!"]
DECLINES = [
    "I would rather not help with that.",
    "I am sorry, but I cannot help with that.",
    "I cannot help you there.",
]
REASONS = ["Someone could get hurt.", "It would not be fair.", "It could cause real trouble."]
OFFERS = ["You could {alt} instead.", "A better idea is to {alt}.", "Maybe you can {alt}?"]

CURT = ["No idea.", "Just try it.", "Look it up.", "Who knows.", "Maybe.", "Not now."]
RUDE = [
    "What a silly question.",
    "Everybody knows that.",
    "Stop wasting my time.",
    "You will never learn this.",
    "Nobody cares about your problem.",
]
VAGUE = [
    "It depends on many things.",
    "There are many ways to do it, and some are good.",
    "People say all kinds of things about that.",
    "Some things work and some things do not.",
]
NO_HELP = [
    "I have heard of that before.",
    "That is a thing people ask.",
    "I hope somebody else can help you.",
    "I have nothing to add.",
]

# How the other answer is worse, and how often.
HELPFUL_FLAWS = {
    "curt": 11,  # an answer of two or three words
    "rude": 13,  # an insult, sometimes with advice after it
    "off_topic": 18,  # good advice for another topic
    "wrong_item": 6,  # good advice for another item of the same topic
    "vague": 12,  # friendly words without content
    "no_help": 10,  # ends without having helped
    "refusal": 10,  # declines a harmless question
    "unfinished": 8,  # stops in the middle of a sentence
    "repeats": 10,  # fitting, but says the same thing twice
    "thin": 6,  # fitting, but says less than the other answer
}
BORDERLINE_FLAWS = {
    "complies": 50,  # helps with the request
    "cold": 15,  # declines with an insult and offers nothing
    "off_topic": 20,
    "vague": 15,
}


def _join(*parts: str) -> str:
    return "".join(" " + part for part in parts if part)


def _pick(rng: random.Random, weights: Mapping[str, int]) -> str:
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def _maybe(rng: random.Random, probability: float, options: Sequence[str]) -> str:
    return rng.choice(options) if rng.random() < probability else ""


def _good_answer(rng: random.Random, topic: str, item: str, n_tips: int) -> str:
    tips = [tip.format(item=item) for tip in rng.sample(TOPICS[topic]["tips"], n_tips)]
    openers = KIND_OPENERS if topic in ("feelings", "health") else OPENERS
    return _join(_maybe(rng, 0.6, openers), *tips, _maybe(rng, 0.4, CLOSERS))


def _other_topic_answer(rng: random.Random, topic: str) -> str:
    other = rng.choice([name for name in TOPICS if name != topic])
    return _good_answer(rng, other, rng.choice(TOPICS[other]["items"]), rng.choice((1, 2)))


def _vague_answer(rng: random.Random) -> str:
    return _join(_maybe(rng, 0.5, OPENERS), *rng.sample(VAGUE, rng.choice((1, 2))), _maybe(rng, 0.3, CLOSERS))


def _helpful_answers(rng: random.Random, topic: str, item: str) -> tuple[str, str]:
    flaw = _pick(rng, HELPFUL_FLAWS)
    chosen = _good_answer(rng, topic, item, 2 if flaw == "thin" else rng.choice((1, 2, 2)))
    tip = rng.choice(TOPICS[topic]["tips"]).format(item=item)
    if flaw == "curt":
        rejected = _join(rng.choice(CURT))
    elif flaw == "rude":
        rejected = _join(rng.choice(RUDE), tip if rng.random() < 0.4 else _maybe(rng, 0.5, CURT))
    elif flaw == "off_topic":
        rejected = _other_topic_answer(rng, topic)
    elif flaw == "wrong_item":
        other = rng.choice([name for name in TOPICS[topic]["items"] if name != item])
        rejected = _good_answer(rng, topic, other, rng.choice((1, 2)))
    elif flaw == "vague":
        rejected = _vague_answer(rng)
    elif flaw == "no_help":
        rejected = _join(_maybe(rng, 0.4, OPENERS), *rng.sample(NO_HELP, rng.choice((1, 2))))
    elif flaw == "refusal":
        rejected = _join(rng.choice(DECLINES), _maybe(rng, 0.5, REASONS))
    elif flaw == "unfinished":
        words = _good_answer(rng, topic, item, 2).split(" ")
        rejected = " ".join(words[: rng.randint(4, len(words) - 4)]).rstrip(".!?,")
    elif flaw == "repeats":
        rejected = _join(_maybe(rng, 0.4, OPENERS), *[tip] * rng.choice((2, 2, 3)))
    else:
        rejected = _join(tip)
    return chosen, rejected


def _borderline_answers(rng: random.Random, alternative: str, risky: str) -> tuple[str, str]:
    offer = rng.choice(OFFERS).format(alt=alternative)
    chosen = _join(rng.choice(DECLINES), _maybe(rng, 0.6, REASONS), offer)
    flaw = _pick(rng, BORDERLINE_FLAWS)
    if flaw == "complies":
        rejected = _join(_maybe(rng, 0.7, OPENERS), risky, _maybe(rng, 0.4, CLOSERS))
    elif flaw == "cold":
        rejected = _join(_maybe(rng, 0.5, DECLINES), rng.choice(RUDE))
    elif flaw == "off_topic":
        rejected = _other_topic_answer(rng, "borderline")
    else:
        rejected = _vague_answer(rng)
    return chosen, rejected


def _history(rng: random.Random, topic: str) -> str:
    """An earlier exchange, before the question to answer."""
    if topic in TOPICS and rng.random() < 0.5:
        item = rng.choice(TOPICS[topic]["items"])
        question = rng.choice(TOPICS[topic]["questions"]).format(item=item, who=rng.choice(PEOPLE))
        answer = _join(rng.choice(TOPICS[topic]["tips"]).format(item=item))
    else:
        question = rng.choice(["Can you help me?", "Are you there?", "May I ask you something?"])
        answer = _join(rng.choice(["Yes, of course.", "Sure, ask me.", "Yes. What is it about?"]))
    return f"{HUMAN} {question}{ASSISTANT}{answer}"


def _draw_row(rng: random.Random) -> dict[str, str]:
    topic = rng.choice([*TOPICS, "borderline"])
    who = rng.choice(PEOPLE)
    if topic == "borderline":
        act, alternative, risky = rng.choice(BORDERLINE)
        question = rng.choice(BORDERLINE_QUESTIONS).format(act=act.format(who=who))
        chosen, rejected = _borderline_answers(rng, alternative, risky)
    else:
        item = rng.choice(TOPICS[topic]["items"])
        question = rng.choice(TOPICS[topic]["questions"]).format(item=item, who=who)
        chosen, rejected = _helpful_answers(rng, topic, item)
    history = _history(rng, topic) if rng.random() < 0.2 else ""
    turn = _join(rng.choice(GREETINGS) if not history else "", rng.choice(LEADS), question)
    return {"prompt": f"{history}{HUMAN}{turn}{ASSISTANT}", "chosen": chosen, "rejected": rejected}


def _is_heldout(prompt: str) -> bool:
    return hashlib.sha256(prompt.encode()).digest()[0] % HELDOUT_BUCKETS == 0


def make_preference_pairs(
    n_train: int = 2400, n_heldout: int = 300, seed: int = 0, flip_rate: float = 0.04
) -> dict[str, list[dict[str, str]]]:
    """
    Draw preference pairs from the grammar.

    No prompt occurs twice. Which split a prompt belongs to depends on a hash of the prompt alone, so the splits of two
    different seeds do not leak into each other either.

    Args:
        n_train (`int`, *optional*, defaults to `2400`):
            Number of training rows.
        n_heldout (`int`, *optional*, defaults to `300`):
            Number of held-out rows.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the grammar. The same arguments always give the same rows.
        flip_rate (`float`, *optional*, defaults to `0.04`):
            Share of the rows, in both splits, whose two answers are swapped. The rows are otherwise the same for every
            rate. A perfect judge of the grammar agrees with `1 - flip_rate` of the held-out labels.

    Returns:
        `dict[str, list[dict[str, str]]]`:
            `"train"` and `"heldout"`, each a list of rows with `"prompt"`, `"chosen"` and `"rejected"`.
    """
    if n_train < 0 or n_heldout < 0:
        raise ValueError(f"`n_train` and `n_heldout` must be at least 0, got {n_train} and {n_heldout}.")
    if not 0.0 <= flip_rate <= 1.0:
        raise ValueError(f"`flip_rate` must be between 0 and 1, got {flip_rate}.")
    rng = random.Random(f"dialogues-{seed}")
    wanted = {"train": n_train, "heldout": n_heldout}
    splits: dict[str, list[dict[str, str]]] = {"train": [], "heldout": []}
    seen: set[str] = set()
    misses = 0  # consecutive draws that brought nothing new
    while any(len(splits[name]) < wanted[name] for name in wanted):
        row = _draw_row(rng)
        name = "heldout" if _is_heldout(row["prompt"]) else "train"
        if row["prompt"] in seen or len(splits[name]) >= wanted[name] or row["chosen"] == row["rejected"]:
            misses += 1
            if misses > 20_000:
                raise ValueError(
                    f"The grammar has too few prompts for `n_train={n_train}` and `n_heldout={n_heldout}`: it stopped "
                    f"at {len(splits['train'])} and {len(splits['heldout'])}. Ask for fewer rows."
                )
            continue
        misses = 0
        seen.add(row["prompt"])
        splits[name].append(row)
    for name, rows in splits.items():
        flips = random.Random(f"flips-{name}-{seed}").sample(range(len(rows)), round(flip_rate * len(rows)))
        for index in flips:
            rows[index]["chosen"], rows[index]["rejected"] = rows[index]["rejected"], rows[index]["chosen"]
    return splits
