"""The decisions of a discovery without a child: what is asked next, by whom, and when it is over."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gradient.nix.evaluator.agenda import Agenda
from gradient.nix.evaluator.expressions import looks
from gradient.nix.evaluator.findings import AttrSet, Derivation, Plain, Question, Standing, TargetUnmatched
from gradient.nix.evaluator.survey import Survey
from gradient.nix.wildcard import parse_wildcards

DRV = "/nix/store/00000000000000000000000000000000-x.drv"
TREE: dict[str, Standing] = {
    "": AttrSet(("a", "b", "empty", "full", "lonely")),
    "empty": AttrSet(()),
    "full": AttrSet(tuple(f"n{n}" for n in range(10))),
    "a": AttrSet(("one", "set", "text")),
    "a.one": Derivation(DRV, ("tests",)),
    "a.one.tests": Derivation(DRV),
    "a.set": AttrSet(("two", "deep")),
    "a.set.two": Derivation(DRV),
    "a.set.deep": AttrSet(("three",)),
    "a.text": Plain("string"),
    "b": AttrSet(("config",), typed=True),
}


def walk(wildcards: str) -> tuple[list[str], list[TargetUnmatched]]:
    """Every attribute that is asked about, in order, and the targets that led to nothing."""
    survey = Survey(parse_wildcards([wildcards]))
    asked, questions = [], survey.begin()
    while questions:
        question = questions.pop(0)
        asked.append(question.attr)
        questions += survey.heard(question, TREE.get(question.attr, Plain("lambda")))
    return asked, survey.unmatched()


def questions(wildcards: str, *path: str) -> list[Question]:
    """The questions that follow from the tree's top and the sets below it on the way to `path`."""
    survey = Survey(parse_wildcards([wildcards]))
    found = survey.begin()
    for depth in range(len(path) + 1):
        here = next(question for question in found if question.path == path[:depth])
        found = survey.heard(here, TREE[here.attr])
    return found


def test_only_what_can_matter_is_asked() -> None:
    assert walk("a.one")[0] == ["", "a", "a.one"]
    assert walk("a.*, !a.one")[0] == ["", "a", "a.set", "a.text", "a.set.two", "a.set.deep"]
    assert walk("a.#")[0] == ["", "a", "a.one", "a.set", "a.text"]
    assert walk("a.*.tests")[0] == ["", "a", "a.one", "a.set", "a.text", "a.one.tests"]


def test_an_attribute_of_several_targets_is_asked_once() -> None:
    asked, _ = walk("a.*, a.one, a.set.two, *.one")
    assert sorted(asked) == sorted(set(asked))


def test_targets_that_led_to_nothing() -> None:
    assert [found.target for found in walk("a.one, a.text, nope")[1]] == ["a.text", "nope"]
    assert walk("*.one")[1] == []


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nope", "the flake has no nope, only a, b, empty, full, lonely"),
        ("a.on", "a has no on, did you mean one?"),
        ('a."x.y".z', 'a has no "x.y", only one, set, text'),
        ("a.text", "a.text is no derivation but of the type string"),
        ("a.text.x", "a.text is no derivation but of the type string"),
        ("lonely", "lonely is no derivation but of the type function"),
        ("a.set", "a.set is a set of attributes: write a.set.* for what is in it"),
        ("a.set.deep.four", "a.set.deep has no four, only three"),
        ("empty.*", "empty has no attributes"),
        ("*.nope", "a has no nope, only one, set, text"),
        ("full.zzz", "full has no zzz, only n0, n1, n2, n3, n4, n5, …"),
        ("full." + "y" * 999, "full has no " + "y" * 79 + "…, only n0, n1, n2, n3, n4, n5, …"),
    ],
)
def test_where_a_target_ended(target: str, why: str) -> None:
    (found,) = walk(target)[1]
    assert found.why == why
    assert found.message == f"{target}: target matched no derivations: {why}"


def test_a_failed_attribute_is_not_also_unmatched() -> None:
    survey = Survey(parse_wildcards(["a"]))
    (root,) = survey.begin()
    (question,) = survey.heard(root, TREE[""])
    survey.failed(question)
    assert survey.unmatched() == []


def test_drv_paths_are_asked_only_of_what_is_wanted_as_a_derivation() -> None:
    (below,) = questions("a.one.tests", "a")
    assert (below.attr, below.instantiate, below.inside) == ("a.one", False, True)
    assert looks([below]) == 's (l ["a" "one"])'
    assert looks(questions("a.#", "a")) == 'each ld ["a"] ["one" "set" "text"]'
    assert looks(questions("a.one, a.one.tests", "a")) == 's (ldn ["a" "one"])'


def test_a_batch_is_siblings_asked_alike() -> None:
    agenda = Agenda()
    agenda.add([*questions("a.*", "a"), *questions("a.set.*", "a", "set"), *questions("a.one.tests", "a")])
    batches = []
    while batch := agenda.fast.take(10):
        batches.append([question.attr for question in batch])
    assert batches == [["a.one", "a.set", "a.text"], ["a.set.two", "a.set.deep"], ["a.one"]]
    agenda.put_back(agenda.fast, questions("a.*", "a"))
    assert [question.attr for question in agenda.fast.take(2)] == ["a.one", "a.set"]


async def test_the_agenda_ends_with_its_last_question() -> None:
    agenda = Agenda()
    first, *others = questions("a.*", "a")
    agenda.add([first])
    ended: list[bool] = []

    async def member() -> None:
        while await agenda.work_for_another(agenda.imports):
            agenda.imports.take(1)
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(member)
        await trio.testing.wait_all_tasks_blocked()
        agenda.add(others)
        for question in [first, *others]:
            agenda.move_to_imports(question)
            await trio.testing.wait_all_tasks_blocked()
            assert not ended
            agenda.close()
        await agenda.finish()
    assert ended == [True]


async def test_members_on_their_way_leave_no_work_for_another() -> None:
    agenda = Agenda()
    one, two, three = questions("a.*", "a")
    agenda.add([one, two])
    agenda.fast.coming |= {"first", "second"}
    with trio.move_on_after(0):
        assert not await agenda.work_for_another(agenda.fast)
    agenda.add([three])
    assert await agenda.work_for_another(agenda.fast)
    agenda.abandon()
    assert not await agenda.work_for_another(agenda.fast)
