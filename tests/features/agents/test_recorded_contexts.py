"""Contexts of an episode that begins again after a kill."""

from test_call_record import answer, chat, tree_of, user

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.features.agents.recorded import records_of


def began(folder, order):
    """text -> (place in the row, seed) of contexts that begin in this order; the texts by place."""
    journal = Journal(folder, "answers", "agents")
    journal.begin(0)
    [record] = records_of(journal, ["episode"])
    tree, _, _ = tree_of()
    places = {}
    for text in order:
        call = tree.begin(chat(user(text)), most_tokens=50)
        record.begin_context(call)
        answer(tree, call, text)
        places[text] = (call.context.order, call.context.seed)
    journal.write()
    calls = [tree.calls[row.call_ends[0][0]] for row in tree.rows()]
    texts = [call.prompt.messages[0]["content"] for call in calls]
    return places, texts


def test_contexts_keep_their_places_and_seeds_whatever_the_order_of_concurrent_calls(tmp_path):
    first, texts = began(tmp_path, "abc")
    assert texts == ["a", "b", "c"] and len(set(first.values())) == 3
    again, texts = began(tmp_path, "cxab")
    assert {text: again[text] for text in "abc"} == first
    assert texts == ["a", "b", "c", "x"], "a new one comes after those that began before"
