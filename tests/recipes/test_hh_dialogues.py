import pytest

from hh.dialogues import make_preference_pairs
from hh.rows import ASSISTANT, HUMAN, parse_hh_row, split_transcript


RAW = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Any tea?\n\nAssistant: Yes, green tea.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Any tea?\n\nAssistant: No.",
}
PARSED = {
    "prompt": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Any tea?\n\nAssistant:",
    "chosen": " Yes, green tea.",
    "rejected": " No.",
}
MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Any tea?"},
]
GOOD = [{"role": "assistant", "content": "Yes, green tea."}]
BAD = [{"role": "assistant", "content": "No."}]


@pytest.fixture(scope="module")
def pairs():
    return make_preference_pairs()


class TestMakePreferencePairs:
    def test_counts_and_keys(self, pairs):
        assert {name: len(rows) for name, rows in pairs.items()} == {"train": 2400, "heldout": 300}
        rows = pairs["train"] + pairs["heldout"]
        assert all(set(row) == {"prompt", "chosen", "rejected"} for row in rows)
        assert len({tuple(sorted(row.items())) for row in rows}) == 2700

    def test_format(self, pairs):
        for row in pairs["train"] + pairs["heldout"]:
            assert row["prompt"].startswith(HUMAN + " ") and row["prompt"].endswith(ASSISTANT)
            assert 1 <= row["prompt"].count(HUMAN) <= 2
            assert row["prompt"].count(ASSISTANT) == row["prompt"].count(HUMAN)
            assert "{" not in str(list(row.values()))  # no slot is left open
            assert row["chosen"] != row["rejected"]
            for answer in (row["chosen"], row["rejected"]):
                assert answer.startswith(" ") and not answer.startswith("  ") and "\n" not in answer
                assert 1 <= len(answer.split()) <= 35

    def test_some_prompts_have_an_earlier_turn(self, pairs):
        share = sum(row["prompt"].count(HUMAN) == 2 for row in pairs["train"]) / 2400
        assert 0.1 < share < 0.4

    def test_is_deterministic(self, pairs):
        assert make_preference_pairs() == pairs
        assert make_preference_pairs(100, 20, seed=3) == make_preference_pairs(100, 20, seed=3)
        assert make_preference_pairs(100, 20, seed=3) != make_preference_pairs(100, 20, seed=4)

    def test_splits_share_no_prompt(self, pairs):
        train = {row["prompt"] for row in pairs["train"]}
        heldout = {row["prompt"] for row in pairs["heldout"]}
        assert len(train) == 2400 and len(heldout) == 300
        assert not train & heldout

    def test_splits_of_different_seeds_share_no_prompt(self, pairs):
        train = {row["prompt"] for row in pairs["train"]}
        other = {row["prompt"] for row in make_preference_pairs(0, 500, seed=7)["heldout"]}
        assert not train & other

    def test_flipped_share(self, pairs):
        clean = make_preference_pairs(flip_rate=0.0)
        # 0.04 * 2400 = 96 and 0.04 * 300 = 12
        for name, expected in {"train": 96, "heldout": 12}.items():
            flipped = 0
            for row, clean_row in zip(pairs[name], clean[name], strict=True):
                assert row["prompt"] == clean_row["prompt"]
                if row != clean_row:
                    assert (row["chosen"], row["rejected"]) == (clean_row["rejected"], clean_row["chosen"])
                    flipped += 1
            assert flipped == expected

    def test_length_alone_does_not_decide(self, pairs):
        longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in pairs["heldout"]) / 300
        assert longer < 0.85

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"n_train": -1}, "`n_train` and `n_heldout` must be at least 0, got -1"),
            ({"flip_rate": 1.5}, "`flip_rate` must be between 0 and 1, got 1.5"),
        ],
    )
    def test_bad_arguments(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            make_preference_pairs(**kwargs)

    def test_too_many_rows(self, monkeypatch):
        row = {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": " a", "rejected": " b"}
        monkeypatch.setattr("hh.dialogues._draw_row", lambda rng: dict(row))
        with pytest.raises(ValueError, match="too few prompts for `n_train=5`"):
            make_preference_pairs(n_train=5, n_heldout=5)


class TestSplitTranscript:
    def test_splits_at_the_last_marker(self):
        assert split_transcript(RAW["chosen"]) == (PARSED["prompt"], PARSED["chosen"])

    def test_round_trip(self, pairs):
        for row in pairs["heldout"]:
            assert split_transcript(row["prompt"] + row["chosen"]) == (row["prompt"], row["chosen"])

    def test_empty_answer(self):
        assert split_transcript(PARSED["prompt"]) == (PARSED["prompt"], "")

    def test_missing_marker(self):
        with pytest.raises(ValueError, match="no .*Assistant:.* marker.*Human: Hi"):
            split_transcript("\n\nHuman: Hi")

    def test_not_text(self):
        with pytest.raises(TypeError, match="must be a `str`, got `list`"):
            split_transcript([])


class TestParseHHRow:
    def test_raw(self):
        assert parse_hh_row(RAW) == PARSED

    def test_raw_round_trip(self, pairs):
        for row in pairs["heldout"]:
            raw = {key: row["prompt"] + row[key] for key in ("chosen", "rejected")}
            assert parse_hh_row(raw) == row

    def test_raw_that_diverges_earlier(self):
        rejected = "\n\nHuman: Hi\n\nAssistant: What?\n\nHuman: Tea?\n\nAssistant: Go away."
        assert parse_hh_row({**RAW, "rejected": rejected}) == {**PARSED, "rejected": " Go away."}

    def test_raw_messages(self):
        assert parse_hh_row({"chosen": MESSAGES + GOOD, "rejected": MESSAGES + BAD}) == PARSED

    def test_split_round_trip(self, pairs):
        for row in pairs["heldout"]:
            assert parse_hh_row(row) == row

    @pytest.mark.parametrize(
        "row",
        [
            {**PARSED, "response": " Yes, green tea."},  # Dahoas/rm-static
            {**PARSED, "prompt": PARSED["prompt"] + " ", "chosen": "Yes, green tea.", "rejected": "  No.\n"},
            {**PARSED, "prompt": PARSED["prompt"].removesuffix(ASSISTANT)},
            {**PARSED, "prompt": PARSED["prompt"].lstrip()},
            {"prompt": PARSED["prompt"], **RAW},  # answers that repeat the prompt
            {"prompt": MESSAGES, "chosen": GOOD, "rejected": BAD},
            {"prompt": MESSAGES, "chosen": MESSAGES + GOOD, "rejected": MESSAGES + BAD},
        ],
    )
    def test_split(self, row):
        assert parse_hh_row(row) == PARSED

    def test_bare_question(self):
        row = parse_hh_row({"prompt": "Any tea?", "chosen": "Yes.", "rejected": "No."})
        assert row == {"prompt": "\n\nHuman: Any tea?\n\nAssistant:", "chosen": " Yes.", "rejected": " No."}

    def test_system_message(self):
        messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
        assert parse_hh_row({"prompt": messages, "chosen": GOOD})["prompt"] == "Be kind." + PARSED["prompt"]

    def test_without_rejected(self):
        expected = {"prompt": PARSED["prompt"], "chosen": PARSED["chosen"]}
        assert parse_hh_row(expected) == expected
        assert parse_hh_row({"chosen": RAW["chosen"], "rejected": None}) == expected

    @pytest.mark.parametrize(
        ("row", "error", "message"),
        [
            ({"text": "Hi"}, ValueError, r"needs a `chosen` column. Its columns are \['text'\]"),
            ({"chosen": "Hello"}, ValueError, "`chosen` without a `prompt` column must be a whole transcript"),
            ({**RAW, "rejected": 3}, TypeError, "`rejected` without a `prompt` column must be a whole transcript"),
            ({**PARSED, "prompt": " "}, ValueError, "`prompt` is empty"),
            ({**PARSED, "prompt": 3}, TypeError, "`prompt` must be text or a list of messages, got `int`"),
            ({**PARSED, "chosen": 3}, TypeError, "`chosen` must be text or a list of messages, got `int`"),
            ({**PARSED, "chosen": MESSAGES}, ValueError, "`chosen` must end in a message of the role 'assistant'"),
            ({**PARSED, "chosen": []}, ValueError, "`chosen` must end in a message of the role 'assistant'"),
            ({**PARSED, "prompt": [{"role": "tool", "content": ""}]}, ValueError, "role 'tool'. Valid roles are"),
            ({**PARSED, "prompt": ["Hi"]}, ValueError, "Message 0 of `prompt` needs the keys 'role' and 'content'"),
            ({**PARSED, "chosen": ["Hi"]}, ValueError, "Message 0 of `chosen` needs the keys 'role' and 'content'"),
        ],
    )
    def test_errors(self, row, error, message):
        with pytest.raises(error, match=message):
            parse_hh_row(row)
