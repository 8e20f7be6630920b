"""Hooks from the TOML file and from installed packages; what cannot be used is one line with file and key."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from cloud_server.config import read_config
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle import Lifecycle, registry
from shared_hooks.lifecycle.registry import default, is_default, read
from tests.shared_hooks.lifecycle.left import Watchdog

HERE = "tests.shared_hooks.lifecycle.left"


@pytest.fixture(autouse=True)
def no_packages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installed packages with these entry points; none at first."""

    def install(**targets: str) -> None:
        points = [EntryPoint(name, target, registry.GROUP) for name, target in targets.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])

    install()
    return install


def loaded(tmp_path: Path, text: str, side: str = "edge") -> Lifecycle:
    file = tmp_path / "hooks.toml"
    file.write_text(f"[lifecycle]\n{text}\n")
    return read(side, file)


def names(lifecycle: Lifecycle) -> set[str]:
    return {one.name for one in lifecycle.listing()}


def test_without_a_file_there_is_the_log() -> None:
    for side in ("edge", "cloud"):
        assert names(read(side, None)) == names(default(side)) == {"log"}
        assert is_default(read(side, None))


def test_every_form(tmp_path: Path) -> None:
    lifecycle = loaded(
        tmp_path,
        f"""hooks = [
            "{HERE}:Watchdog",
            "{HERE}:made",
            "{HERE}:marked",
            {{ hook = "{HERE}:Watchdog", name = "strict", priority = "HIGHEST", options = {{ limit = 9 }} }},
            {{ hook = "{HERE}:Watchdog", priority = 51 }},
        ]""",
    )
    heads = [(one.name, one.priority) for one in lifecycle.listing() if one.stage.value == "after_head"]
    assert heads == [("strict", 0), ("Watchdog", 50), ("Watchdog#2", 50), ("Watchdog#3", 51)]
    assert [one.priority for one in lifecycle.listing() if one.name == "marked"] == [70]
    assert [hook.limit for hook in lifecycle.hooks if isinstance(hook, Watchdog)] == [3, 7, 9, 3]


def test_a_hook_has_the_stages_of_its_side(tmp_path: Path) -> None:
    text = f'hooks = ["{HERE}:Watchdog"]\nremove = ["log"]'
    for side, stage in (("edge", "after_head"), ("cloud", "after_tail")):
        assert [one.stage.value for one in loaded(tmp_path, text, side).listing()] == [stage]


def test_the_default_is_replaced_or_removed(tmp_path: Path) -> None:
    assert not loaded(tmp_path, 'remove = ["log"]').listing()
    replaced = loaded(tmp_path, f'hooks = [{{ hook = "{HERE}:Quiet", name = "log", replace = true }}]')
    assert [(one.name, one.stage.value, one.priority) for one in replaced.listing()] == [("log", "on_error", 30)]
    assert not is_default(replaced)  # a hook of the user's, whatever it is called


def test_modules_beside_the_file(tmp_path: Path) -> None:
    code = "class Beside:\n    def after_head(self, event): ...\n"
    (tmp_path / "hooks_that_lie_beside.py").write_text(code)
    assert "Beside" in names(loaded(tmp_path, 'hooks = ["hooks_that_lie_beside:Beside"]'))


