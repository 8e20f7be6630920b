"""The tail of one step: the model's own Python runs again, on remote tensors up to the cut, and on real ones from
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import IsthmusError
from shared_hooks.generation.asking import CallReport, CallReports
from shared_hooks.generation.bank import BankReplay
from shared_hooks.generation.cut import GenerationCut
from shared_hooks.generation.head import GenerationHead, HeadCall, arguments, born
from shared_hooks.generation.hidden import InsideCalls
from shared_hooks.generation.mirror import Mirror
from shared_hooks.generation.remote_tensor import Origin, RemoteTensor
from shared_hooks.generation.results import AnswerKind, Template
from shared_hooks.modules.attach import Needed
from shared_hooks.state import Dice
from shared_hooks.tensors import ClassFinder, flatten


class NotReported(Exception):
    """The edge must report the results of its calls before the cut, and did not."""


class LearnedOnTheWay(BaseException):
    """Raised at the cut if something was learned on the way, by running what must not run. The forward starts again."""


class Tail:
    """Runs one forward from the cut (a `Runner`).

    ``arrive`` is called at the cut with the cut module's arguments and returns its result. ``modules``: those of the
    `WrappedModel` whose observers see it.
    """

    is_bare = False

    is_shown = True

    def __init__(
        self,
        cut: GenerationCut,
        paths: dict[nn.Module, str],
        template: Template,
        reports: CallReports,
        bank: list[Any],
        arrive: Callable[[Tail, tuple[Any, ...], dict[str, Any]], Any],
        find: ClassFinder,
        here: torch.device,
        needed: Needed,
        *,
        seek: bool = False,
        modules: object = None,
    ) -> None:
        self.modules = modules
        self._cut = cut
        self._paths = paths
        self._template = template
        self._reports = reports
        self._arrive = arrive
        self._find = find
        self._here = here
        self._needed = needed
        self._seek = seek
        self._learned = False
        self._counts: dict[str, int] = {}
        self._frames: list[str | None] = [""]
        self.replay = BankReplay(self._frames, bank, here, template.written)
        self.resumed = False
        self.sent: dict[Origin, torch.Tensor] = {}
        self.views: list[tuple[torch.Tensor, int]] = []
        self.born: Mirror | None = None
        self.failure: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        """As `Runner.failed`."""
        self.failure = self.failure or error

    @property
    def sees_inside(self) -> bool:
        """As `GenerationHead.sees_inside`."""
        return self._frames[-1] is not None

    def learn_written(self, tensor: torch.Tensor) -> None:
        """Called before a remote value is written into a tensor of this side.

        Raises `LearnedOnTheWay` if the code around the cut has created that tensor: in the next attempt it is remote,
        too.
        """
        line = self.replay.made.get(tensor.untyped_storage()._cdata)
        if line is not None and not self.resumed:
            self._template.written.add(line)
            raise LearnedOnTheWay

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `Runner.call`."""
        if self.resumed:  # entered by observers, which come first
            return forward(*args, **kwargs)
        path = self._paths.get(module)
        if path is None or self._frames[-1] is None:
            return forward(*args, **kwargs)
        count = self._counts[path] = self._counts.get(path, 0) + 1
        if path == self._cut.path and count == self._cut.number:
            self.replay.off()
            self._needed.called.add(module)
            if self._learned:
                raise LearnedOnTheWay
            return self._at_the_cut(path, count, args, kwargs)
        if path in self._cut.above:
            self._frames.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self._frames.pop()
        self._needed.called.add(module)
        if self._seek and self.born is None:
            self.born = born(args, kwargs, self._here)
        given = arguments(args, kwargs)
        for one in given:
            if type(one) is RemoteTensor:
                break
        else:
            return self._entered(forward, args, kwargs)
        reported = self._reports.calls.get((path, count))
        alone = None if reported is None or reported.inner else reported.alone
        is_clean = alone is not None and not alone.memory.writes
        if is_clean and self._template.kinds.get((path, count)) is AnswerKind.SKIPPED:
            return alone
        return self._before_the_cut(path, count, forward, args, kwargs, given, reported)

    def _at_the_cut(self, path: str, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._seek and self.born is None:
            self.born = born(args, kwargs, self._here)
        self.replay.finish()
        reported = self._reports.calls.get((path, count))
        for one in () if reported is None else reported.inner:
            self._hooked(one)
        output = self._arrive(self, args, kwargs)
        self.resumed = self.is_bare = True
        return output

    def _before_the_cut(
        self,
        path: str,
        count: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        reported: CallReport | None,
    ) -> Any:
        kind = self._template.kinds.get((path, count))
        if kind is None:
            kind, output = self._tried(forward, args, kwargs, given)
            self._learned = True
            self._template.learn(path, count, kind)
        elif kind is AnswerKind.ENTERED:
            output = self._entered(forward, args, kwargs)
        if kind is AnswerKind.ENTERED:
            return output if reported is None else reported.completed(output, self._find)
        if reported is None:
            raise NotReported(f"what {path} gives is not reported")
        for one in reported.inner:
            self._hooked(one)
        return reported.result(given, self._find)

    def _tried(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> tuple[AnswerKind, Any]:
        dice = Dice()
        try:
            output = self._entered(forward, args, kwargs)
            _, leaves = flatten(output)
        except IsthmusError:  # a remote tensor was read, or a value is of an unknown kind
            return AnswerKind.SKIPPED, None
        except Exception:  # there is no kernel without data for it
            return AnswerKind.SKIPPED, None
        finally:
            dice.restore()  # random numbers drawn here must not advance the generators
        known = {id(one) for one in given}
        hangs = all(type(leaf) is RemoteTensor or id(leaf) in known for leaf in leaves)
        return (AnswerKind.SKIPPED, None) if hangs else (AnswerKind.ENTERED, output)

    def _entered(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._frames.append(None)
        try:
            return forward(*args, **kwargs)
        finally:
            self._frames.pop()

    def _hooked(self, call: CallReport) -> None:
        """Run the hooks inside a skipped module on what its modules returned: transformers collects results
        with them.
        """
        for one in call.inner:
            self._hooked(one)
        module = next((module for module, path in self._paths.items() if path == call.path), None)
        output = call.result([], self._find)
        for hook in () if module is None else list(module._forward_hooks.values()):
            hook(module, (), output)


class Middle(Tail):
    """Runs one forward from the cut to a later one, ``second``, where it ends like a head (`head`). ``look``: observes
    what its calls change.
    """

    def __init__(self, second: GenerationCut, look: InsideCalls | None, *tail: Any, **options: Any) -> None:
        super().__init__(*tail, **options)
        self.head = GenerationHead(second, self._paths, self._here, self._needed, modules=self.modules, look=look)
        self.head.share(self._frames, self._counts)

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `Runner.call`."""
        if self.resumed:
            return self.head.call(module, forward, args, kwargs)
        return super().call(module, forward, args, kwargs)

    def _at_the_cut(self, path: str, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super()._at_the_cut(path, count, args, kwargs)
        self.is_bare = False
        call = HeadCall(path, count, arguments(args, kwargs))
        call.output = output
        self.head.calls.append(call)
        return output
