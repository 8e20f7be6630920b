"""Hooks in their order, by name, replaced and removed; what they raise stays with them; counted exactly."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.errors import HookRefused, SpecError
from shared_hooks.lifecycle import About, Event, Lifecycle, Priority, Stage, on
from shared_hooks.lifecycle.registry import HEADERS, lines
from tests.waiting import PATIENCE


class Noting:
    """Listens at one stage, and says its name."""

    def __init__(self, heard: list[str], name: str) -> None:
        self._heard = heard
        self.said = name

    def after_head(self, event: Event) -> None:
        self._heard.append(self.said)


NAMES = st.sampled_from(["a", "b", "c", "d"])
PRIORITIES = st.none() | st.integers(0, 100) | st.sampled_from([one.name for one in Priority] + ["low", "Highest"])
STEPS = st.tuples(st.sampled_from(["register", "replace", "remove"]), NAMES, PRIORITIES)


@given(st.lists(STEPS, max_size=25))
def test_any_sequence_of_changes_is_a_sorted_list(steps: list[tuple[str, str, int | str | None]]) -> None:
    """The model: (priority, place, name, what it says), sorted; a replaced hook keeps its place."""
    heard: list[str] = []
    lifecycle = Lifecycle("edge")
    model: dict[str, tuple[int, int, str]] = {}
    for number, (step, name, priority) in enumerate(steps):
        said = f"{name}{number}"
        place = 50 if priority is None else Priority[priority.upper()] if isinstance(priority, str) else priority
        if step == "remove":
            if name in model:
                lifecycle.remove(name)
                del model[name]
            else:
                with pytest.raises(SpecError, match="no hook called"):
                    lifecycle.remove(name)
        elif step == "register" and name not in model:
            assert lifecycle.register(Noting(heard, said), name=name, priority=priority) == name
            model[name] = (place, number, said)
        elif step == "replace" and name in model:
            lifecycle.register(Noting(heard, said), name=name, priority=priority, replace=True)
            model[name] = (place, model[name][1], said)
        else:
            with pytest.raises(SpecError):
                lifecycle.register(Noting(heard, said), name=name, priority=priority, replace=step == "replace")
        heard.clear()
        lifecycle.emit(Stage.AFTER_HEAD)
        assert heard == [said for _, _, said in sorted(model.values())]
        assert [one.name for one in lifecycle.listing()] == sorted(model, key=lambda name: model[name])


def test_names_are_the_hooks_own_or_numbered() -> None:
    lifecycle = Lifecycle("edge")
    assert [lifecycle.register(Noting([], "")) for _ in range(3)] == ["Noting", "Noting#2", "Noting#3"]

    @lifecycle.on(Stage.AFTER_HEAD, "before_head", priority="LOW")
    def mine(event: Event) -> None: ...

    assert [(one.name, one.priority) for one in lifecycle.listing() if one.stage is Stage.BEFORE_HEAD] == [("mine", 70)]
    lifecycle.remove(mine)
    with pytest.raises(SpecError, match='no hook called "mine" is registered. There is: Noting, Noting#2'):
        lifecycle.remove(mine)
    with pytest.raises(SpecError, match='"Notin".*Did you mean Noting'):
        lifecycle.remove("Notin")
    with pytest.raises(SpecError, match='"Noting" is registered already'):
        lifecycle.register(Noting([], ""), name="Noting")


def test_a_method_is_removed_by_itself() -> None:
    class Kept:
        @on("after_head")
        def look(self, event: Event) -> None: ...

    one, lifecycle = Kept(), Lifecycle("edge")
    assert lifecycle.register(one.look) == "look"
    lifecycle.remove(one.look)
    assert not lifecycle.listing()


@pytest.mark.parametrize("priority", [-1, 101, 50.0, True, "MIDDLE", ""])
def test_priorities_that_are_none(priority: Any) -> None:
    with pytest.raises(SpecError, match="priority .*: expected an integer from 0 to 100, or one of HIGHEST 0"):
        Lifecycle("edge").register(Noting([], ""), priority=priority)


class TestWhatCanBeMounted:
    def test_misspelt_stages_and_methods_are_named(self) -> None:
        with pytest.raises(SpecError, match='no stage is called "after_haed". Did you mean after_head'):
            on("after_haed")
        with pytest.raises(SpecError, match="on\\(\\) needs a stage"):
            on()

        class Misspelt:
            def before_heda(self, event: Event) -> None: ...

        with pytest.raises(SpecError, match="Misspelt.before_heda: there is no such stage. Did you mean before_head"):
            Lifecycle("edge").register(Misspelt())

    def test_a_class_is_not_an_object(self) -> None:
        with pytest.raises(SpecError, match="Noting is a class: make one of it"):
            Lifecycle("edge").register(Noting)

    @pytest.mark.parametrize("thing", [None, 3, "log", lambda event: None, object()])
    def test_hook_without_stages(self, thing: Any) -> None:
        with pytest.raises(SpecError, match="stages are before_model_load"):
            Lifecycle("edge").register(thing)

    def test_stage_of_the_other_side(self) -> None:
        with pytest.raises(SpecError, match="this side has none of its stages \\(cloud\\)"):
            Lifecycle("cloud").register(Noting([], ""))

    def test_unmarkable_hooks(self) -> None:
        with pytest.raises(SpecError, match="append cannot be marked: write a function that calls it"):
            on("after_head")([].append)

    def test_hook_that_needs_no_mark_is_registered_unchanged(self) -> None:
        heard: list[Event] = []
        edge, cloud = Lifecycle("edge"), Lifecycle("cloud")
        for lifecycle in (edge, cloud):
            assert lifecycle.on("before_request", priority=3)(heard.append) == heard.append
            lifecycle.emit(Stage.BEFORE_REQUEST)
            lifecycle.remove("append")
            lifecycle.emit(Stage.BEFORE_REQUEST)
        assert [event.side for event in heard] == ["edge", "cloud"]

    def test_marks_that_would_be_lost(self) -> None:
        @on("after_head")
        def once(event: Event) -> None: ...

        with pytest.raises(SpecError, match="once is marked already: one on"):
            on("before_head")(once)

        class Marked:
            @on("before_head")
            def look(self, event: Event) -> None: ...

            def after_head(self, event: Event) -> None: ...

        with pytest.raises(SpecError, match="Marked.look: methods are named after stages; do not mark them"):
            Lifecycle("edge").register(Marked())

    def test_attributes_that_are_no_methods_are_left_alone(self) -> None:
        class Settings(Noting):
            on_cuda = False
            before_breakfast = 6

        assert len(Lifecycle("edge").calls(Settings([], ""))) == 1


class TestFailures:
    def test_hook_errors_are_counted_and_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        lifecycle, heard = Lifecycle("edge"), []

        @lifecycle.on("after_head", priority=0)
        def bad(event: Event) -> None:
            raise ValueError(f"the {len(heard)}.")

        lifecycle.register(Noting(heard, "good"))
        for _ in range(3):
            lifecycle.emit(Stage.AFTER_HEAD)
        first, second = lifecycle.listing()
        assert (first.name, first.calls, first.failures, first.last_failure) == ("bad", 3, 3, "ValueError: the 2.")
        assert (second.calls, second.failures, second.last_failure) == (3, 0, "") and heard == ["good"] * 3
        assert [record.getMessage() for record in caplog.records] == [
            "hook bad failed at after_head: ValueError: the 0."
        ]

    @pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, KeyboardInterrupt, HookRefused, MemoryError])
    def test_errors_of_hooks_do_not_end_our_threads(self, kind: type[BaseException]) -> None:
        """Others wait for these threads: one that ended would leave them waiting for ever."""
        lifecycle, over = Lifecycle("cloud"), threading.Event()

        @lifecycle.on("after_tail")
        def bad(event: Event) -> None:
            raise kind("on purpose")

        def work() -> None:
            lifecycle.emit(Stage.AFTER_TAIL)
            over.set()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(PATIENCE)
        assert over.is_set() and lifecycle.listing()[0].failures == 1

    def test_ctrl_c_continues_in_the_main_thread(self) -> None:
        lifecycle = Lifecycle("edge")

        @lifecycle.on("after_head")
        def interrupted(event: Event) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            lifecycle.emit(Stage.AFTER_HEAD)

    def test_an_error_without_a_text(self, caplog: pytest.LogCaptureFixture) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise ValueError

        lifecycle = Lifecycle("edge")

        @lifecycle.on("after_head")
        def bad(event: Event) -> None:
            raise Mute

        logging.getLogger("shared_hooks").addHandler(quiet := logging.NullHandler())
        lifecycle.emit(Stage.AFTER_HEAD)
        logging.getLogger("shared_hooks").removeHandler(quiet)
        assert lifecycle.listing()[0].last_failure == "Mute: (it has no text)"

    def test_a_condition_that_raises_is_a_failure(self) -> None:
        lifecycle = Lifecycle("edge")
        lifecycle.on("after_head", when=lambda event: event.nothing)(lambda event: None)
        lifecycle.emit(Stage.AFTER_HEAD)
        (one,) = lifecycle.listing()
        assert (one.calls, one.failures) == (0, 1) and 'an event of after_head has no "nothing"' in one.last_failure

    def test_a_failure_keeps_nothing_alive(self) -> None:
        """Else the frontier of every request at which a hook fails would wait for the collector of cycles."""

        class Frontier: ...

        lifecycle = Lifecycle("edge")

        @lifecycle.on("after_bank")
        def bad(event: Event) -> None:
            raise ValueError("on purpose")

        @lifecycle.on("before_request")
        def no(event: Event) -> None:
            raise HookRefused("no")

        gc.collect()
        gc.disable()
        try:
            frontier, inputs = Frontier(), Frontier()
            left = [weakref.ref(frontier), weakref.ref(inputs)]
            lifecycle.emit(Stage.AFTER_BANK)  # the first one is logged, and pytest keeps what is
            lifecycle.emit(Stage.AFTER_BANK, early=frontier)
            try:
                lifecycle.emit(Stage.BEFORE_REQUEST, inputs=inputs)
            except HookRefused:
                pass
            del frontier, inputs
            assert [one() for one in left] == [None, None]
        finally:
            gc.enable()


class TestRefusals:
    def test_order_of_cancelling_hooks(self) -> None:
        lifecycle, heard = Lifecycle("edge"), []

        @lifecycle.on(*(stage for stage in Stage if stage.edge), priority=0)
        def no(event: Event) -> None:
            raise HookRefused("first")

        @lifecycle.on("before_request")
        def neither(event: Event) -> None:
            raise HookRefused("second")

        @lifecycle.on(*Stage, priority="LOWEST")
        def last(event: Event) -> None:
            heard.append(event.stage)

        for stage in Stage:
            if stage is Stage.BEFORE_REQUEST:
                with pytest.raises(HookRefused, match="first"):
                    lifecycle.emit(stage)
            else:
                lifecycle.emit(stage)
        assert heard == [stage for stage in Stage if stage.edge]
        counted = {(one.name, one.stage): one.failures for one in lifecycle.listing()}
        assert counted["no", Stage.BEFORE_REQUEST] == 0 and counted["no", Stage.AFTER_REQUEST] == 1


class TestChangesWhileItRuns:
    def test_from_inside_a_hook(self) -> None:
        """A dispatch that has begun continues with the hooks it began with."""
        lifecycle, heard = Lifecycle("edge"), []

        @lifecycle.on("after_head", name="once")
        def once(event: Event) -> None:
            heard.append("once")
            lifecycle.remove("once")
            lifecycle.remove("other")
            lifecycle.register(Noting(heard, "new"))

        lifecycle.register(Noting(heard, "other"), name="other")
        lifecycle.emit(Stage.AFTER_HEAD)
        assert heard == ["once", "other"]
        lifecycle.emit(Stage.AFTER_HEAD)
        assert heard == ["once", "other", "new"]
        lifecycle.remove("Noting")
        lifecycle.emit(Stage.AFTER_HEAD)
        assert heard == ["once", "other", "new"] and not lifecycle._at

    def test_events_from_other_threads_are_counted(self) -> None:
        lifecycle, wrong = Lifecycle("edge"), []
        counted = {"calls": 0}
        lock = threading.Lock()

        @lifecycle.on("after_head", name="steady")
        def steady(event: Event) -> None:
            with lock:
                counted["calls"] += 1

        def emit() -> None:
            for _ in range(500):
                lifecycle.emit(Stage.AFTER_HEAD)

        def change(number: int) -> None:
            for round in range(60):
                try:
                    name = lifecycle.register(Noting([], ""), name=f"{number}-{round}", priority=round)
                    lifecycle.remove(name)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=emit) for _ in range(4)]
        threads += [threading.Thread(target=change, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        (one,) = lifecycle.listing()
        assert not wrong and (one.name, one.calls) == ("steady", 2000) and counted["calls"] == 2000
        assert one.cost_ns > 0

    def test_a_hook_is_not_called_at_a_stage_that_it_brings_about(self) -> None:
        lifecycle, heard = Lifecycle("edge"), []

        @lifecycle.on("before_head", "after_head")
        def again(event: Event) -> None:
            heard.append(event.stage.value)
            lifecycle.emit(Stage.BEFORE_HEAD)
            lifecycle.emit(Stage.AFTER_HEAD)

        other: list[str] = []
        lifecycle.register(Noting(other, "other"))
        lifecycle.emit(Stage.BEFORE_HEAD)
        assert heard == ["before_head", "after_head"] and len(other) == 2
        lifecycle.emit(Stage.BEFORE_HEAD)
        assert len(heard) == 4  # and it is called the next time

    def test_hook_runs_in_another_thread_meanwhile(self) -> None:
        lifecycle, heard, entered = Lifecycle("edge"), [], threading.Event()

        @lifecycle.on("before_head")
        def twice(event: Event) -> None:
            heard.append(threading.get_ident())
            if len(heard) == 1:
                thread = threading.Thread(target=lifecycle.emit, args=(Stage.BEFORE_HEAD,))
                thread.start()
                thread.join(PATIENCE)
                entered.set()

        lifecycle.emit(Stage.BEFORE_HEAD)
        assert entered.is_set() and len(set(heard)) == 2


class TestEvents:
    def test_events_have_the_facts_of_their_stage_only(self) -> None:
        for stage in Stage:
            event = Event(stage, "edge", None, dict.fromkeys(stage.facts[:1], 1))
            for name in stage.facts:
                assert getattr(event, name) == (1 if name == stage.facts[0] else None)
            with pytest.raises(AttributeError, match=f'an event of {stage.value} has no "weather"; it has stage, side'):
                event.weather  # noqa: B018
            assert stage.value in repr(event)

    def test_can_be_copied(self) -> None:
        event = Event(Stage.AFTER_HEAD, "edge", About(1, 0), {"split": "x"})
        assert copy.copy(event).split == "x" and copy.deepcopy(event).request == About(1, 0)

    def test_events_belong_to_the_threads_request(self) -> None:
        lifecycle, seen = Lifecycle("edge"), []
        lifecycle.on("after_head")(lambda event: seen.append(event.request))
        outer, inner = About(1, 0), About(2, 1)
        with lifecycle.request(outer):
            try:
                with lifecycle.request(inner):
                    lifecycle.emit(Stage.AFTER_HEAD)
                    thread = threading.Thread(target=lifecycle.emit, args=(Stage.AFTER_HEAD,))
                    thread.start()
                    thread.join(PATIENCE)
                    raise ValueError
            except ValueError:
                pass
            lifecycle.emit(Stage.AFTER_HEAD)
            lifecycle.emit(Stage.AFTER_HEAD, inner)
        lifecycle.emit(Stage.AFTER_HEAD)
        assert seen == [inner, None, outer, inner, None]


def test_stages_are_consistent() -> None:
    for stage in Stage:
        assert stage.edge or stage.cloud, "a stage that comes nowhere"
        assert len(set(stage.facts)) == len(stage.facts) and stage.value == stage.name.lower()
        assert not {"stage", "side", "request", "facts", "self"} & set(stage.facts)
        assert Stage.of(stage.value) is stage and copy.deepcopy(stage) is stage


def test_the_listing_as_text() -> None:
    lifecycle = Lifecycle("edge")
    lifecycle.register(Noting([], ""), priority=3)
    lifecycle.register(Noting([], ""))
    lifecycle.emit(Stage.AFTER_HEAD)
    table = [line.split() for line in lines(lifecycle)]
    assert table[0] == " ".join(HEADERS).split()
    assert table[1][:4] == ["after_head", "Noting", "3", "1"] and table[2][:3] == ["Noting#2", "50", "1"]