def test_a_script_that_ends_itself_when_imported(tmp_path: Path) -> None:
    (tmp_path / "script_that_ends_itself.py").write_text("import sys\nsys.exit(7)\n")
    with pytest.raises(SpecError, match='importing "script_that_ends_itself" raised SystemExit: 7'):
        loaded(tmp_path, 'hooks = ["script_that_ends_itself:Hook"]')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hooks = 3", "lifecycle.hooks: expected an array"),
        ("hooks = [3]", 'lifecycle.hooks: expected "module:name" or a table, found an integer'),
        ('hooks = ["nothing"]', 'expected "module:callable", found "nothing"'),
        ('hooks = ["no_such_module:Hook"]', 'cannot import "no_such_module"'),
        (f'hooks = ["{HERE}:Watchdgo"]', 'has no "Watchdgo".*Watchdog'),
        (f'hooks = ["{HERE}:unmarked"]', "unmarked is not marked by on"),
        (f'hooks = ["{HERE}:number"]', "has no method that is called as a stage is"),
        (f'hooks = ["{HERE}:Misspelt"]', "Misspelt.on_eror: there is no such stage. Did you mean on_error"),
        (f'hooks = ["{HERE}:Awaited"]', "Awaited.after_request would not run"),
        (f'hooks = ["{HERE}:yields"]', "yields would not run"),
        (f'hooks = ["{HERE}:Lonely"]', r"Lonely.after_request is called with one argument, the event, but takes \(\)"),
        (f'hooks = ["{HERE}:Ends"]', "making it raised SystemExit: 7"),
        (f'hooks = ["{HERE}:Picky"]', "making it raised TypeError: .*needed"),
        (f'hooks = ["{HERE}:cloud_alone"]', "this side has none of its stages \\(edge\\)"),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", options = {{ limit = -1 }} }}]', "raised ValueError: the limit"),
        (f'hooks = [{{ hook = "{HERE}:marked", options = {{ limit = 1 }} }}]', "options are for classes"),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", priority = 101 }}]', "priority 101: expected an integer from 0"),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", priority = 1.5 }}]', "priority: expected an integer or a name"),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", priority = true }}]', "priority True"),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", priority = "MIDDLE" }}]', "priority 'MIDDLE'"),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", name = "log" }}]', '"log" is registered already'),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", name = "lgo", replace = true }}]', "Did you mean log"),
        (f'hooks = [{{ hook = "{HERE}:Watchdog", when = 3 }}]', "when"),
        (f'hooks = [{{ name = "{HERE}:Watchdog" }}]', "hook"),
        ('remove = ["lgo"]', 'lifecycle.remove: no hook called "lgo" is registered. Did you mean log'),
        ('remove = "log"', "lifecycle.remove"),
        ("entry_points = 3", "lifecycle.entry_points: expected true or false"),
        ("hook = []", "hook"),
    ],
)
def test_unusable_hooks(tmp_path: Path, text: str, says: str) -> None:
    for side, call in (
        ("edge", lambda: loaded(tmp_path, text)),
        ("cloud", lambda: read_config(tmp_path / "hooks.toml")),
    ):
        if side == "cloud" and "cloud_alone" in text:
            continue
        with pytest.raises(SpecError, match=says) as caught:
            call()
        assert "hooks.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.toml"):
        read("edge", tmp_path / "nowhere.toml")
    file = tmp_path / "bad.toml"
    file.write_text("[lifecycle\n")
    with pytest.raises(SpecError, match=r"bad\.toml"):
        read("edge", file)
    file.write_text('[lifecycel]\nhooks = []\n[lifecycle]\nremove = ["log"]')
    with pytest.raises(SpecError, match="lifecycel"):
        read("edge", file)
    file.write_text("lifecycle = 3")
    with pytest.raises(SpecError, match="lifecycle"):
        read("edge", file)


class TestPackages:
    def test_plugin_hooks_precede_the_files(self, no_packages: Callable[..., None], tmp_path: Path) -> None:
        no_packages(watch=f"{HERE}:Watchdog", inject=f"{HERE}:cloud_alone", made=f"{HERE}:made")
        assert names(read("edge", None)) == {"log", "watch", "made"}
        assert names(read("cloud", None)) == {"log", "watch", "made", "inject"}
        assert names(loaded(tmp_path, "entry_points = false")) == {"log"}
        assert names(loaded(tmp_path, 'remove = ["watch", "log"]')) == {"made"}
        text = f'hooks = [{{ hook = "{HERE}:Quiet", name = "watch", replace = true }}]'
        stages = {one.stage.value for one in loaded(tmp_path, text).listing() if one.name == "watch"}
        assert stages == {"on_error"}

    def test_a_servers_file_says_the_same(self, no_packages: Callable[..., None], tmp_path: Path) -> None:
        no_packages(watch=f"{HERE}:Watchdog")
        file = tmp_path / "server.toml"
        file.write_text("workers = 1\n")
        assert names(read_config(file).lifecycle) == {"log", "watch"}
        file.write_text("[lifecycle]\nentry_points = false\n")
        assert names(read_config(file).lifecycle) == {"log"}

    @pytest.mark.parametrize(
        ("target", "says"),
        [
            ("no_such_module:Hook", "loading it raised ModuleNotFoundError"),
            (f"{HERE}:nothing", "loading it raised AttributeError"),
            (f"{HERE}:Picky", "making it raised TypeError"),
            (f"{HERE}:Ends", "making it raised SystemExit"),
            (f"{HERE}:unmarked", "unmarked is not marked by on"),
            (f"{HERE}:Misspelt", "Did you mean on_error"),
        ],
    )
    def test_broken_plugin_is_named(self, no_packages: Callable[..., None], target: str, says: str) -> None:
        no_packages(broken=target)
        with pytest.raises(SpecError, match=says) as caught:
            read("edge", None)
        assert str(caught.value).startswith(f'hook "broken" of an installed package ({target}): ')
        assert "entry_points = false" in str(caught.value)  # how to go on without it

    def test_two_of_one_name(self, no_packages: Callable[..., None]) -> None:
        no_packages(log=f"{HERE}:Watchdog")
        with pytest.raises(SpecError, match='hook "log" of an installed package .* is registered already'):
            read("edge", None)
